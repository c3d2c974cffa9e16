#pragma once
#include "cuda/decode/group_state.cuh"
#include "cuda/decode/rows.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "numerics/block.h"
#include "numerics/reference.h"
#include "plan/cache_access.h"

// What comes before a group's sums: its queries split into planes, and its rows' references (docs/numerics.md, sections
// 3, 5 and 6). One CTA's work, a chain of latencies: what can be sent for early is.
namespace fold::cuda {

constexpr int kScoredKeys = static_cast<int>(numerics::kScoredKeys);

template <int D>
struct PrepareShared {
  static constexpr int kScoredRows = 4;  // rows whose logits are here at once
  alignas(16) int8_t a_split[kMaxRows * D], b_split[kMaxRows * D], a[kMaxRows * D], b[kMaxRows * D];  // GroupState's
  uint4 key[2 * D / 32][kScoredKeys];  // pieces of planes h, then l; samples first, then what is counted once
  float logits[kScoredRows][kScoredKeys];
  RowState rows[kMaxRows];
  unsigned largest_scale, largest_bound;
  int exponents, settled;
  unsigned long long nan;  // rows
};

/// Splits query row r into planes.
template <int D>
__device__ void split_query(const plan::DecodeParams& p, int64_t q_offset, int r, int lane, PrepareShared<D>& shared) {
  constexpr int N = D / 32;
  float x[N];
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = numerics::mul(load_element(p.q, p.q_dtype, q_offset + lane * N + i), p.qk_scale);
  rotate_row<D>(x, lane);
  unsigned amax = 0;  // magnitudes order like their bits, NaN above all
#pragma unroll
  for (int i = 0; i < N; ++i) amax = max(amax, numerics::bits_of(x[i]) & 0x7FFFFFFFu);
  amax = __reduce_max_sync(kWarp, amax);
  const uint16_t scale = numerics::row_scale(numerics::float_of(amax));
  const float e = numerics::from_bf16(scale);
  int squares = 0, sum_a = 0, sum_b = 0;
#pragma unroll 1
  for (int i = 0; i < N; ++i) {
    float channel = x[0];
#pragma unroll
    for (int j = 1; j < N; ++j) channel = i == j ? x[j] : channel;
    int a = 0, b = 0;
    if (scale != numerics::kBf16Nan) {
      const float va = numerics::clamp_int8(numerics::rne(numerics::div(channel, e)));
      const float rest = numerics::mul(numerics::sub(channel, numerics::mul(va, e)), 256.0f);
      a = static_cast<int>(va);
      b = static_cast<int>(numerics::clamp_int8(numerics::rne(numerics::div(rest, e))));
    }
    squares += a * a;
    sum_a += a;
    sum_b += b;
    const int c = lane * N + i, split = r * D + c % 2 * (D / 2) + c / 2;
    shared.a_split[split] = shared.a[r * D + c] = static_cast<int8_t>(a);
    shared.b_split[split] = shared.b[r * D + c] = static_cast<int8_t>(b);
  }
  squares = __reduce_add_sync(kWarp, squares);
  sum_a = __reduce_add_sync(kWarp, sum_a);
  sum_b = __reduce_add_sync(kWarp, sum_b);
  if (lane != 0) return;
  RowState& row = shared.rows[r];
  row.e_q = e;
  row.margin = numerics::mul(numerics::kMarginFactor, numerics::mul(e, numerics::sqrt_rn(static_cast<float>(squares))));
  row.sum_a = sum_a;
  row.sum = 256 * sum_a + sum_b;
}

/// The page section pointers of the page that holds a physical key.
__device__ inline plan::HeadPage page_of(const plan::DecodeParams& p, int batch, int kv_head, int key) {
  const int page = key / static_cast<int>(p.cache.layout.page_size);
  return plan::head_page(p.cache, p.block_table[batch * p.block_table_stride + page], kv_head);
}
__device__ inline int slot_of(const plan::DecodeParams& p, int key) {
  return key % static_cast<int>(p.cache.layout.page_size);
}

/// What the visible keys' scales say.
struct ScaleSurvey {
  bool exists = true;              // every page is in the pool
  unsigned largest = 0;            // visible V scale as bf16 bits; NaN, which orders above all, if a key is poisoned
  unsigned bound = 0;              // of the settled blocks' bounds the largest
  int exponents = 0, settled = 0;  // sum over the settled blocks' bounds, and how many there are
};

/// Of one thread's share of the tiles.
__device__ inline ScaleSurvey survey_scales(const plan::DecodeParams& p, const Visible& v, int batch, int kv_head) {
  ScaleSurvey survey;
#pragma unroll 1
  for (int tile = v.first / kTile + threadIdx.x; tile < v.tiles(); tile += blockDim.x) {
    const int id =
        p.block_table[batch * p.block_table_stride + tile * kTile / static_cast<int>(p.cache.layout.page_size)];
    if (id < 0 || id >= p.cache.num_pages) {
      survey.exists = false;
      continue;
    }
    const plan::HeadPage page = plan::head_page(p.cache, id, kv_head);
    const int slot = slot_of(p, tile * kTile);
    if (v.whole(tile)) {
      const uint16_t bound = page.bound[slot / kTile];
      survey.largest = max(survey.largest, unsigned{bound});
      survey.bound = v.settled(tile) ? max(survey.bound, unsigned{bound}) : survey.bound;
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

/// A key to score. The planes are in shared memory.
struct ScoredKey {
  float e_k;
  int level;  // -1: there is none
};

/// Finds scored key i and sends for its planes.
template <int D>
__device__ ScoredKey send_key(const plan::DecodeParams& p, int batch, int kv_head, int physical, int i, bool copies,
                              PrepareShared<D>& shared) {
  const int page_size = static_cast<int>(p.cache.layout.page_size), slot = physical % page_size;
  const int id = p.block_table[batch * p.block_table_stride + physical / page_size];
  if (id < 0 || id >= p.cache.num_pages) return {0, -1};
  const plan::HeadPage page = plan::head_page(p.cache, id, kv_head);
  const int level = p.cache.layout.k_bits > 4 ? 1 : 0;
#pragma unroll
  for (int piece = 0; copies && piece < D / 32; ++piece) {
    const int at = slot * (D / 2) + 16 * piece;
    ptx::copy_16(ptx::shared_address(&shared.key[piece][i]), page.k_h + at);
    if (level > 0) ptx::copy_16(ptx::shared_address(&shared.key[D / 32 + piece][i]), page.k_l + at);
  }
  return {numerics::from_bf16(page.k_scale[slot / kTile * kTile + numerics::scale_slot(slot % kTile)]), level};
}

/// Logits of scored key i for the rows r0, r0 + 2, ... of the kScoredRows from row_begin on that are below `end`.
template <int D>
__device__ void score_key(const ScoredKey& key, int r0, int end, int row_begin, int i, PrepareShared<D>& shared) {
  constexpr int kMost = PrepareShared<D>::kScoredRows / 2;
  int high[kMost] = {}, low[kMost] = {};
#pragma unroll
  for (int piece = 0; piece < D / 32; ++piece) {
    const uint4 h = shared.key[piece][i];
    const EvenOdd channels = key.level == 0 ? codes_of(h) : values_of(h, shared.key[D / 32 + piece][i]);
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      const int r = r0 + 2 * j;
      if (r >= end) break;
      const auto plane = [&](const int8_t* of, int half) {
        return *reinterpret_cast<const uint4*>(of + r * D + half * (D / 2) + 16 * piece);
      };
      high[j] = dot_bytes(channels.odd, plane(shared.a_split, 1),
                          dot_bytes(channels.even, plane(shared.a_split, 0), high[j]));
      low[j] =
          dot_bytes(channels.odd, plane(shared.b_split, 1), dot_bytes(channels.even, plane(shared.b_split, 0), low[j]));
    }
  }
#pragma unroll
  for (int j = 0; j < kMost; ++j) {
    const int r = r0 + 2 * j;
    if (r >= end) break;
    const RowState& row = shared.rows[r];
    const int dot = key.level == 0 ? centred(high[j], row.sum_a) : 256 * high[j] + low[j];
    shared.logits[r - row_begin][i] = numerics::mul(logit(dot, unit_of_level(row.e_q, key.level)), key.e_k);
  }
}

__device__ inline int64_t warp_sum(int64_t value) {
  for (int s = 16; s > 0; s /= 2) value += __shfl_xor_sync(kWarp, value, s);
  return value;
}
/// The same of numbers from 0 to 2^31, faster.
__device__ inline int64_t warp_sum_of_small(int64_t value) {
  const auto part = [](int64_t bits) { return int64_t{__reduce_add_sync(kWarp, static_cast<unsigned>(bits))}; };
  return (part(value >> 16) << 16) + part(value & 0xFFFF);
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
  static_assert(int64_t{kMost} << numerics::kFraction <= int64_t{1} << 31);
  once = {warp_sum_of_small(once.weights), warp_sum_of_small(once.squares)};
  samples = {warp_sum_of_small(samples.weights), warp_sum_of_small(samples.squares)};
  return numerics::declared_reference(m, once, samples, rest);
}

/// What a group without visible keys returns.
template <int D>
__device__ void write_unseen(const Step& step, int index) {
  const plan::DecodeParams& p = step.params;
  const int kv_heads = static_cast<int>(p.cache.layout.n_kv_heads), kv_head = index % kv_heads;
  const int64_t token = index / kv_heads, batch = token / p.tokens, t = token % p.tokens;
  const int rows = step.workspace.rows;
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

/// Sets to zero what CTAs add to a group. By all threads of a CTA.
__device__ inline void clear_group(const Step& step, int64_t index) {
  const GroupState g = step.workspace.group(index);
  const int rows = step.workspace.rows;
  for (int i = threadIdx.x; i < rows * step.workspace.head_dim; i += blockDim.x) g.num[i] = 0;
  for (int i = threadIdx.x; i < rows * numerics::kRank; i += blockDim.x) g.t[i] = 0;
  for (int r = threadIdx.x; r < rows; r += blockDim.x) g.sums[r] = {0, 0, 0, 0, ordered(-INFINITY)};
  if (threadIdx.x != 0) return;
  g.head->taken = 0;
  g.head->run = 0;
  g.head->done = g.head->workers = 0;
  g.head->recomputed = 0;
  g.head->bytes = 0;
  if (index == 0) *step.workspace.queue() = {};
}

/// Declares a group's references and what else its sums need to know. By the 2 kScoredKeys threads of a CTA. False: the
/// token sees no key, keys past the table, or some page that is not in the pool.
template <int D>
__device__ bool prepare_group(const Step& step, int index, PrepareShared<D>& shared) {
  constexpr int kScoredRows = PrepareShared<D>::kScoredRows;
  const plan::DecodeParams& p = step.params;
  const int kv_heads = static_cast<int>(p.cache.layout.n_kv_heads), token = index / kv_heads,
            kv_head = index % kv_heads;
  const int batch = token / static_cast<int>(p.tokens), t = token % static_cast<int>(p.tokens);
  const int rows = step.workspace.rows, warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int thread = static_cast<int>(threadIdx.x);
  Visible v;
  if (!find_visible(p, batch, t, v) || p.cache.num_pages == 0 ||
      v.last_physical() / static_cast<int>(p.cache.layout.page_size) >= step.max_pages) {
    return false;
  }
  if (thread == 0) step.workspace.group(index).head->tiles = tiles_within(v, p.key_begin, p.key_end);
  // The keys scored: the samples first, then what is counted once. Two threads a key, which take turns in the rows.
  const int n = v.count();
  const int64_t rest = n > numerics::kScoredKeys ? n - 1 - numerics::kNewest : 0;
  const int sampled = rest > 0 ? numerics::kSamples : 0;
  const int scored = rest > 0 ? kScoredKeys : n;
  const int first_row = thread / kScoredKeys, i = thread % kScoredKeys;
  ScoredKey key{0, -1};
  if (i < scored) {
    const int logical = rest == 0      ? v.first + i
                        : i < sampled  ? v.first + static_cast<int>(numerics::sample_key(i, rest))
                        : i == sampled ? v.first
                                       : v.position - numerics::kNewest + (i - sampled);
    key = send_key(p, batch, kv_head, v.physical(logical), i, first_row == 0, shared);
  }
  if (thread == 0) {
    shared.largest_scale = shared.largest_bound = shared.exponents = shared.settled = shared.nan = 0;
  }
#pragma unroll 1
  for (int r = warps - 1 - warp; r < rows; r += warps) {
    split_query(p, batch * p.q_stride_b + t * p.q_stride_t + (kv_head * rows + r) * p.q_stride_h, r, lane, shared);
  }
  for (int r = thread; r < rows; r += blockDim.x) {
    const int head = kv_head * rows + r;
    const int64_t at = batch * p.depth_stride_b + t * p.depth_stride_t + head * p.depth_stride_h;
    shared.rows[r].gates =
        p.gates != nullptr ? step.gates : numerics::gates_for_depth(p.depth == nullptr ? INFINITY : p.depth[at]);
  }
  ScaleSurvey survey = survey_scales(p, v, batch, kv_head);
  ptx::wait_copies();
  if (!__syncthreads_and(survey.exists)) return false;
  survey.largest = __reduce_max_sync(kWarp, survey.largest);
  survey.bound = __reduce_max_sync(kWarp, survey.bound);
  survey.exponents = __reduce_add_sync(kWarp, survey.exponents);
  survey.settled = __reduce_add_sync(kWarp, survey.settled);
  if (lane == 0) {
    atomicMax(&shared.largest_scale, survey.largest);
    atomicMax(&shared.largest_bound, survey.bound);
    atomicAdd(&shared.exponents, survey.exponents);
    atomicAdd(&shared.settled, survey.settled);
  }
#pragma unroll 1
  for (int row0 = 0; row0 < rows; row0 += kScoredRows) {
    const int end = min(rows, row0 + kScoredRows);
    if (key.level >= 0) score_key(key, row0 + first_row, end, row0, i, shared);
    __syncthreads();
    if (const int r = row0 + warp; r < end) {
      const numerics::Reference declared = declare(shared.logits[warp], sampled, scored, rest, lane);
      if (lane == 0) {
        const bool bad_key = shared.largest_scale >= 0x7F80;
        RowState& row = shared.rows[r];
        const numerics::Gates asked = row.gates;
        const float z = numerics::add(declared.z, p.reference_shift);
        const bool bad = bad_key || !numerics::is_finite(row.e_q) || !numerics::is_finite(z);
        row.z = bad ? numerics::quiet_nan() : z;
        row.spread = declared.spread;
        row.gates = numerics::widened(asked, declared.spread);
        row.e_exponent = bad_key ? 0 : numerics::pow2_ceil_exponent(static_cast<uint16_t>(shared.largest_scale));
        row.shrunk = 0;
        row.fit_shift = static_cast<int>(fminf(fmaxf(ceilf(numerics::sub(18.0f, asked.v_h)), 0.0f), 24.0f));
        if (bad) atomicOr(&shared.nan, 1ull << r);
      }
    }
    __syncthreads();
  }
  const GroupState g = step.workspace.group(index);
  if (thread == 0) {
    const bool corrected = p.cache.layout.tail && p.window_left < 0;
    GroupHead& head = *g.head;
    head.visible = v;
    head.fit_mark = corrected ? static_cast<int>(plan::last_mark(v.position - (kTile - 1))) : 0;
    head.typical = shared.settled > 0 ? numerics::typical_exponent(shared.exponents, shared.settled) : 0;
    head.outliers = numerics::outlier_depth(static_cast<uint16_t>(shared.largest_bound), head.typical) > 0.0f;
    head.nan = shared.nan;
    head.active = ~shared.nan & (rows == 64 ? ~uint64_t{0} : (uint64_t{1} << rows) - 1);
    if (head.active == 0) head.tiles = {0, 0};  // nothing to sum
  }
  for (int j = thread; j < rows * (D / 16); j += blockDim.x) {
    const auto copy = [j](int8_t* to, const int8_t* from) {
      reinterpret_cast<uint4*>(to)[j] = reinterpret_cast<const uint4*>(from)[j];
    };
    copy(g.a_split, shared.a_split);
    copy(g.b_split, shared.b_split);
    copy(g.a, shared.a);
    copy(g.b, shared.b);
  }
  for (int r = thread; r < rows; r += blockDim.x) g.rows[r] = shared.rows[r];
  return true;
}

}  // namespace fold::cuda
