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

/// The sums over L lanes of N numbers each (powers of two, N <= L): lane i gets that of number i % L / (L / N). Lanes
/// exchange halves of what they have, so that N sums take about as many steps as one.
template <int L, int N>
__device__ inline float sum_over(float (&x)[N]) {
#pragma unroll
  for (int half = L / 2, n = N / 2; half > 0; half /= 2, n /= 2) {
    const bool upper = threadIdx.x & half;
    if (n == 0) x[0] += __shfl_xor_sync(0xffffffff, x[0], half);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float kept = upper ? x[i + n] : x[i], sent = upper ? x[i] : x[i + n];
      x[i] = kept + __shfl_xor_sync(0xffffffff, sent, half);
    }
  }
  return x[0];
}

__device__ inline float sum_of_squares(const float (&x)[8], float scale) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(x[i] * scale, x[i] * scale, sum);
  return sum;
}

/// The norm of a row from the sum of its squares; infinity or NaN if an element is not finite. Where squares may have
/// left fp32's range the row is read again, and scaled by a power of two first. Relative error below 2^-15
/// (numerics::kWiden counts on it).
template <typename T, int D>
__device__ inline float row_norm(float squares, const T* row) {
  if (squares > 0x1p-100f && squares < 0x1p100f) return sqrtf(squares);
  float x[8];
  uint32_t largest = 0;
#pragma unroll 1
  for (int channel = 0; channel < D; channel += 8) {
    unpack<T>(load_channels(row, channel, true), x);
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffff);
  }
  if (largest >= 0x7f800000) return __uint_as_float(largest);
  const int exponent = min(max(static_cast<int>(largest >> 23) - 127, -125), 125);
  const float down = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
  float sum = 0.0f;
#pragma unroll 1
  for (int channel = 0; channel < D; channel += 8) {
    unpack<T>(load_channels(row, channel, true), x);
    sum += sum_of_squares(x, down);
  }
  return sqrtf(sum) * __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

/// The larger of two pairs of norms, each by its bits: those of non-negative floats have their order, NaN comes last.
__device__ inline Norms larger(const Norms& a, const Norms& b) {
  return {__int_as_float(max(__float_as_int(a.k), __float_as_int(b.k))),
          __int_as_float(max(__float_as_int(a.v), __float_as_int(b.v)))};
}

/// The largest norms of L lanes together.
template <int L>
__device__ inline Norms largest_of_lanes(Norms norms) {
#pragma unroll
  for (int i = L / 2; i > 0; i /= 2) {
    norms = larger(norms, {__shfl_xor_sync(0xffffffff, norms.k, i), __shfl_xor_sync(0xffffffff, norms.v, i)});
  }
  return norms;
}

/// Norms of the rows of K and V: of one block of keys and one KV head.
template <typename T, int D>
__global__ void __launch_bounds__(kPrepareThreads) key_norms_kernel(const Args a) {
  constexpr int kLanes = kRowThreads<D>, kAtOnce = kPrepareThreads / kLanes, kTurns = kNormBlock / kAtOnce;
  __shared__ float squares[2 * kTurns][kAtOnce];
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.kv_heads));
  const int64_t block = blockIdx.x / static_cast<unsigned>(a.kv_heads);
  const Sequence s = sequence<D>(a, sequence_of(a, a.keys, block, kNormBlock));
  const int64_t first = (block - s.first_block) * kNormBlock;
  if (first >= s.k_len) return;  // between packed sequences
  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes, channel = 8 * lane;
  uint4 words[2 * kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int64_t key = first + i * kAtOnce + row;
    const bool kept = channel < D && key < s.k_len;
    words[2 * i] = load_channels(row_address<const T>(a.k, s, s.k_begin, key, head), channel, kept);
    words[2 * i + 1] = load_channels(row_address<const T>(a.v, s, s.k_begin, key, head), channel, kept);
  }
  float sums[2 * kTurns];
#pragma unroll
  for (int i = 0; i < 2 * kTurns; ++i) {
    float x[8];
    unpack<T>(words[i], x);
    sums[i] = sum_of_squares(x, 1.0f);
  }
  constexpr int kShare = kLanes / (2 * kTurns);  // lanes that get the same sum
  const float sum = sum_over<kLanes>(sums);
  if (lane % kShare == 0) squares[lane / kShare][row] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  Norms norms{};
  for (int j = static_cast<int>(threadIdx.x); j < kNormBlock; j += 32) {
    Norms mine{};
    if (const int64_t key = first + j; key < s.k_len) {
      const float* both = &squares[j / kAtOnce * 2][j % kAtOnce];
      mine = {row_norm<T, D>(both[0], row_address<const T>(a.k, s, s.k_begin, key, head)),
              row_norm<T, D>(both[kAtOnce], row_address<const T>(a.v, s, s.k_begin, key, head))};
    }
    a.key_norms[(head * a.norm_blocks + block) * kNormBlock + j] = mine;
    norms = larger(norms, mine);
  }
  norms = largest_of_lanes<32>(norms);
  if (threadIdx.x != 0) return;
  a.block_norms[head * a.norm_blocks + block] = norms;
  if (!isfinite(norms.k) || !isfinite(norms.v)) a.dirty[int64_t{s.index} * a.kv_heads + head] = 1;
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
  /// Of a row.
  __device__ Norms of(const Norms* keys, const Norms* blocks, KeyRange first, KeyRange last, KeyRange row) const {
    const KeyRange common = {last.first, first.last};
    if (common.first >= common.last) return share_of_largest(keys, blocks, row, 0, 1);
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
  constexpr int kTurns = kRows / kAtOnce;
  // Of the rows of each turn: Delta, and the sum of dO's squares.
  __shared__ float dots[2 * kTurns][kAtOnce];
  __shared__ TileNorms<kRows> tile_norms;
  ptx::let_next_kernel_start();
  const int64_t tile = blockIdx.x / static_cast<unsigned>(a.heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.heads));
  const Sequence s = sequence<D>(a, sequence_of(a, a.queries, tile, kRows));
  const int64_t first = (tile - s.first_tile) * kRows;
  if (first >= s.q_len) return ptx::wait_for_earlier_kernels();  // between packed sequences

  // Up to the wait, nothing depends on the norms of keys. The kernels before theirs are over: it waited for them before
  // it let this one start.
  const int lane = threadIdx.x % kLanes, channel = 8 * lane;
  uint4 dout_words[kTurns], out_words[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int64_t row = first + i * kAtOnce + threadIdx.x / kLanes;
    const bool kept = row < s.q_len && channel < D;
    dout_words[i] = load_channels(row_address<const T>(a.dout, s, s.q_begin, row, head), channel, kept);
    out_words[i] = load_channels(row_address<const T>(a.out, s, s.q_begin, row, head), channel, kept);
  }
  int4* sums = reinterpret_cast<int4*>(a.sums + (head * a.tiles + tile) * kTileSums);
#pragma unroll
  for (int i = 0; i < kTileSums / 4 / kPrepareThreads; ++i) sums[i * kPrepareThreads + threadIdx.x] = int4{};

  float numbers[2 * kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    float dout[8], out[8];
    unpack<T>(dout_words[i], dout);
    unpack<T>(out_words[i], out);
    float delta = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) delta = fmaf(dout[c], out[c], delta);
    numbers[2 * i] = delta;
    numbers[2 * i + 1] = sum_of_squares(dout, 1.0f);
  }
  constexpr int kShare = kLanes / (2 * kTurns);  // lanes that get the same sum
  const float number = sum_over<kLanes>(numbers);
  if (lane % kShare == 0) dots[lane / kShare][threadIdx.x / kLanes] = number;

  ptx::wait_for_earlier_kernels();
  const int64_t block = head / a.group * a.norm_blocks + s.first_block;
  const Norms *const keys = a.key_norms + block * kNormBlock, *const blocks = a.block_norms + block;
  const KeyRange first_range = visible_keys(a, s, static_cast<int>(first));
  const KeyRange last_range = visible_keys(a, s, static_cast<int>(min(first + kRows, int64_t{s.q_len}) - 1));
  tile_norms.find(keys, blocks, first_range, last_range);
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x);
  if (r >= kRows) return;

  const int64_t row = first + r;
  const bool exists = row < s.q_len;
  const KeyRange range = visible_keys(a, s, static_cast<int>(row));
  const bool empty = !exists || range.first >= range.last;
  float lse = INFINITY, delta = 0.0f, scale = 1.0f;
  if (!empty) {
    const float* both = &dots[r / kAtOnce * 2][r % kAtOnce];
    const float dout_norm = row_norm<T, D>(both[kAtOnce], row_address<const T>(a.dout, s, s.q_begin, row, head));
    const Norms norms = tile_norms.of(keys, blocks, first_range, last_range, range);
    delta = both[0];
    lse = *row_address<const float>(a.lse, s, s.q_begin, row, head) * a.lse_unit;
    if (fabsf(lse) <= kMostLse && isfinite(delta) && isfinite(dout_norm) && isfinite(norms.k) && isfinite(norms.v)) {
      scale = grid_scale(dout_norm, norms, delta);
    } else {
      lse = scale = __uint_as_float(0x7fc00000);
      delta = 0.0f;
    }
  }
  if (exists && (empty || isnan(lse))) a.dirty[int64_t{s.index} * a.kv_heads + head / a.group] = 1;
  float* out_rows = a.rows + (head * a.tiles + tile) * (kRowNumbers * kRows);
  out_rows[kLse * kRows + place_of_row(r)] = lse;
  out_rows[kDelta * kRows + place_of_row(r)] = delta;
  out_rows[kScale * kRows + r] = scale;
}

}  // namespace fold::cuda::backward
