#pragma once
#include "cuda/decode/group_state.cuh"
#include "cuda/decode/rows.cuh"
#include "cuda/decode/survey.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "numerics/reference.h"

// What comes before a group's sums: its queries split into planes, and its rows' references (docs/numerics.md, sections
// 3, 5 and 6). One CTA's work, a chain of latencies: what can be sent for early is.
namespace fold::cuda {

constexpr int kScoredKeys = static_cast<int>(numerics::kScoredKeys);
constexpr int kPrepareThreads = 2 * kScoredKeys;     ///< two a key
constexpr int kPreparedRows = kPrepareThreads / 32;  ///< at once, a warp each
static_assert(kPrepareThreads % 32 == 0);

template <int D>
struct PrepareShared {
  alignas(16) int8_t a_split[kPreparedRows * D], b_split[kPreparedRows * D];  // as GroupState's
  uint4 key[2 * D / 32][kScoredKeys];  // pieces of planes h, then l; samples first, then what is counted once
  float logits[kPreparedRows][kScoredKeys];
  RowState rows[kPreparedRows];
  unsigned largest_scale, largest_bound;
  int exponents, settled;
  int keys, position;      // of Visible, which takes too many registers to be kept
  unsigned long long nan;  // rows
};

/// Which keys are scored: the samples first, then what is counted once.
struct Scored {
  int all, samples, rest;  // for how many keys the samples stand
};
__device__ inline Scored scored_of(int keys) {
  if (keys <= kScoredKeys) return {keys, 0, 0};
  return {kScoredKeys, numerics::kSamples, keys - 1 - static_cast<int>(numerics::kNewest)};
}

/// What the caller gives of a row: a lane's channels of its query, and its depth.
template <int D>
struct GivenRow {
  float query[D / 32], depth;
};
template <int D>
__device__ GivenRow<D> load_row(const plan::DecodeParams& p, int batch, int token, int head, int lane) {
  GivenRow<D> row;
  load_elements(row.query, p.q, p.q_dtype,
                batch * p.q_stride_b + token * p.q_stride_t + head * p.q_stride_h + lane * (D / 32));
  row.depth = p.depth == nullptr
                  ? INFINITY
                  : p.depth[batch * p.depth_stride_b + token * p.depth_stride_t + head * p.depth_stride_h];
  return row;
}

/// Splits a query into planes, row r of the group's; it is the slot-th at work. A warp's work.
template <int D>
__device__ void split_query(const Step& step, int group, GivenRow<D> given, int r, int slot, int lane,
                            PrepareShared<D>& shared) {
  constexpr int N = D / 32;
  const GroupState g = step.workspace.group(group);
  float(&x)[N] = given.query;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = numerics::mul(x[i], step.params.qk_scale);
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
    const int c = lane * N + i, split = c % 2 * (D / 2) + c / 2;
    g.a[r * D + c] = g.a_split[r * D + split] = shared.a_split[slot * D + split] = static_cast<int8_t>(a);
    g.b[r * D + c] = g.b_split[r * D + split] = shared.b_split[slot * D + split] = static_cast<int8_t>(b);
  }
  squares = __reduce_add_sync(kWarp, squares);
  sum_a = __reduce_add_sync(kWarp, sum_a);
  sum_b = __reduce_add_sync(kWarp, sum_b);
  if (lane != 0) return;
  RowState& row = shared.rows[slot];
  row.e_q = e;
  row.margin = numerics::mul(numerics::kMarginFactor, numerics::mul(e, numerics::sqrt_rn(static_cast<float>(squares))));
  row.sum_a = sum_a;
  row.sum = 256 * sum_a + sum_b;
  row.gates = step.params.gates != nullptr ? step.gates : numerics::gates_for_depth(given.depth);
}

/// Adds up what the threads found, those that split no queries if these are enough. False: some page is not in the
/// pool. Copies sent for have arrived afterwards.
template <int D>
__device__ bool survey_group(const Step& step, const Visible& v, int batch, int kv_head, PrepareShared<D>& shared) {
  const int rows = min(step.workspace.rows, kPreparedRows),
            threads = 32 * (rows <= 2 * kPreparedRows / 3 ? kPreparedRows - rows : kPreparedRows);
  ScaleSurvey survey;
  if (static_cast<int>(threadIdx.x) < threads) survey_scales(step, v, batch, kv_head, threads, survey);
  ptx::wait_copies();
  if (!__syncthreads_and(survey.exists)) return false;
  survey.largest = __reduce_max_sync(kWarp, survey.largest);
  survey.bound = __reduce_max_sync(kWarp, survey.bound);
  survey.exponents = __reduce_add_sync(kWarp, survey.exponents);
  survey.settled = __reduce_add_sync(kWarp, survey.settled);
  if (threadIdx.x % 32 == 0) {
    atomicMax(&shared.largest_scale, survey.largest);
    atomicMax(&shared.largest_bound, survey.bound);
    atomicAdd(&shared.exponents, survey.exponents);
    atomicAdd(&shared.settled, survey.settled);
  }
  return true;
}

/// A key to score. The planes are in shared memory.
struct ScoredKey {
  float e_k;
  int level;  // -1: there is none
};

/// Sends for the planes of scored key i, in page `id` of the pool.
template <int D>
__device__ ScoredKey send_key(const plan::DecodeParams& p, int id, int kv_head, int slot, int i, bool copies,
                              PrepareShared<D>& shared) {
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

/// Logits of scored key i for every second of the `count` rows at work, from `first` on: two at a time.
template <int D>
__device__ void score_key(const ScoredKey& key, int first, int count, int i, PrepareShared<D>& shared) {
#pragma unroll 1
  for (int slot = first; slot < count; slot += 4) {
    const int of[2] = {slot, min(slot + 2, count - 1)};
    int high[2] = {}, low[2] = {};
#pragma unroll 1
    for (int piece = 0; piece < D / 32; ++piece) {
      const uint4 h = shared.key[piece][i];
      const EvenOdd channels = key.level == 0 ? codes_of(h) : values_of(h, shared.key[D / 32 + piece][i]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto plane = [&](const int8_t* rows, int half) {
          return *reinterpret_cast<const uint4*>(rows + of[j] * D + half * (D / 2) + 16 * piece);
        };
        high[j] = dot_bytes(channels.odd, plane(shared.a_split, 1),
                            dot_bytes(channels.even, plane(shared.a_split, 0), high[j]));
        low[j] = dot_bytes(channels.odd, plane(shared.b_split, 1),
                           dot_bytes(channels.even, plane(shared.b_split, 0), low[j]));
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const RowState& row = shared.rows[of[j]];
      const int dot = key.level == 0 ? centred(high[j], row.sum_a) : 256 * high[j] + low[j];
      shared.logits[of[j]][i] = numerics::mul(logit(dot, unit_of_level(row.e_q, key.level)), key.e_k);
    }
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

/// The reference of a row from its logits. A warp's work.
__device__ inline numerics::Reference declare(const float* logits, const Scored& scored, int lane) {
  constexpr int kMost = (numerics::kScoredKeys + 31) / 32;
  int key[kMost];
  bool counted[kMost];
  int largest = ordered(-INFINITY);
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int at = lane + 32 * i;
    key[i] = at < scored.all ? ordered(logits[at]) : ordered(-INFINITY);
    counted[i] = at >= scored.samples;
    largest = max(largest, key[i]);
  }
  largest = __reduce_max_sync(kWarp, largest);
  for (int trimmed = 0; trimmed < numerics::kTrimmed && scored.samples > 0; ++trimmed) {
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
    const uint32_t w = lane + 32 * i < scored.all ? numerics::fix(numerics::sub(from_ordered(key[i]), m)) : 0;
    numerics::add_score(once, counted[i] ? w : 0);
    numerics::add_score(samples, counted[i] ? 0 : w);
  }
  static_assert(int64_t{kMost} << numerics::kFraction <= int64_t{1} << 31);
  once = {warp_sum_of_small(once.weights), warp_sum_of_small(once.squares)};
  samples = {warp_sum_of_small(samples.weights), warp_sum_of_small(samples.squares)};
  return numerics::declared_reference(m, once, samples, scored.rest);
}

/// What a group without visible keys returns.
template <int D>
__device__ void write_unseen(const Step& step, int index) {
  const plan::DecodeParams& p = step.params;
  const auto [batch, t, kv_head] = place_of_group(step, index);
  const int64_t token = batch * p.tokens + t;
  const int rows = step.workspace.rows;
#pragma unroll 1
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
  const int rows = step.workspace.rows, thread = static_cast<int>(threadIdx.x);
  auto* const num = reinterpret_cast<uint4*>(g.num);
#pragma unroll 1
  for (int i = thread; i < rows * step.workspace.head_dim / 2; i += kPrepareThreads) num[i] = {0, 0, 0, 0};
#pragma unroll 1
  for (int i = thread; i < rows * numerics::kRank; i += kPrepareThreads) g.t[i] = 0;
  if (thread < rows) g.sums[thread] = {0, 0, 0, 0, ordered(-INFINITY)};
  if (thread < Workspace::kReruns) step.workspace.queue_entries()[index * Workspace::kReruns + thread] = -1;
  if (thread == 0 && index == 0) *step.workspace.queue() = {};
}

/// Declares the reference and grid of row r, the slot-th at work. A warp's work.
template <int D>
__device__ void declare_row(const Step& step, int group, int r, int slot, PrepareShared<D>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Scored scored = scored_of(shared.keys);
  const numerics::Reference declared = declare(shared.logits[slot], scored, lane);
  if (lane != 0) return;
  const bool bad_key = shared.largest_scale >= 0x7F80;
  RowState row = shared.rows[slot];
  const float z = numerics::add(declared.z, step.params.reference_shift), asked = row.gates.v_h;
  const bool bad = bad_key || !numerics::is_finite(row.e_q) || !numerics::is_finite(z);
  row.z = bad ? numerics::quiet_nan() : z;
  row.spread = declared.spread;
  row.gates = numerics::widened(row.gates, declared.spread);
  row.e_exponent = bad_key ? 0 : numerics::pow2_ceil_exponent(static_cast<uint16_t>(shared.largest_scale));
  row.shrunk = 0;
  row.fit_shift = static_cast<int>(fminf(fmaxf(ceilf(numerics::sub(18.0f, asked)), 0.0f), 24.0f));
  step.workspace.group(group).rows[r] = row;
  if (bad) atomicOr(&shared.nan, 1ull << r);
}

/// Declares a group's references and what else its sums need to know. By kPrepareThreads. False: the token sees no key,
/// keys past the table, or some page that is not in the pool.
template <int D>
__device__ bool prepare_group(const Step& step, int index, PrepareShared<D>& shared) {
  const plan::DecodeParams& p = step.params;
  const auto [batch, token, kv_head] = place_of_group(step, index);
  const int rows = step.workspace.rows, thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  // The last warps begin with the queries, the first ones with the keys.
  const int slot = kPreparedRows - 1 - warp;
  GivenRow<D> given{};
  if (slot < rows) given = load_row<D>(p, batch, token, kv_head * rows + slot, lane);
  Visible v;
  if (!find_visible(step, batch, token, v)) return false;
  if (slot < rows) split_query(step, index, given, slot, slot, lane, shared);
  // Two threads a key, which take turns in the rows.
  const int n = v.count();
  const Scored scored = scored_of(n);
  const int first = thread / kScoredKeys, i = thread % kScoredKeys;
  int physical = 0, id = -1;
  if (i < scored.all) {
    const int logical = scored.rest == 0      ? v.first + i
                        : i < scored.samples  ? v.first + static_cast<int>(numerics::sample_key(i, scored.rest))
                        : i == scored.samples ? v.first
                                              : v.position - numerics::kNewest + (i - scored.samples);
    physical = v.physical(logical);
    id = page_id(p, batch, physical);
  }
  if (thread == 0) {
    shared.keys = n;
    shared.position = v.position;
    shared.largest_scale = shared.largest_bound = shared.exponents = shared.settled = shared.nan = 0;
  }
  ScoredKey key{0, -1};
  if (in_pool(p, id)) key = send_key(p, id, kv_head, slot_of(p, physical), i, first == 0, shared);
  if (!survey_group(step, v, batch, kv_head, shared)) return false;
#pragma unroll 1
  for (int row = 0; row < rows; row += kPreparedRows) {
    const int r = row + slot;
    if (row > 0 && r < rows) {
      split_query(step, index, load_row<D>(p, batch, token, kv_head * rows + r, lane), r, slot, lane, shared);
    }
    __syncthreads();
    if (key.level >= 0) score_key(key, first, min(rows - row, kPreparedRows), i, shared);
    __syncthreads();
    if (r < rows) declare_row(step, index, r, slot, shared);
    __syncthreads();
  }
  if (thread != 0) return true;
  const bool corrected = p.cache.layout.tail && p.window_left < 0;
  const int typical = shared.settled > 0 ? numerics::typical_exponent(shared.exponents, shared.settled) : 0;
  *step.workspace.group(index).head = {
      .run = 0,
      .arrivals = 0,
      .fit_mark = corrected ? static_cast<int>(plan::last_mark(shared.position - (kTile - 1))) : 0,
      .typical = typical,
      .seen = 1,
      .outliers = numerics::outlier_depth(static_cast<uint16_t>(shared.largest_bound), typical) > 0.0f,
      .nan = shared.nan,
      .active = ~shared.nan & (rows == 64 ? ~uint64_t{0} : (uint64_t{1} << rows) - 1),
      .recomputed = 0,
      .bytes = 0};
  return true;
}

}  // namespace fold::cuda
