#pragma once
#include "cuda/decode/rows.cuh"
#include "cuda/decode/visible.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/warp_mma.cuh"
#include "cuda/rounding.cuh"
#include "numerics/exp2.h"

// What warps share that hold a tile of 64 keys: lane 4 g + c has the keys g + 8 i of query row 4 t + c.
namespace fold::cuda {

/// 2^(x + Fraction), for x up to numerics::kExp2Max; as `low` if it is smaller, which rounds to the same weight. With
/// Fraction = kFraction: fix(x, r) = round_u32(mul(scaled_exp2(x), r)), as scaling by a power of two commutes with
/// rounding.
template <int Fraction>
__device__ inline float scaled_exp2(float x, float low) {
  static_assert(Fraction % 2 == 0);  // ties go to the same side
  constexpr float kMagic = kRoundMagicFloat + Fraction;
  x = fmaxf(x, low);
  const float shifted = numerics::add(x, kMagic);  // leaves rne(x) + Fraction in the low mantissa bits
  const float p = numerics::exp2_mantissa(numerics::sub(x, numerics::sub(shifted, kMagic)));
  return __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
}

struct TileKeys {
  unsigned seen, forced;  // bit i: key g + 8 i is visible, is always read
};
/// first: of the visible keys.
__device__ inline TileKeys settled_keys(int first, int tile, int g) {
  return {0xFF, g == 0 && first == tile * kTile ? 1u : 0u};
}
__device__ inline TileKeys keys_of_unsettled(const Visible& visible, int tile, int g) {
  unsigned seen = 0;
#pragma unroll 1
  for (int i = 0; i < kTile / 8; ++i) seen |= static_cast<unsigned>(visible.sees(tile * kTile + g + 8 * i)) << i;
  return {seen, seen};
}

struct Slots {
  int before, total;
};
/// Numbers keys, `count` of them with the lane's g (the same in its four lanes). Several counts may be packed.
__device__ inline Slots number(int count, int lane) {
  int upto = count;
  for (int s = 4; s < 32; s *= 2) {
    const int other = __shfl_up_sync(kWarp, upto, s);
    if (lane >= s) upto += other;
  }
  return {upto - count, __shfl_sync(kWarp, upto, 31)};
}

/// The sum over the lanes 4 g + c of one c.
template <typename T>
__device__ T sum_over_keys(T value) {
  for (int s = 4; s < 32; s *= 2) value += __shfl_xor_sync(kWarp, value, s);
  return value;
}
/// The largest likewise.
__device__ inline int max_over_keys(int value) {
  for (int s = 4; s < 32; s *= 2) value = max(value, __shfl_xor_sync(kWarp, value, s));
  return value;
}
/// Lists the keys of `bits` that lanes hold (bit i: key g + 8 i; the same in a key's four lanes): lane 4 g + c writes
/// entry(i) of bits 2 c and 2 c + 1. Returns how many there are. In no particular order.
template <class F>
__device__ int list_keys(uint8_t* to, unsigned bits, int lane, F entry) {
  const int i = lane % 4 * 2;
  const unsigned mine = bits >> i & 3, before = (1u << lane) - 1;
  const unsigned of[2] = {__ballot_sync(kWarp, (mine & 1) != 0), __ballot_sync(kWarp, (mine & 2) != 0)};
  const int first = __popc(of[0]);
  if ((mine & 1) != 0) to[__popc(of[0] & before)] = entry(i);
  if ((mine & 2) != 0) to[first + __popc(of[1] & before)] = entry(i + 1);
  __syncwarp();
  return first + __popc(of[1]);
}

/// The union over the four lanes of a key.
__device__ inline unsigned any_row(unsigned bits) {
  bits |= __shfl_xor_sync(kWarp, bits, 1);
  return bits | __shfl_xor_sync(kWarp, bits, 2);
}

template <int N>
__device__ void load_words(uint32_t (&words)[N], const void* from) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const uint4 v = static_cast<const uint4*>(from)[i / 4];
      words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
  } else if constexpr (N == 2) {
    const uint2 v = *static_cast<const uint2*>(from);
    words[0] = v.x, words[1] = v.y;
  } else {
    static_assert(N == 1);
    words[0] = *static_cast<const uint32_t*>(from);
  }
}

/// The same from global memory, past L1. N: a multiple of 4.
template <int N>
__device__ void fetch_words(uint32_t (&words)[N], const uint8_t* from) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(from) + i / 4);
    words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
  }
}

// Level 1 of sixteen keys: lane 4 g + c has a fourth of the channels of keys g and g + 8, and of query row g / 2 its
// plane a (g even) or b, even channels before odd ones (GroupState).

constexpr uint32_t kNoLow = 0x77777777u;  ///< plane l where it is not read: 16 h + 7.5 is half above low nibble 7

/// Adds the products of a word of the planes. q: the query's even and odd channels.
__device__ inline void multiply_nibbles(int (&dot)[4], const uint32_t (&h)[2], const uint32_t (&l)[2],
                                        const uint32_t (&q)[2]) {
  ptx::mma_u8s8(dot, ptx::join_nibbles(h[0], l[0] >> 4), ptx::join_nibbles(h[1], l[1] >> 4),
                ptx::join_nibbles(h[0] << 4, l[0]), ptx::join_nibbles(h[1] << 4, l[1]), q[0], q[1]);
}
// Of key g + 8 j and query row c, from all products.
__device__ inline int level_1(const int (&dot)[4], int j, int sum_128) {
  return 256 * dot[2 * j] + dot[2 * j + 1] - sum_128;
}
/// D0, where plane l was not read.
__device__ inline int level_0(const int (&dot)[4], int j, int sum_255) { return 2 * dot[2 * j] - sum_255; }

/// Where the 16-byte piece of a gathered row of K's plane b stands: rows are read eight at a time.
template <int D>
__device__ int swizzled(int row, int piece) {
  return row * D + 16 * (piece ^ (D >= 128 ? row & 7 : row >> 1 & 3));
}

// V rows of D bytes in shared memory, keys as rows, on their way to a product whose inner dimension is keys.

/// Where the 16-byte piece of a row stands; a transposed load reads eight rows (see named_row) at once.
template <int D>
__device__ int place_of_row(int row, int piece) {
  const int turn = D >= 128 ? (row >> 2 & 3) * 2 + (row & 1) : row >> 2 & 3;
  return row * D + 16 * (piece ^ turn);
}

/// The row that the lane names in a transposed load, so that lane 4 g + c receives those of the inner dimension's
/// 4 c .. 4 c + 3 and 16 more.
__device__ inline int named_row(int lane) {
  const int matrix = lane / 8, row = lane % 8;
  return 16 * (matrix / 2) + 4 * (row / 2) + 2 * (matrix % 2) + row % 2;
}

/// Bytes 2 g (in even) and 2 g + 1 (in odd) of the 16-byte piece, of the rows 4 c .. 4 c + 3 and 16 more.
__device__ inline void load_pairs(uint32_t address, uint32_t (&even)[2], uint32_t (&odd)[2]) {
  uint32_t m[4];
  ptx::load_transposed(m, address);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    even[half] = __byte_perm(m[2 * half], m[2 * half + 1], 0x6420);
    odd[half] = __byte_perm(m[2 * half], m[2 * half + 1], 0x7531);
  }
}

// The same of a whole tile's planes h and l, 64 rows of D / 2 bytes, with the product's inner dimension in the order of
// scale slots.
/// Where the 16-byte piece of a key's row stands. Pieces are exchanged by addresses' exclusive or.
template <int D>
__device__ int place_of_value(int key, int piece) {
  const int i = key / 8, r = key % 8;
  if constexpr (D == 256) return key * 128 + 16 * (piece ^ (r % 2 * 4 + i / 4 * 2 + i % 2));
  if constexpr (D == 128) return key * 64 + 16 * (piece ^ (i / 4 * 2 + i % 2));
  return (8 * i + (r ^ i / 4 * 2)) * 32 + 16 * (piece ^ i % 2);
}
/// The key that the lane names in a transposed load, so that lane 4 g + c receives those of the scale slots 4 c .. 4 c
/// + 3 and 16 more. Of the next 32 slots keys are 4 further.
__device__ inline int named_key(int lane) { return numerics::scale_slot(named_row(lane)); }

/// to[i]: the bytes i of from[0..3].
__device__ inline void transpose_bytes(uint32_t (&to)[4], const uint32_t (&from)[4]) {
  const uint32_t even[2] = {__byte_perm(from[0], from[1], 0x6240), __byte_perm(from[2], from[3], 0x6240)};
  const uint32_t odd[2] = {__byte_perm(from[0], from[1], 0x7351), __byte_perm(from[2], from[3], 0x7351)};
  to[0] = __byte_perm(even[0], even[1], 0x5410);
  to[1] = __byte_perm(odd[0], odd[1], 0x5410);
  to[2] = __byte_perm(even[0], even[1], 0x7632);
  to[3] = __byte_perm(odd[0], odd[1], 0x7632);
}

/// Byte columns of a query row's weights of four keys: in columns[n] of byte 2 n, or with `pick` for odd columns of
/// byte 2 n + 1.
__device__ inline void weight_columns(uint32_t (&columns)[2], uint4 w, unsigned pick) {
  const uint32_t low = __byte_perm(w.x, w.y, pick), high = __byte_perm(w.z, w.w, pick);
  columns[0] = __byte_perm(low, high, 0x5410);
  columns[1] = __byte_perm(low, high, 0x7632);
}

/// Of products by weight bytes (bytes 2 n and 2 n + 1 of query row c in sum[n]'s columns), those of row g (half 0) or
/// g + 8, as one.
__device__ inline long long joined(const int (&sum)[2][4], int half) {
  return sum[0][2 * half] + 0x100ll * sum[0][2 * half + 1] + 0x10000ll * sum[1][2 * half] +
         0x1000000ll * sum[1][2 * half + 1];
}

}  // namespace fold::cuda
