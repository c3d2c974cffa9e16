#pragma once
#include "cuda/attention/backward_layout.cuh"
#include "cuda/ptx/launch_order.cuh"
#include "numerics/int_grid.h"

// What the main loop must know before it starts: Delta, log-sum-exp in base 2, and each row's dQ grid.
namespace fold::cuda::backward {

/// Threads that share a row, 8 channels each; a power of two.
template <int D>
constexpr int kRowThreads = D == 64 ? 8 : 16;

constexpr int kPrepareThreads = 256;

template <typename T>
__device__ inline void unpack(const uint4& packed, float (&x)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 two;
    if constexpr (sizeof(T) == 2 && std::is_same_v<T, __nv_bfloat16>) {
      two = {__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000)};
    } else {
      two = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    }
    x[2 * i] = two.x;
    x[2 * i + 1] = two.y;
  }
}

/// 8 channels of a row, zeros where `kept` is false.
template <typename T>
__device__ inline uint4 load_channels(const T* row, int channel, bool kept) {
  return kept ? *reinterpret_cast<const uint4*>(row + channel) : uint4{};
}

template <int L>
__device__ inline float sum_over(float x) {
#pragma unroll
  for (int i = L / 2; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffff, x, i);
  return x;
}

/// The norm of a row over L threads; infinity or NaN if an element is not finite. Elements are scaled by a power of two
/// first, so that no square leaves fp32's range. Relative error below 2^-15 (numerics::kWiden counts on it).
template <int L>
__device__ inline float row_norm(const float (&x)[8]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffff);
#pragma unroll
  for (int i = L / 2; i > 0; i /= 2) largest = max(largest, __shfl_xor_sync(0xffffffff, largest, i));
  const int exponent = min(max(static_cast<int>(largest >> 23) - 127, -125), 125);
  const float down = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(x[i] * down, x[i] * down, sum);
  const float norm = sqrtf(sum_over<L>(sum)) * __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
  return largest < 0x7f800000 ? norm : __uint_as_float(largest);  // no way out before: other rows share the warp
}

/// Norms of the rows of K and V: of one block of keys and one KV head.
template <typename T, int D>
__global__ void __launch_bounds__(kPrepareThreads) key_norms_kernel(const Args a) {
  constexpr int kLanes = kRowThreads<D>, kAtOnce = kPrepareThreads / kLanes;
  __shared__ int k_largest, v_largest;  // bits of non-negative floats have their order; infinity and NaN come last
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.kv_heads));
  const int64_t block = blockIdx.x / static_cast<unsigned>(a.kv_heads);
  const Sequence s = sequence<D>(a, sequence_of(a, a.keys, block, kNormBlock));
  const int64_t first = (block - s.first_block) * kNormBlock;
  if (first >= s.k_len) return;  // between packed sequences
  if (threadIdx.x == 0) k_largest = v_largest = 0;
  __syncthreads();
  const int lane = threadIdx.x % kLanes, channel = 8 * lane;
  constexpr int kTurns = kNormBlock / kAtOnce;
  uint4 k_words[kTurns], v_words[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int64_t key = first + i * kAtOnce + threadIdx.x / kLanes;
    const bool kept = channel < D && key < s.k_len;
    k_words[i] = load_channels(row_address<const T>(a.k, s, s.k_begin, key, head), channel, kept);
    v_words[i] = load_channels(row_address<const T>(a.v, s, s.k_begin, key, head), channel, kept);
  }
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int j = i * kAtOnce + threadIdx.x / kLanes;
    float k[8], v[8];
    unpack<T>(k_words[i], k);
    unpack<T>(v_words[i], v);
    const Norms norms = {row_norm<kLanes>(k), row_norm<kLanes>(v)};
    if (lane != 0) continue;
    a.key_norms[(head * a.norm_blocks + block) * kNormBlock + j] = norms;
    atomicMax(&k_largest, __float_as_int(norms.k));
    atomicMax(&v_largest, __float_as_int(norms.v));
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  a.block_norms[head * a.norm_blocks + block] = {__int_as_float(k_largest), __int_as_float(v_largest)};
  if (max(k_largest, v_largest) >= 0x7f800000) a.dirty[int64_t{s.index} * a.kv_heads + head] = 1;
}

/// The larger of two pairs of norms, each by its bits: those of non-negative floats have their order, NaN comes last.
__device__ inline Norms larger(const Norms& a, const Norms& b) {
  return {__int_as_float(max(__float_as_int(a.k), __float_as_int(b.k))),
          __int_as_float(max(__float_as_int(a.v), __float_as_int(b.v)))};
}

/// A thread's share of the largest norms among the keys [first, last) of a sequence: number `thread` of `threads`.
__device__ inline Norms share_of_largest(const Norms* keys, const Norms* blocks, KeyRange range, int thread,
                                         int threads) {
  Norms norms{};
  const int first_block = (range.first + kNormBlock - 1) / kNormBlock, last_block = range.last / kNormBlock;
  const bool whole = first_block < last_block;
  const int head_end = whole ? first_block * kNormBlock : range.last,
            tail = whole ? last_block * kNormBlock : range.last;
  for (int j = range.first + thread; j < head_end; j += threads) norms = larger(norms, keys[j]);
  for (int j = first_block + thread; j < last_block; j += threads) norms = larger(norms, blocks[j]);
  for (int j = tail + thread; j < range.last; j += threads) norms = larger(norms, keys[j]);
  return norms;
}

/// The same of L lanes together.
template <int L>
__device__ inline Norms largest_of_lanes(Norms norms) {
#pragma unroll
  for (int i = L / 2; i > 0; i /= 2) {
    norms = larger(norms, {__shfl_xor_sync(0xffffffff, norms.k, i), __shfl_xor_sync(0xffffffff, norms.v, i)});
  }
  return norms;
}

/// Largest norms among the keys that each row of a tile sees, exactly these: what a row does not see must not change
/// its grid. Both ends of the range move by at most a key a row. So the keys that all rows see are looked at once, and
/// of the others there are running maxima: below[n], of the n keys before those, and above[n], of the n keys behind
/// them. Where no key is seen by all rows, a row sees fewer keys than a tile has rows.
template <int Rows>
struct TileNorms {
  Norms all[kPrepareThreads / 32], below[Rows], above[Rows];

  /// By all threads; __syncthreads() after it. rows: first and last one of the tile.
  __device__ void find(const Norms* keys, const Norms* blocks, KeyRange first, KeyRange last) {
    const KeyRange common = {last.first, first.last};
    if (common.first >= common.last) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Norms mine = largest_of_lanes<32>(share_of_largest(keys, blocks, common, threadIdx.x, kPrepareThreads));
    if (lane == 0) all[warp] = mine;
    if (warp == 0) run(below, common.first - first.first, [&](int n) { return keys[common.first - 1 - n]; });
    if (warp == 1) run(above, last.last - common.last, [&](int n) { return keys[common.last + n]; });
  }
  /// Of a row, by L lanes.
  template <int L>
  __device__ Norms of(const Norms* keys, const Norms* blocks, KeyRange first, KeyRange last, KeyRange row) const {
    const KeyRange common = {last.first, first.last};
    if (common.first >= common.last) {
      return largest_of_lanes<L>(share_of_largest(keys, blocks, row, threadIdx.x % L, L));
    }
    Norms norms = larger(below[common.first - row.first], above[row.last - common.last]);
    for (const Norms& n : all) norms = larger(norms, n);
    return norms;
  }

 private:
  /// maxima[n] = the largest of the first n, n <= count < Rows; by a warp.
  template <typename Key>
  __device__ static void run(Norms (&maxima)[Rows], int count, const Key& key) {
    const int lane = threadIdx.x % 32;
    Norms before{};
    for (int n = lane; n < Rows; n += 32) {
      Norms norms = n > 0 && n <= count ? key(n - 1) : Norms{};
#pragma unroll
      for (int i = 1; i < 32; i *= 2) {
        const Norms other = {__shfl_up_sync(0xffffffff, norms.k, i), __shfl_up_sync(0xffffffff, norms.v, i)};
        if (lane >= i) norms = larger(norms, other);
      }
      norms = larger(norms, before);
      maxima[n] = norms;
      before = {__shfl_sync(0xffffffff, norms.k, 31), __shfl_sync(0xffffffff, norms.v, 31)};
    }
  }
};

/// In base 2. Above it an fp32 number says weights less exactly than bf16 does: the row is NaN, not silently wrong.
constexpr float kMostLse = 0x1p17f;

/// The grid of a row: |dQ| before softmax_scale is below the bound (numerics::dq_bound), and rne(x 2^shift) with the
/// shift returned fits int32 in any order of addition (numerics::grid_shift; P here comes of ex2.approx, 2^-22, and of
/// products whose sums the tensor cores align and truncate, at most 2^-21 of the largest term each: 2^-7 of a logit of
/// 2^14, far inside the proof's 1/2). NaN where the partial sums may leave fp32: dQ of the row is then NaN.
__device__ inline float grid_scale(float dout_norm, const Norms& largest, float delta) {
  const double bound = numerics::dq_bound(dout_norm, largest.v, fabsf(delta), largest.k);
  if (!(bound < 0x1p127)) return __uint_as_float(0x7fc00000);
  if (bound == 0.0) return 1.0f;
  constexpr int kBits = 30;
  const int exponent = static_cast<int>(__double_as_longlong(bound) >> 52) - 1023;  // floor(log2); at most one too low
  const int shift = min(kBits - (exponent + 1), 126);  // tiny sums: as fine as fp32 has powers of two
  return __uint_as_float(static_cast<uint32_t>(127 + shift) << 23);
}

/// A tile of query rows of one head: row numbers, and sums of dQ set to zero.
template <typename T, int D>
__global__ void __launch_bounds__(kPrepareThreads) prepare_rows_kernel(const Args a) {
  constexpr int kRows = Tiles<D>::kRows, kLanes = kRowThreads<D>, kAtOnce = kPrepareThreads / kLanes;
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  const int64_t tile = blockIdx.x / static_cast<unsigned>(a.heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.heads));
  const Sequence s = sequence<D>(a, sequence_of(a, a.queries, tile, kRows));
  const int64_t first = (tile - s.first_tile) * kRows;
  if (first >= s.q_len) return;  // between packed sequences

  int4* sums = reinterpret_cast<int4*>(a.sums + (head * a.tiles + tile) * kTileSums);
#pragma unroll
  for (int i = 0; i < kTileSums / 4 / kPrepareThreads; ++i) sums[i * kPrepareThreads + threadIdx.x] = int4{};

  const int lane = threadIdx.x % kLanes, channel = 8 * lane;
  constexpr int kTurns = kRows / kAtOnce;
  uint4 dout_words[kTurns], out_words[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int64_t row = first + i * kAtOnce + threadIdx.x / kLanes;
    const bool kept = row < s.q_len && channel < D;
    dout_words[i] = load_channels(row_address<const T>(a.dout, s, s.q_begin, row, head), channel, kept);
    out_words[i] = load_channels(row_address<const T>(a.out, s, s.q_begin, row, head), channel, kept);
  }
  __shared__ TileNorms<kRows> tile_norms;
  const int64_t block = head / a.group * a.norm_blocks + s.first_block;
  const Norms *const keys = a.key_norms + block * kNormBlock, *const blocks = a.block_norms + block;
  const KeyRange first_range = visible_keys(a, s, static_cast<int>(first));
  const KeyRange last_range = visible_keys(a, s, static_cast<int>(min(first + kRows, int64_t{s.q_len}) - 1));
  tile_norms.find(keys, blocks, first_range, last_range);
  __syncthreads();

  float* out_rows = a.rows + (head * a.tiles + tile) * (kRowNumbers * kRows);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int r = i * kAtOnce + threadIdx.x / kLanes;
    const int64_t row = first + r;
    const bool exists = row < s.q_len;
    float dout[8], out[8];
    unpack<T>(dout_words[i], dout);
    unpack<T>(out_words[i], out);
    float delta = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) delta = fmaf(dout[c], out[c], delta);
    delta = sum_over<kLanes>(delta);
    const float dout_norm = row_norm<kLanes>(dout);
    const KeyRange range = visible_keys(a, s, static_cast<int>(row));
    const bool empty = !exists || range.first >= range.last;
    const Norms norms =
        tile_norms.template of<kLanes>(keys, blocks, first_range, last_range, empty ? first_range : range);
    if (lane != 0) continue;

    float lse = INFINITY, scale = 1.0f;
    if (empty) {
      delta = 0.0f;
    } else {
      lse = *row_address<const float>(a.lse, s, s.q_begin, row, head) * a.lse_unit;
      if (fabsf(lse) <= kMostLse && isfinite(delta) && isfinite(dout_norm) && isfinite(norms.k) && isfinite(norms.v)) {
        scale = grid_scale(dout_norm, norms, delta);
      } else {
        lse = scale = __uint_as_float(0x7fc00000);
        delta = 0.0f;
      }
    }
    if (exists && (empty || isnan(lse))) a.dirty[int64_t{s.index} * a.kv_heads + head / a.group] = 1;
    out_rows[kLse * kRows + r] = lse;
    out_rows[kDelta * kRows + r] = delta;
    out_rows[kScale * kRows + r] = scale;
  }
}

}  // namespace fold::cuda::backward
