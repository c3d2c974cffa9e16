#pragma once
#include "cuda/decode/range_task.cuh"
#include "cuda/decode/rows.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "numerics/block.h"
#include "numerics/reference.h"
#include "plan/cache_access.h"

// What comes before a group's sums: its queries split into planes, and its rows' references (docs/numerics.md, sections
// 3, 5 and 6): by a kernel of its own, or by every CTA that sums keys of the group for itself.
namespace fold::cuda {

constexpr int kScoredKeys = static_cast<int>(numerics::kScoredKeys);

/// Rows: how many a group may have.
template <int D, int Rows>
struct PrepareShared {
  static constexpr int kScoredRows = 4;  // rows whose logits are here at once
  alignas(16) int8_t a_split[Rows * D], b_split[Rows * D], a[Rows * D], b[Rows * D];  // as in GroupState
  float logits[kScoredRows][kScoredKeys];  // samples first, then what is counted once
  RowState rows[Rows];
  float depth[Rows];
  GroupHead head;  // its first part
  unsigned largest_scale, largest_bound;
  int exponents, settled;
  unsigned long long nan;  // rows
};

/// Splits query row r into planes.
template <int D, int Rows>
__device__ void split_query(const plan::DecodeParams& p, int64_t q_offset, int r, int lane,
                            PrepareShared<D, Rows>& shared) {
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

/// Logits of one key, h and l (null: level 0) its planes, for the rows r0, r0 + step, ... below `end`, Most at most.
template <int D, int Rows, int Most>
__device__ void score_key(const uint8_t* h, const uint8_t* l, float e_k, int r0, int step, int end, int row_begin,
                          int i, PrepareShared<D, Rows>& shared) {
  int high[Most] = {}, low[Most] = {};
#pragma unroll
  for (int piece = 0; piece < D / 32; ++piece) {
    const uint4 top = reinterpret_cast<const uint4*>(h)[piece];
    const EvenOdd key = l == nullptr ? codes_of(top) : values_of(top, reinterpret_cast<const uint4*>(l)[piece]);
#pragma unroll
    for (int j = 0; j < Most; ++j) {
      const int r = r0 + j * step;
      if (r >= end) break;
      const auto plane = [&](const int8_t* of, int half) {
        return *reinterpret_cast<const uint4*>(of + r * D + half * (D / 2) + 16 * piece);
      };
      high[j] = dot_bytes(key.odd, plane(shared.a_split, 1), dot_bytes(key.even, plane(shared.a_split, 0), high[j]));
      if (l != nullptr)
        low[j] = dot_bytes(key.odd, plane(shared.b_split, 1), dot_bytes(key.even, plane(shared.b_split, 0), low[j]));
    }
  }
#pragma unroll
  for (int j = 0; j < Most; ++j) {
    const int r = r0 + j * step;
    if (r >= end) break;
    const RowState& row = shared.rows[r];
    const int dot = l == nullptr ? centred(high[j], row.sum_a) : 256 * high[j] + low[j];
    shared.logits[r - row_begin][i] = numerics::mul(logit(dot, unit_of_level(row.e_q, l != nullptr)), e_k);
  }
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

/// Declares a group's references and what else its sums need to know, into `shared` and, for `keeps`, into the group's
/// state. v: what the token sees. All threads of a CTA, at least kScoredKeys. False: some page is not in the pool.
template <int D, int Rows>
__device__ bool prepare_group(const Step& step, const RangeTask& task, bool keeps, PrepareShared<D, Rows>& shared) {
  using Shared = PrepareShared<D, Rows>;
  const plan::DecodeParams& p = step.params;
  const Visible& v = task.visible;
  const int rows = task.rows, warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int batch = task.batch, kv_head = task.kv_head, t = task.token;
  const int thread = static_cast<int>(threadIdx.x);
  // The keys scored: the samples first, then what is counted once.
  const int n = v.count();
  const int64_t rest = n > numerics::kScoredKeys ? n - 1 - numerics::kNewest : 0;
  const int sampled = rest > 0 ? numerics::kSamples : 0;
  const int scored = rest > 0 ? kScoredKeys : n;
  const int together = static_cast<int>(blockDim.x) / kScoredKeys;  // rows that threads of their own score
  const int first_row = thread / kScoredKeys, i = thread % kScoredKeys;
  const uint8_t *h = nullptr, *l = nullptr;
  float e_k = 0;
  if (i < scored && first_row < together) {
    const int logical = rest == 0      ? v.first + i
                        : i < sampled  ? v.first + static_cast<int>(numerics::sample_key(i, rest))
                        : i == sampled ? v.first
                                       : v.position - numerics::kNewest + (i - sampled);
    const int key = v.physical(logical), slot = slot_of(p, key), page_size = static_cast<int>(p.cache.layout.page_size);
    const int id = p.block_table[batch * p.block_table_stride + key / page_size];
    if (id >= 0 && id < p.cache.num_pages) {
      const plan::HeadPage page = plan::head_page(p.cache, id, kv_head);
      h = page.k_h + int64_t{slot} * (D / 2);
      if (p.cache.layout.k_bits > 4) l = page.k_l + int64_t{slot} * (D / 2);
      ptx::prefetch(h);  // needed only once the queries are split
      if (l != nullptr) ptx::prefetch(l);
      e_k = numerics::from_bf16(page.k_scale[slot / kTile * kTile + numerics::scale_slot(slot % kTile)]);
    }
  }
  if (thread == 0) {
    shared.largest_scale = shared.largest_bound = shared.exponents = shared.settled = shared.nan = 0;
  }
  for (int r = thread; r < rows; r += blockDim.x) {
    const int head = kv_head * rows + r;
    shared.depth[r] = p.depth == nullptr
                          ? INFINITY
                          : p.depth[batch * p.depth_stride_b + t * p.depth_stride_t + head * p.depth_stride_h];
  }
#pragma unroll 1
  for (int r = warps - 1 - warp; r < rows; r += warps) {
    split_query(p, batch * p.q_stride_b + t * p.q_stride_t + (kv_head * rows + r) * p.q_stride_h, r, lane, shared);
  }
  ScaleSurvey survey = survey_scales(p, v, batch, kv_head);
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
  for (int row0 = 0; row0 < rows; row0 += Shared::kScoredRows) {
    const int end = min(rows, row0 + Shared::kScoredRows);
    if (h != nullptr) {
      score_key<D, Rows, Shared::kScoredRows / 2>(h, l, e_k, row0 + first_row, together, end, row0, i, shared);
      if (together == 1) {
        score_key<D, Rows, Shared::kScoredRows / 2>(h, l, e_k, row0 + Shared::kScoredRows / 2, together, end, row0, i,
                                                    shared);
      }
    }
    __syncthreads();
    if (const int r = row0 + warp; r < end) {
      const numerics::Reference declared = declare(shared.logits[warp], sampled, scored, rest, lane);
      if (lane == 0) {
        const bool bad_key = shared.largest_scale >= 0x7F80;
        const numerics::Gates asked = p.gates != nullptr ? step.gates : numerics::gates_for_depth(shared.depth[r]);
        RowState& row = shared.rows[r];
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
  const GroupState& g = task.g;
  if (thread == 0) {
    const bool corrected = p.cache.layout.tail && p.window_left < 0;
    GroupHead& head = shared.head;
    head.fit_mark = corrected ? static_cast<int>(plan::last_mark(v.position - (kTile - 1))) : 0;
    head.typical = shared.settled > 0 ? numerics::typical_exponent(shared.exponents, shared.settled) : 0;
    head.outliers = numerics::outlier_depth(static_cast<uint16_t>(shared.largest_bound), head.typical) > 0.0f;
    head.nan = shared.nan;
    head.active = ~head.nan & (rows == 64 ? ~uint64_t{0} : (uint64_t{1} << rows) - 1);
    if (keeps) {  // what others count in it is left alone
      g.head->visible = v;
      g.head->fit_mark = head.fit_mark;
      g.head->typical = head.typical;
      g.head->outliers = head.outliers;
      g.head->nan = head.nan;
      g.head->active = head.active;
    }
  }
  if (keeps) {
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
  }
  __syncthreads();
  return true;
}

}  // namespace fold::cuda
