#pragma once
#include "cuda/decode/prepare.cuh"
#include "cuda/decode/range_task.cuh"

// What follows a group's sums: rows that are not done run again, or the results are written (docs/numerics.md,
// section 8). The work of the CTA that added the last sums.
namespace fold::cuda {

/// Of a head, in log2 units; -inf without one.
__device__ inline float sink_of(const plan::DecodeParams& p, int head) {
  return p.sinks == nullptr ? -INFINITY : numerics::mul(p.sinks[head], numerics::kLog2E);
}

/// Adds the tail's correction to num[lane N .. lane N + N - 1] of row r (N = D / 32). A warp's work.
template <int D>
__device__ void correct_numerator(const Step& step, const RangeTask& task, int r, int lane,
                                  unsigned long long (&sum)[D / 32]) {
  constexpr int N = D / 32;
  const plan::DecodeParams& p = step.params;
  const GroupState& g = task.g;
  const int mark = task.fit_mark;
  const plan::HeadPage page = page_of(step, task.batch, task.kv_head, mark - 1);
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

/// Visible keys of the tiles that [key_begin, key_end) touches.
__device__ inline int64_t visible_within(const Visible& v, int64_t key_begin, int64_t key_end) {
  int64_t keys = 0;
  const TileRange range = tiles_within(v, key_begin, key_end);
  for (int tile = range.begin; tile < range.end; ++tile) keys += __popcll(v.mask(tile));
  return keys;
}

/// A group's sums of a row, as all CTAs left them. Loaded at once.
__device__ inline RowSums load_sums(const GroupState& g, int r) {
  const RowSums* const from = &g.sums[r];
  return {__ldcg(&from->den), __ldcg(&from->mass), __ldcg(&from->dropped), __ldcg(&from->values_read),
          __ldcg(&from->peak)};
}

/// The same and a lane's channels of the numerator.
template <int N>
struct SummedRow {
  RowSums sums;
  unsigned long long num[N];
};
template <int D>
__device__ SummedRow<D / 32> load_summed(const GroupState& g, int r, int lane) {
  constexpr int N = D / 32;
  SummedRow<N> row{.sums = load_sums(g, r)};
#pragma unroll
  for (int i = 0; i < N; ++i) row.num[i] = __ldcg(&g.num[r * D + lane * N + i]);
  return row;
}

/// Section 8: which rows run again, with a corrected reference or a finer grid.
__device__ inline bool correct_row(const GroupState& g, int r, const RowSums& sums, int n) {
  RowState& row = g.rows[r];
  const numerics::RowMass left{static_cast<int64_t>(sums.den), static_cast<int64_t>(sums.mass), n,
                               from_ordered(sums.peak)};
  if (!numerics::reference_holds(left.den, row.spread)) {
    row.z = numerics::corrected_z(row.z, left);
    return true;
  }
  const int bits = numerics::finer_bits(left, row.spread, row.e_exponent, row.shrunk);
  if (bits == 0) return false;
  row.e_exponent -= bits;
  row.shrunk += bits;
  return true;
}

/// What a range of keys adds to a row.
template <int D>
__device__ void write_partial(const plan::DecodeParams& p, const RangeTask& task, int r, int64_t at, int lane,
                              const RowSums& sums, const unsigned long long (&num)[D / 32]) {
  constexpr int N = D / 32;
  const RowState& row = task.g.rows[r];
  const bool nan = (task.nan >> r & 1) != 0;
#pragma unroll
  for (int i = 0; i < N; ++i) p.numerator[at * D + lane * N + i] = nan ? 0 : static_cast<int64_t>(num[i]);
  if (lane != 0) return;
  p.denominator[3 * at] = nan ? 0 : static_cast<int64_t>(sums.den);
  p.denominator[3 * at + 1] = nan ? 0 : static_cast<int64_t>(sums.mass);
  p.denominator[3 * at + 2] = nan ? 0 : visible_within(task.visible, p.key_begin, p.key_end);
  p.grid[3 * at] = nan ? numerics::quiet_nan() : row.z;
  p.grid[3 * at + 1] = nan ? numerics::quiet_nan() : numerics::pow2(row.e_exponent);
  p.grid[3 * at + 2] = nan ? numerics::quiet_nan() : row.spread;
}

template <int D, bool Tail>
__device__ void write_row(const Step& step, const RangeTask& task, int r, int lane, SummedRow<D / 32> summed) {
  constexpr int N = D / 32;
  const plan::DecodeParams& p = step.params;
  const GroupState& g = task.g;
  const int head = task.kv_head * task.rows + r;
  const int64_t at = (int64_t{task.batch} * p.tokens + task.token) * p.heads + head;
  const float z = g.rows[r].z;
  const int e_exponent = g.rows[r].e_exponent;
  const RowSums& sums = summed.sums;
  unsigned long long(&num)[N] = summed.num;
  const float sink = numerics::sub(sink_of(p, head), z);
  if (Tail && task.fit_mark > 0) correct_numerator<D>(step, task, r, lane, num);
  if (p.numerator != nullptr) return write_partial<D>(p, task, r, at, lane, sums, num);
  const auto den = static_cast<int64_t>(sums.den);
  const int count = task.visible.count();
  const bool valid =
      (task.nan >> r & 1) == 0 && numerics::sums_hold({den, static_cast<int64_t>(sums.mass), count, 0}) && sink == sink;
  const double total = numerics::with_sink(den, sink);
  float out[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    out[i] = numerics::finish_channel(static_cast<int64_t>(num[i]), total, e_exponent);
  }
  rotate_row<D>(out, lane);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = valid ? out[i] : numerics::quiet_nan();
  const int64_t offset = task.batch * p.out_stride_b + task.token * p.out_stride_t + head * p.out_stride_h;
  store_elements(out, p.out, p.out_dtype, offset + lane * N);
  // Beside it, a lane each.
  const float lse = valid ? numerics::finish_lse(z, total, sink) : numerics::quiet_nan();
  if (lane == 0 && p.lse != nullptr) p.lse[(task.batch * p.heads + head) * p.tokens + task.token] = lse;
  if (lane == 1 && p.recomputed != nullptr) p.recomputed[at] = (task.recomputed >> r & 1) != 0;
  if (lane >= 2 || (p.kept_fraction == nullptr && p.dropped_mass == nullptr)) return;
  const double part = static_cast<double>(lane == 0 ? sums.values_read : sums.dropped);
  const auto share = static_cast<float>(__ddiv_rn(part, lane == 0 ? static_cast<double>(count) : total));
  if (lane == 0 && p.kept_fraction != nullptr) p.kept_fraction[at] = share;
  if (lane == 1 && p.dropped_mass != nullptr) p.dropped_mass[at] = lse != lse ? numerics::quiet_nan() : share;
}

/// Rows `again`, of which all that is not finite is given up as NaN, are to be summed again. Returns those that are.
__device__ __noinline__ uint64_t reopen(const GroupState& g, RangeTask& task, uint64_t again) {
  task.recomputed |= again;
  for (uint64_t rest = again; rest != 0; rest &= rest - 1) {
    const int r = __ffsll(static_cast<long long>(rest)) - 1;
    if (numerics::is_finite(g.rows[r].z)) continue;
    task.nan |= uint64_t{1} << r;
    again &= ~(uint64_t{1} << r);
  }
  g.head->recomputed = task.recomputed;
  g.head->nan = task.nan;
  g.head->active = again;
  g.head->arrivals = 0;
  ++g.head->run;
  return again;
}

/// Every sum of the run is in. again: shared memory, zero. Returns whether rows run again. Tail: there may be a
/// correction.
template <int D, bool Tail>
__device__ bool finish_group(const Step& step, RangeTask& task, uint64_t& again) {
  const GroupState& g = task.g;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const bool may = step.params.numerator == nullptr && task.run < Workspace::kReruns;
  // Most groups have no more rows than warps, and end here: what is written then is on its way already.
  const SummedRow<D / 32> first = load_summed<D>(g, min(warp, task.rows - 1), lane);
  for (int r = warp; may && r < task.rows; r += warps) {
    if (lane != 0 || (task.active >> r & 1) == 0) continue;
    if (!correct_row(g, r, r == warp ? first.sums : load_sums(g, r), task.visible.count())) continue;
    atomicOr(reinterpret_cast<unsigned long long*>(&again), 1ull << r);
  }
  __syncthreads();
  if (again != 0) {
    __syncthreads();
    if (threadIdx.x == 0) again = reopen(g, task, again);
    __syncthreads();
  }
  if (again == 0) {
    for (int r = warp; r < task.rows; r += warps) {
      write_row<D, Tail>(step, task, r, lane, r == warp ? first : load_summed<D>(g, r, lane));
    }
    if (threadIdx.x == 0 && step.params.bytes_read != nullptr) {
      step.params.bytes_read[task.group] = static_cast<int64_t>(__ldcg(&g.head->bytes));
    }
    return false;
  }
  for (int r = warp; r < task.rows; r += warps) {
    if ((again >> r & 1) == 0) continue;
    for (int c = lane; c < D; c += 32) g.num[static_cast<int64_t>(r) * D + c] = 0;
    if (lane < numerics::kRank) g.t[r * numerics::kRank + lane] = 0;
    if (lane == 0) g.sums[r] = {0, 0, 0, 0, ordered(-INFINITY)};
  }
  return true;
}
/// The same where registers are short.
template <int D, bool Tail>
__device__ __noinline__ bool finish_group_apart(const Step& step, RangeTask& task, uint64_t& again) {
  return finish_group<D, Tail>(step, task, again);
}

}  // namespace fold::cuda
