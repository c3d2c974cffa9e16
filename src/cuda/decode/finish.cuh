#pragma once
#include "cuda/decode/prepare.cuh"

// What follows a group's sums: rows that are not done run again, or the results are written (docs/numerics.md,
// section 8). The work of the CTA that added the last sums.
namespace fold::cuda {

/// Of a head, in log2 units; -inf without one.
__device__ inline float sink_of(const plan::DecodeParams& p, int head) {
  return p.sinks == nullptr ? -INFINITY : numerics::mul(p.sinks[head], numerics::kLog2E);
}

/// num[lane N .. lane N + N - 1] of a row (N = D / 32) with the tail's correction. A warp's work.
template <int D>
__device__ void load_numerator(const Step& step, const GroupState& g, int batch, int kv_head, int r, int lane,
                               int64_t (&num)[D / 32]) {
  constexpr int N = D / 32;
  const plan::DecodeParams& p = step.params;
  const auto* from = &g.num[static_cast<int64_t>(r) * D + lane * N];
  unsigned long long sum[N];
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = __ldcg(from + i);
  if (const int mark = g.head->fit_mark; mark > 0) {
    const plan::HeadPage page = page_of(p, batch, kv_head, mark - 1);
    const int64_t direction = plan::fit_slot(mark, p.cache.layout.page_size) * numerics::kRank;
    // Lane j < 16 brings direction j's.
    const int mine = lane % numerics::kRank;
    const unsigned long long t = __ldcg(&g.t[r * numerics::kRank + mine]);
    const double unit = numerics::ldexp_exact(1.0, 12 + g.rows[r].fit_shift - g.rows[r].e_exponent);
    const double scale = __dmul_rn(static_cast<double>(page.fit_scale[direction + mine]), unit);
    constexpr int kAtOnce = numerics::kRank / (N <= 4 ? 2 : 4);  // directions loaded before they are used
#pragma unroll 1
    for (int first = 0; first < numerics::kRank; first += kAtOnce) {
      struct alignas(N) Channels {
        int8_t of_lane[N];
      } out[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        out[j] = *reinterpret_cast<const Channels*>(page.fit_out + (direction + first + j) * D + lane * N);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const unsigned long long t_j = __shfl_sync(kWarp, t, first + j);
        const double scale_j = __shfl_sync(kWarp, scale, first + j);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          double phi = rint(__dmul_rn(static_cast<double>(out[j].of_lane[i]), scale_j));
          if (!(fabs(phi) <= 2147483647.0)) phi = 0;
          sum[i] += t_j * static_cast<unsigned long long>(static_cast<long long>(phi));
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) num[i] = static_cast<int64_t>(sum[i]);
}

/// Visible keys of the tiles that [key_begin, key_end) touches.
__device__ inline int64_t visible_within(const Visible& v, int64_t key_begin, int64_t key_end) {
  int64_t keys = 0;
  const TileRange range = tiles_within(v, key_begin, key_end);
  for (int tile = range.begin; tile < range.end; ++tile) keys += __popcll(v.mask(tile));
  return keys;
}

__device__ inline numerics::RowMass mass_of(const RowSums& sums, int n) {
  return {static_cast<int64_t>(__ldcg(&sums.den)), static_cast<int64_t>(__ldcg(&sums.mass)), n,
          from_ordered(__ldcg(&sums.peak))};
}

/// Section 8: which rows run again, with a corrected reference or a finer grid.
__device__ inline bool correct_row(const GroupState& g, int r, int n) {
  RowState& row = g.rows[r];
  const numerics::RowMass left = mass_of(g.sums[r], n);
  if (!numerics::reference_holds(left.den)) {
    row.z = numerics::corrected_z(row.z, left);
    return true;
  }
  const int bits = numerics::finer_bits(left, row.spread, row.e_exponent, row.shrunk);
  row.e_exponent -= bits;
  row.shrunk += bits;
  return bits != 0;
}

template <int D>
__device__ void write_row(const Step& step, const GroupState& g, int64_t token, int kv_head, int r, int lane) {
  constexpr int N = D / 32;
  const plan::DecodeParams& p = step.params;
  const int batch = token / p.tokens, t = token % p.tokens, head = kv_head * step.workspace.rows + r;
  const int64_t at = token * p.heads + head;
  const RowState& row = g.rows[r];
  const int64_t den = static_cast<int64_t>(__ldcg(&g.sums[r].den));
  const bool nan = (g.head->nan >> r & 1) != 0;
  int64_t num[N];
  load_numerator<D>(step, g, batch, kv_head, r, lane, num);
  if (p.numerator != nullptr) {
    for (int i = 0; i < N; ++i) p.numerator[at * D + lane * N + i] = nan ? 0 : num[i];
    if (lane != 0) return;
    p.denominator[3 * at] = nan ? 0 : den;
    p.denominator[3 * at + 1] = nan ? 0 : static_cast<int64_t>(__ldcg(&g.sums[r].mass));
    p.denominator[3 * at + 2] = nan ? 0 : visible_within(g.head->visible, p.key_begin, p.key_end);
    p.grid[3 * at] = nan ? numerics::quiet_nan() : row.z;
    p.grid[3 * at + 1] = nan ? numerics::quiet_nan() : numerics::pow2(row.e_exponent);
    p.grid[3 * at + 2] = nan ? numerics::quiet_nan() : row.spread;
    return;
  }
  const float sink = numerics::sub(sink_of(p, head), row.z);
  const numerics::RowMass mass{den, static_cast<int64_t>(__ldcg(&g.sums[r].mass)), g.head->visible.count(), 0};
  const bool valid = !nan && numerics::sums_hold(mass) && sink == sink;
  const double total = numerics::with_sink(den, sink);
  float out[N];
  for (int i = 0; i < N; ++i) out[i] = valid ? numerics::finish_channel(num[i], total, row.e_exponent) : 0.0f;
  rotate_row<D>(out, lane);
  const int64_t offset = batch * p.out_stride_b + t * p.out_stride_t + head * p.out_stride_h;
  for (int i = 0; i < N; ++i) {
    store_element(valid ? out[i] : numerics::quiet_nan(), p.out, p.out_dtype, offset + lane * N + i);
  }
  if (lane != 0) return;
  const float lse = valid ? numerics::finish_lse(row.z, total, sink) : numerics::quiet_nan();
  if (p.lse != nullptr) p.lse[(batch * p.heads + head) * p.tokens + t] = lse;
  if (p.kept_fraction != nullptr) {
    p.kept_fraction[at] = static_cast<float>(
        __ddiv_rn(static_cast<double>(__ldcg(&g.sums[r].values_read)), static_cast<double>(g.head->visible.count())));
  }
  if (p.dropped_mass != nullptr) {
    const double dropped = __ddiv_rn(static_cast<double>(__ldcg(&g.sums[r].dropped)), total);
    p.dropped_mass[at] = lse != lse ? numerics::quiet_nan() : static_cast<float>(dropped);
  }
  if (p.recomputed != nullptr) p.recomputed[at] = (g.head->recomputed >> r & 1) != 0;
}

/// Every sum of the run is in. again: shared memory. Returns whether rows run again.
template <int D>
__device__ __noinline__ bool finish_group(const Step& step, int64_t index, uint64_t& again) {
  const GroupState g = step.workspace.group(index);
  const int rows = step.workspace.rows, warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int kv_heads = static_cast<int>(step.params.cache.layout.n_kv_heads);
  if (threadIdx.x == 0) again = 0;
  __syncthreads();
  const bool may = step.params.numerator == nullptr && g.head->run < Workspace::kReruns;
  for (int r = threadIdx.x; may && r < rows; r += blockDim.x) {
    if ((g.head->active >> r & 1) == 0 || !correct_row(g, r, g.head->visible.count())) continue;
    atomicOr(reinterpret_cast<unsigned long long*>(&again), 1ull << r);
  }
  __syncthreads();
  if (threadIdx.x == 0 && again != 0) {
    g.head->recomputed |= again;
    for (int r = 0; r < rows; ++r) {
      if ((again >> r & 1) == 0 || numerics::is_finite(g.rows[r].z)) continue;
      g.head->nan |= uint64_t{1} << r;
      again &= ~(uint64_t{1} << r);
    }
    g.head->active = again;
    g.head->done = g.head->workers = 0;
    ++g.head->run;
  }
  __syncthreads();
  if (again == 0) {
    for (int r = warp; r < rows; r += warps) write_row<D>(step, g, index / kv_heads, index % kv_heads, r, lane);
    if (threadIdx.x == 0 && step.params.bytes_read != nullptr) {
      step.params.bytes_read[index] = static_cast<int64_t>(__ldcg(&g.head->bytes));
    }
    return false;
  }
  for (int r = warp; r < rows; r += warps) {
    if ((again >> r & 1) == 0) continue;
    for (int c = lane; c < D; c += 32) g.num[static_cast<int64_t>(r) * D + c] = 0;
    if (lane < numerics::kRank) g.t[r * numerics::kRank + lane] = 0;
    if (lane == 0) g.sums[r] = {0, 0, 0, 0, ordered(-INFINITY)};
  }
  return true;
}

}  // namespace fold::cuda
