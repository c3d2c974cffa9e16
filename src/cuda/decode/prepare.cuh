#pragma once
#include "cuda/decode/group_state.cuh"
#include "cuda/decode/key_lanes.cuh"
#include "cuda/decode/survey.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/launch_order.cuh"
#include "numerics/reference.h"

// What comes before a group's sums: its queries split into planes, and its rows' references (docs/numerics.md, sections
// 3, 5 and 6). One CTA's work, a chain of latencies: what can be sent for early is.
namespace fold::cuda {

constexpr int kScoredKeys = static_cast<int>(numerics::kScoredKeys);
constexpr int kKeysAtOnce = 16;  ///< that a warp scores: the rows of a product
constexpr int kKeyBatches = kScoredKeys / kKeysAtOnce;
static_assert(kScoredKeys % kKeysAtOnce == 0);

/// Warps: of the CTA. It prepares as many rows at once, a warp each, and each warp scores as many batches of keys.
template <int D, int Warps>
struct PrepareShared {
  static constexpr int kRows = Warps, kBatches = kKeyBatches / Warps;
  static_assert(kKeyBatches % Warps == 0 && kRows % 4 == 0);  // rows are scored four at a time

  alignas(16) int8_t a_split[kRows][D], b_split[kRows][D];           // as GroupState's
  alignas(16) uint8_t h[kScoredKeys][D / 2], l[kScoredKeys][D / 2];  // samples first, then what is counted once
  float logits[kRows][kScoredKeys];                                  // likewise
  RowState rows[kRows];
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
                  : __ldcg(p.depth + batch * p.depth_stride_b + token * p.depth_stride_t + head * p.depth_stride_h);
  return row;
}

/// Splits a query into planes, row r of the group's; it is the slot-th at work. A warp's work.
template <int D, int Warps>
__device__ void split_query(const Step& step, int group, GivenRow<D> given, int r, int slot, int lane,
                            PrepareShared<D, Warps>& shared) {
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
    g.a[r * D + c] = g.a_split[r * D + split] = shared.a_split[slot][split] = static_cast<int8_t>(a);
    g.b[r * D + c] = g.b_split[r * D + split] = shared.b_split[slot][split] = static_cast<int8_t>(b);
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

/// Sends for the planes of scored key i: a fourth of them, the lane's. Returns the key's scale.
template <int D, int Warps>
__device__ uint16_t send_key(const plan::DecodeParams& p, int id, int kv_head, int slot, int i, int fourth,
                             PrepareShared<D, Warps>& shared) {
  const plan::HeadPage page = plan::head_page(p.cache, id, kv_head);
#pragma unroll
  for (int piece = fourth; piece < D / 32; piece += 4) {
    const int at = slot * (D / 2) + 16 * piece;
    ptx::copy_16(ptx::shared_address(&shared.h[i][16 * piece]), page.k_h + at);
    if (p.cache.layout.k_bits > 4) ptx::copy_16(ptx::shared_address(&shared.l[i][16 * piece]), page.k_l + at);
  }
  return __ldcg(page.k_scale + slot / kTile * kTile + numerics::scale_slot(slot % kTile));
}

/// Adds what a thread found of the keys' scales. By whole warps.
template <int D, int Warps>
__device__ void add_survey(const SurveyedScales& found, PrepareShared<D, Warps>& shared) {
  const unsigned largest = __reduce_max_sync(kWarp, found.largest), bound = __reduce_max_sync(kWarp, found.bound);
  const int exponents = __reduce_add_sync(kWarp, found.exponents), settled = __reduce_add_sync(kWarp, found.settled);
  if (threadIdx.x % 32 != 0) return;
  atomicMax(&shared.largest_scale, largest);
  atomicMax(&shared.largest_bound, bound);
  atomicAdd(&shared.exponents, exponents);
  atomicAdd(&shared.settled, settled);
}

/// Logits of a warp's sixteen keys, from key `first_key` on, for the `count` rows at work. scale: of keys g and g + 8,
/// where lane 4 g + c.
template <int D, int Warps>
__device__ void score_keys(int first_key, const uint16_t (&scale)[2], bool low, int count,
                           PrepareShared<D, Warps>& shared) {
  constexpr int kWords = D == 64 ? 2 : 4;  // of a plane at once
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, c = lane % 4;
#pragma unroll 1
  for (int first = 0; first < count; first += 4) {
    const int8_t* const query = (g % 2 == 0 ? shared.a_split : shared.b_split)[first + g / 2];
    int dot[4] = {};
#pragma unroll 1
    for (int part = 0; part < D / 8; part += 4 * kWords) {
      const int at = c * (D / 8) + part;  // in the lane's fourth of a plane
      uint32_t h[2][kWords], l[2][kWords], even[kWords], odd[kWords];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        load_words(h[j], shared.h[first_key + g + 8 * j] + at);
        load_words(l[j], shared.l[first_key + g + 8 * j] + at);
      }
      load_words(even, query + at);
      load_words(odd, query + D / 2 + at);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        multiply_nibbles(dot, {h[0][w], h[1][w]}, {low ? l[0][w] : kNoLow, low ? l[1][w] : kNoLow}, {even[w], odd[w]});
      }
    }
    const int slot = first + c;
    if (slot >= count) continue;
    const RowState& row = shared.rows[slot];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float x = low ? logit(level_1(dot, j, 128 * row.sum), unit_of_level(row.e_q, 1))
                          : logit(level_0(dot, j, 255 * row.sum_a), unit_of_level(row.e_q, 0));
      shared.logits[slot][first_key + g + 8 * j] = numerics::mul(x, numerics::from_bf16(scale[j]));
    }
  }
}

__device__ inline int64_t warp_sum(int64_t value) {
  for (int s = 16; s > 0; s /= 2) value += __shfl_xor_sync(kWarp, value, s);
  return value;
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
  once = {warp_sum(once.weights), warp_sum(once.squares)};
  samples = {warp_sum(samples.weights), warp_sum(samples.squares)};
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
  const int rows = step.workspace.rows, thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  auto* const num = reinterpret_cast<uint4*>(g.num);
#pragma unroll 1
  for (int i = thread; i < rows * step.workspace.head_dim / 2; i += threads) num[i] = {0, 0, 0, 0};
#pragma unroll 1
  for (int i = thread; i < rows * numerics::kRank; i += threads) g.t[i] = 0;
  if (thread < rows) g.sums[thread] = {0, 0, 0, 0, ordered(-INFINITY)};
  if (thread < Workspace::kReruns) step.workspace.queue_entries()[index * Workspace::kReruns + thread] = -1;
  if (thread == 0 && index == 0) *step.workspace.queue() = {};
}

/// Declares the reference and grid of row r, the slot-th at work. A warp's work.
template <int D, int Warps>
__device__ void declare_row(const Step& step, int group, int r, int slot, PrepareShared<D, Warps>& shared) {
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

/// The logical key that is scored i-th.
__device__ inline int scored_key(const Visible& v, const Scored& scored, int i) {
  if (scored.rest == 0) return v.first + i;
  if (i < scored.samples) return v.first + static_cast<int>(numerics::sample_key(i, scored.rest));
  return i == scored.samples ? v.first : v.position - numerics::kNewest + (i - scored.samples);
}

/// Declares a group's references and what else its sums need to know. By `Warps` warps. False: the token sees no key,
/// keys past the table, or some page that is not in the pool. Beside the kernel that writes the step's tokens, what no
/// request writes is asked for before that kernel is waited for: not keys, since one may see what another brings.
template <int D, int Warps>
__device__ bool prepare_group(const Step& step, int index, PrepareShared<D, Warps>& shared) {
  const plan::DecodeParams& p = step.params;
  const auto [batch, token, kv_head] = place_of_group(step, index);
  const int rows = step.workspace.rows, thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  constexpr int kRows = PrepareShared<D, Warps>::kRows, kBatches = PrepareShared<D, Warps>::kBatches;
  const int slot = kRows - 1 - warp;
  // The request's pages' ids, before it is known which of them matter.
  ptx::prefetch_if(32 * thread < step.max_pages, p.block_table + batch * p.block_table_stride + 32 * thread);
  GivenRow<D> given{};
  if (slot < rows) given = load_row<D>(p, batch, token, kv_head * rows + slot, lane);
  RequestLength request;
  if (step.appends) {
    const cache::Brought brought = cache::tokens_brought(step.bringing, batch);
    request = {static_cast<int>(brought.before) + brought.count, brought.count};
  } else {
    request = length_of(p, batch);
  }
  Visible v;
  if (!find_visible(step, request, batch, token, v)) return false;
  // Everything is sent for before anything of it is waited for: pages' ids first, then what is in the pages.
  const int n = v.count();
  const Scored scored = scored_of(n);
  // The lane's keys, two a batch of the warp's.
  const auto number = [&](int j) { return kKeysAtOnce * (kBatches * warp + j / 2) + lane / 4 + 8 * (j % 2); };
  int physical[2 * kBatches], id[2 * kBatches];
#pragma unroll
  for (int j = 0; j < 2 * kBatches; ++j) {
    physical[j] = 0;
    id[j] = -1;
    if (number(j) >= scored.all) continue;
    physical[j] = v.physical(scored_key(v, scored, number(j)));
    id[j] = page_id(step, batch, physical[j]);
  }
  ScaleSurvey survey(step, v, batch, kv_head);
  survey.look_up();
  if (slot < rows) split_query(step, index, given, slot, slot, lane, shared);
  if (step.appends) {
    ptx::wait_for_earlier_kernels();
    ptx::let_next_kernel_start();
  }
  uint16_t scale[kBatches][2] = {};
#pragma unroll
  for (int j = 0; j < 2 * kBatches; ++j) {
    if (!in_pool(p, id[j])) continue;
    scale[j / 2][j % 2] = send_key(p, id[j], kv_head, slot_of(step, physical[j]), number(j), lane % 4, shared);
  }
  survey.load();
  if (thread == 0) {
    shared.keys = n;
    shared.position = v.position;
    shared.largest_scale = shared.largest_bound = shared.exponents = shared.settled = shared.nan = 0;
  }
  survey.add_cut_tiles();
  __syncthreads();
  survey.add_whole_tiles();
  add_survey(survey.found, shared);
  ptx::wait_copies();
  if (!__syncthreads_and(survey.found.exists)) return false;
  int typical = 0;
  bool outliers = false;
#pragma unroll 1
  for (int row = 0; row < rows; row += kRows) {
    const int r = row + slot;
    if (row > 0) {
      if (r < rows) {
        split_query(step, index, load_row<D>(p, batch, token, kv_head * rows + r, lane), r, slot, lane, shared);
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kBatches; ++i) {
      score_keys(kKeysAtOnce * (kBatches * warp + i), scale[i], p.cache.layout.k_bits > 4, min(rows - row, kRows),
                 shared);
    }
    __syncthreads();
    if (r < rows) declare_row(step, index, r, slot, shared);
    if (row == 0 && thread == 0) {
      if (shared.settled > 0) typical = numerics::typical_exponent(shared.exponents, shared.settled);
      outliers = numerics::outlier_depth(static_cast<uint16_t>(shared.largest_bound), typical) > 0.0f;
    }
    __syncthreads();
  }
  if (thread != 0) return true;
  const bool corrected = p.cache.layout.tail && p.window_left < 0;
  *step.workspace.group(index).head = {
      .run = 0,
      .arrivals = 0,
      .fit_mark = corrected ? static_cast<int>(plan::last_mark(shared.position - (kTile - 1))) : 0,
      .typical = typical,
      .seen = 1,
      .outliers = outliers,
      .nan = shared.nan,
      .active = ~shared.nan & (rows == 64 ? ~uint64_t{0} : (uint64_t{1} << rows) - 1),
      .recomputed = 0,
      .bytes = 0};
  return true;
}

}  // namespace fold::cuda
