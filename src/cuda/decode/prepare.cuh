#pragma once
#include "cuda/decode/group_state.cuh"
#include "cuda/decode/rows.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/launch_order.cuh"
#include "numerics/block.h"
#include "numerics/reference.h"
#include "plan/cache_access.h"

// The first kernel of a decode step: one CTA a group finds what the token sees, splits its queries into planes and
// declares its rows' references (docs/numerics.md, sections 3, 5 and 6).
namespace fold::cuda {

constexpr int kScoredRows = 4;  ///< rows whose logits are in shared memory at once
// A thread scores one key, for one of those rows after the other or, where few groups leave the device idle, for one
// row alone.
constexpr int kPrepareThreads = static_cast<int>(numerics::kScoredKeys);
constexpr int kMostPrepareThreads = kScoredRows * kPrepareThreads;

template <int D>
struct PrepareShared {
  alignas(16) int8_t a_split[kMaxRows * D], b_split[kMaxRows * D];
  float logits[kScoredRows][numerics::kScoredKeys];  // samples first, then what is counted once
  float e_q[kMaxRows], margin[kMaxRows];
  int sum_a[kMaxRows], sum[kMaxRows];
  unsigned largest_scale;
  int exponents, settled;
  unsigned long long nan;  // rows
};

/// Splits query row r into planes.
template <int D>
__device__ void split_query(const Step& step, const GroupState& g, int64_t q_offset, int r, int lane,
                            PrepareShared<D>& shared) {
  constexpr int N = D / 32;
  float x[N];
  for (int i = 0; i < N; ++i) {
    const float q = load_element(step.params.q, step.params.q_dtype, q_offset + lane * N + i);
    x[i] = numerics::mul(q, step.params.qk_scale);
  }
  rotate_row<D>(x, lane);
  unsigned amax = 0;  // magnitudes order like their bits, NaN above all
  for (int i = 0; i < N; ++i) amax = max(amax, numerics::bits_of(x[i]) & 0x7FFFFFFFu);
  amax = __reduce_max_sync(kWarp, amax);
  const uint16_t scale = numerics::row_scale(numerics::float_of(amax));
  const float e = numerics::from_bf16(scale);
  int squares = 0, sum_a = 0, sum_b = 0;
  for (int i = 0; i < N; ++i) {
    int a = 0, b = 0;
    if (scale != numerics::kBf16Nan) {
      const float va = numerics::clamp_int8(numerics::rne(numerics::div(x[i], e)));
      const float rest = numerics::mul(numerics::sub(x[i], numerics::mul(va, e)), 256.0f);
      a = static_cast<int>(va);
      b = static_cast<int>(numerics::clamp_int8(numerics::rne(numerics::div(rest, e))));
    }
    squares += a * a;
    sum_a += a;
    sum_b += b;
    const int c = lane * N + i, split = r * D + c % 2 * (D / 2) + c / 2;
    shared.a_split[split] = g.a_split[split] = static_cast<int8_t>(a);
    shared.b_split[split] = g.b_split[split] = static_cast<int8_t>(b);
    g.a[r * D + c] = static_cast<int8_t>(a);
    g.b[r * D + c] = static_cast<int8_t>(b);
  }
  squares = __reduce_add_sync(kWarp, squares);
  sum_a = __reduce_add_sync(kWarp, sum_a);
  sum_b = __reduce_add_sync(kWarp, sum_b);
  if (lane != 0) return;
  shared.e_q[r] = e;
  shared.margin[r] =
      numerics::mul(numerics::kMarginFactor, numerics::mul(e, numerics::sqrt_rn(static_cast<float>(squares))));
  shared.sum_a[r] = sum_a;
  shared.sum[r] = 256 * sum_a + sum_b;
}

/// The page section pointers of the page that holds a physical key.
__device__ inline plan::HeadPage page_of(const plan::DecodeParams& p, int batch, int kv_head, int key) {
  const int page = key / static_cast<int>(p.cache.layout.page_size);
  return plan::head_page(p.cache, p.block_table[batch * p.block_table_stride + page], kv_head);
}
__device__ inline int slot_of(const plan::DecodeParams& p, int key) {
  return key % static_cast<int>(p.cache.layout.page_size);
}

/// Of one thread's share of the pages that hold visible keys: whether the table and the pool have them.
__device__ inline bool pages_exist(const plan::DecodeParams& p, const Visible& v, int batch, int64_t max_pages) {
  const int page_size = static_cast<int>(p.cache.layout.page_size), last = v.last_physical() / page_size;
  if (last >= max_pages) return false;
  bool exist = true;
  for (int i = v.first / page_size + threadIdx.x; i <= last; i += blockDim.x) {
    const int page = p.block_table[batch * p.block_table_stride + i];
    exist = exist && page >= 0 && page < p.cache.num_pages;
  }
  return exist;
}

struct ScaleSurvey {
  unsigned largest = 0;            // visible V scale as bf16 bits; NaN, which orders above all, if a key is poisoned
  int exponents = 0, settled = 0;  // sum over the settled blocks' bounds, and how many there are
};

/// Of one thread's share of the tiles.
__device__ inline ScaleSurvey survey_scales(const plan::DecodeParams& p, const Visible& v, int batch, int kv_head) {
  ScaleSurvey survey;
  for (int tile = v.first / kTile + threadIdx.x; tile < v.tiles(); tile += blockDim.x) {
    const plan::HeadPage page = page_of(p, batch, kv_head, tile * kTile);
    const int slot = slot_of(p, tile * kTile);
    if (v.whole(tile)) {
      const uint16_t bound = page.bound[slot / kTile];
      survey.largest = max(survey.largest, unsigned{bound});
      survey.exponents += v.settled(tile) ? numerics::pow2_ceil_exponent(bound) : 0;
      survey.settled += v.settled(tile);
      continue;
    }
    for (uint64_t mask = v.mask(tile); mask != 0; mask &= mask - 1) {
      const int at = slot + numerics::scale_slot(__ffsll(static_cast<long long>(mask)) - 1);
      survey.largest = max(survey.largest, unsigned{page.v_scale[at]});
      if (page.k_scale[at] == numerics::kBf16Nan) survey.largest = max(survey.largest, unsigned{numerics::kBf16Nan});
    }
  }
  return survey;
}

__device__ inline int64_t warp_sum(int64_t value) {
  for (int s = 16; s > 0; s /= 2) value += __shfl_xor_sync(kWarp, value, s);
  return value;
}

/// The reference of a row from its logits: `sampled` samples (128 or 0), then what is counted once. A warp's work.
__device__ inline numerics::Reference declare(const float* logits, int sampled, int scored, int64_t rest, int lane) {
  constexpr int kMost = (numerics::kScoredKeys + 31) / 32;
  int key[kMost];
  bool counted[kMost];
  int largest = ordered(-INFINITY);
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int at = lane + 32 * i;
    key[i] = at < scored ? ordered(logits[at]) : ordered(-INFINITY);
    counted[i] = at >= sampled;
    largest = max(largest, key[i]);
  }
  largest = __reduce_max_sync(kWarp, largest);
  for (int trimmed = 0; trimmed < numerics::kTrimmed && sampled > 0; ++trimmed) {
    int best = -1, most = INT_MIN;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (counted[i] || key[i] < most || (best >= 0 && key[i] == most)) continue;
      most = key[i];
      best = i;
    }
    const int top = __reduce_max_sync(kWarp, best < 0 ? INT_MIN : most);
    const unsigned who = __ballot_sync(kWarp, best >= 0 && most == top);
    if (lane != __ffs(static_cast<int>(who)) - 1) continue;
#pragma unroll
    for (int i = 0; i < kMost; ++i) counted[i] |= i == best;
  }
  const float m = from_ordered(largest);
  numerics::ScoreSums once, samples;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const uint32_t w = lane + 32 * i < scored ? numerics::fix(numerics::sub(from_ordered(key[i]), m)) : 0;
    numerics::add_score(counted[i] ? once : samples, w);
  }
  once = {warp_sum(once.weights), warp_sum(once.squares)};
  samples = {warp_sum(samples.weights), warp_sum(samples.squares)};
  return numerics::declared_reference(m, once, samples, rest);
}

/// What a group without visible keys returns.
template <int D>
__device__ void write_unseen(const Step& step, int64_t token, int kv_head) {
  const plan::DecodeParams& p = step.params;
  const int rows = step.workspace.rows, batch = token / p.tokens, t = token % p.tokens;
  for (int i = threadIdx.x; i < rows * D; i += blockDim.x) {
    const int head = kv_head * rows + i / D;
    if (p.numerator != nullptr) {
      p.numerator[(token * p.heads + head) * D + i % D] = 0;
    } else {
      store_element(0.0f, p.out, p.out_dtype,
                    batch * p.out_stride_b + t * p.out_stride_t + head * p.out_stride_h + i % D);
    }
  }
  for (int r = threadIdx.x; r < rows; r += blockDim.x) {
    const int head = kv_head * rows + r;
    const int64_t at = token * p.heads + head;
    if (p.numerator != nullptr) {
      p.denominator[3 * at] = p.denominator[3 * at + 1] = p.denominator[3 * at + 2] = 0;
      p.grid[3 * at] = -INFINITY;
      p.grid[3 * at + 1] = p.grid[3 * at + 2] = 0.0f;
      continue;
    }
    if (p.lse != nullptr) p.lse[(batch * p.heads + head) * p.tokens + t] = -INFINITY;
    if (p.kept_fraction != nullptr) p.kept_fraction[at] = 0.0f;
    if (p.dropped_mass != nullptr) p.dropped_mass[at] = 0.0f;
    if (p.recomputed != nullptr) p.recomputed[at] = 0;
  }
  if (threadIdx.x == 0 && p.bytes_read != nullptr) {
    p.bytes_read[token * p.cache.layout.n_kv_heads + kv_head] = 0;
  }
}

/// Sets every sum of a group to zero.
template <int D>
__device__ void clear_group(const GroupState& g, int rows) {
  for (int i = threadIdx.x; i < rows * D; i += blockDim.x) g.num[i] = 0;
  for (int i = threadIdx.x; i < rows * numerics::kRank; i += blockDim.x) g.t[i] = 0;
  for (int r = threadIdx.x; r < rows; r += blockDim.x) g.sums[r] = {0, 0, 0, 0, ordered(-INFINITY)};
}

template <int D>
__global__ __launch_bounds__(kMostPrepareThreads) void prepare_kernel(const __grid_constant__ Step step) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<PrepareShared<D>*>(shared_bytes);
  const plan::DecodeParams& p = step.params;
  const int rows = step.workspace.rows, warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int kv_heads = static_cast<int>(p.cache.layout.n_kv_heads);
  const int64_t index = blockIdx.x, token = index / kv_heads;
  const int kv_head = index % kv_heads, batch = token / p.tokens, t = token % p.tokens;
  const GroupState g = step.workspace.group(index);

  for (int i = threadIdx.x; i < Workspace::kQueueEntries; i += blockDim.x) {
    step.workspace.queue_entries()[index * Workspace::kQueueEntries + i] = -1;
  }
  if (index == 0 && threadIdx.x == 0) *step.workspace.queue() = {0, 0, 0};
  Visible v;
  const bool seen = find_visible(p, batch, t, v);
  if (!__syncthreads_and(seen && pages_exist(p, v, batch, step.max_pages))) {
    if (threadIdx.x == 0) g.head->seen = 0;
    return write_unseen<D>(step, token, kv_head);
  }
  // The keys scored: the samples first, then what is counted once.
  const int n = v.count();
  const int64_t rest = n > numerics::kScoredKeys ? n - 1 - numerics::kNewest : 0;
  const int sampled = rest > 0 ? numerics::kSamples : 0;
  const int scored = rest > 0 ? static_cast<int>(numerics::kScoredKeys) : n;
  const auto scored_key = [&](int i) {
    if (rest == 0) return v.first + i;
    if (i < sampled) return v.first + static_cast<int>(numerics::sample_key(i, rest));
    return i == sampled ? v.first : v.position - numerics::kNewest + (i - sampled);
  };
  const int level = p.cache.layout.k_bits == 4 ? 0 : 1;
  const int first_row = static_cast<int>(threadIdx.x) / kPrepareThreads,
            i = static_cast<int>(threadIdx.x) % kPrepareThreads;
  const uint8_t *h = nullptr, *l = nullptr;
  const uint16_t* key_scale = nullptr;
  if (i < scored) {
    const int key = v.physical(scored_key(i)), slot = slot_of(p, key);
    const plan::HeadPage page = page_of(p, batch, kv_head, key);
    h = page.k_h + int64_t{slot} * (D / 2);
    l = level == 0 ? h : page.k_l + int64_t{slot} * (D / 2);
    key_scale = &page.k_scale[slot / kTile * kTile + numerics::scale_slot(slot % kTile)];
    ptx::prefetch(first_row % 2 == 0 ? h : l);  // needed only once the queries are split
  }

  clear_group<D>(g, rows);
  if (threadIdx.x == 0) shared.largest_scale = shared.exponents = shared.settled = shared.nan = 0;
  __syncthreads();
  for (int r = warp; r < rows; r += warps) {
    const int64_t offset = batch * p.q_stride_b + t * p.q_stride_t + (kv_head * rows + r) * p.q_stride_h;
    split_query<D>(step, g, offset, r, lane, shared);
  }
  ScaleSurvey survey = survey_scales(p, v, batch, kv_head);
  survey = {__reduce_max_sync(kWarp, survey.largest), __reduce_add_sync(kWarp, survey.exponents),
            __reduce_add_sync(kWarp, survey.settled)};
  if (lane == 0) {
    atomicMax(&shared.largest_scale, survey.largest);
    atomicAdd(&shared.exponents, survey.exponents);
    atomicAdd(&shared.settled, survey.settled);
  }
  __syncthreads();
  const bool bad_key = shared.largest_scale >= 0x7F80;
  const int e_exponent = bad_key ? 0 : numerics::pow2_ceil_exponent(static_cast<uint16_t>(shared.largest_scale));

  for (int row0 = 0; row0 < rows; row0 += kScoredRows) {
    const int some = min(kScoredRows, rows - row0);
    for (int j = first_row; j < some && i < scored; j += blockDim.x / kPrepareThreads) {
      const int r = row0 + j;
      const int8_t *const a = shared.a_split + r * D, *const b = shared.b_split + r * D;
      const int dot = level == 0 ? dot_h<D>(h, a, shared.sum_a[r]) : dot_hl<D>(h, l, a, b);
      const float unit = unit_of_level(shared.e_q[r], level);
      shared.logits[j][i] = numerics::mul(logit(dot, unit), numerics::from_bf16(*key_scale));
    }
    __syncthreads();
    if (warp < some) {
      const int r = row0 + warp, head = kv_head * rows + r;
      const numerics::Reference declared = declare(shared.logits[warp], sampled, scored, rest, lane);
      if (lane == 0) {
        const float depth = p.depth == nullptr
                                ? INFINITY
                                : p.depth[batch * p.depth_stride_b + t * p.depth_stride_t + head * p.depth_stride_h];
        const numerics::Gates asked = p.gates != nullptr ? step.gates : numerics::gates_for_depth(depth);
        RowState& row = g.rows[r];
        row.z = numerics::add(declared.z, p.reference_shift);
        row.spread = declared.spread;
        row.e_q = shared.e_q[r];
        row.margin = shared.margin[r];
        row.gates = numerics::widened(asked, declared.spread);
        row.e_exponent = e_exponent;
        row.shrunk = 0;
        row.fit_shift = static_cast<int>(fminf(fmaxf(ceilf(numerics::sub(18.0f, asked.v_h)), 0.0f), 24.0f));
        row.sum_a = shared.sum_a[r];
        row.sum = shared.sum[r];
        if (bad_key || !numerics::is_finite(row.e_q)) row.z = numerics::quiet_nan();
        if (!numerics::is_finite(row.z)) atomicOr(&shared.nan, 1ull << r);
      }
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const uint64_t nan = shared.nan;
  const bool corrected = p.cache.layout.tail && p.window_left < 0;
  GroupHead& head = *g.head;
  head.visible = v;
  head.seen = 1;
  head.fit_mark = corrected ? static_cast<int>(plan::last_mark(v.position - (kTile - 1))) : 0;
  head.typical = shared.settled > 0 ? numerics::typical_exponent(shared.exponents, shared.settled) : 0;
  head.run = 0;
  head.arrivals = 0;
  head.nan = nan;
  head.active = ~nan & (rows == 64 ? ~uint64_t{0} : (uint64_t{1} << rows) - 1);
  head.recomputed = 0;
  head.bytes = 0;
}

}  // namespace fold::cuda
