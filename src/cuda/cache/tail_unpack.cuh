#pragma once
#include "cuda/cache/requests.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/rounding.cuh"
#include "numerics/block.h"
#include "numerics/tail.h"

// Blocks of stored keys as operands of a fit's sums: u and y of docs/numerics.md, section 9.
namespace fold::cuda::cache {

constexpr int kFitThreads = 512;
constexpr int kFitWarps = kFitThreads / 32;

/// Which of the two sums a pass over the keys makes: registers hold one of them.
enum class Sum { kA, kB };

/// A block of stored keys, from its first one on.
struct StoredBlock {
  const uint8_t* k_h;
  numerics::PlaneRow v;
  const uint16_t* v_scale;  // permuted
};

/// Words of four consecutive keys' bytes in a row, and 4 more: fragments, 8 rows by 4 words, use all memory banks.
constexpr int kKeyWords = kTile / 4 + 4;

/// A block as it comes from memory.
template <int D>
struct alignas(16) BlockBytes {
  uint8_t k_h[kTile * D / 2], v_h[kTile * D / 2], v_l[kTile * D / 2];
  int8_t v_b[kTile * D];
  uint16_t v_scale[kTile];
};

/// Operands of one block. A row is a channel's; rows are in the order of row_of.
template <int D>
struct KeyOperands {
  uint32_t u[D * kKeyWords], y1[D * kKeyWords], y0[D * kKeyWords];
};

/// Channels 4 n, 4 n + 1, ... that one lane unpacks lie D / 4 rows apart, so that lanes side by side write rows side by
/// side.
template <int D>
__device__ int row_of(int channel) {
  return channel % 4 * (D / 4) + channel / 4;
}
template <int D>
__device__ int channel_of(int row) {
  return row % (D / 4) * 4 + row / (D / 4);
}

/// threadIdx.x, anew wherever it is called: otherwise the compiler prepares what follows from it for all phases of a
/// fit at once, in registers that are short.
__device__ inline int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// A share of a block is four channels of four keys. By its number: the first key's number and the first channel's. A
/// warp has 16 times 4 channels of twice 4 keys.
template <int D>
struct ShareAt {
  static constexpr int kShares = D / 4 * (kTile / 4);
  int quad, channel;

  __device__ explicit ShareAt(int share) {
    const int lane = share % 32, warp = share / 32;
    quad = warp % 8 * 2 + lane / 16;
    channel = (warp / 8 * 16 + lane % 16) * 4;
  }
};

/// Sends for a block, by one thread.
template <int D, Sum kSum>
__device__ void fetch_block(const StoredBlock& block, BlockBytes<D>& to, uint32_t arrived) {
  constexpr uint32_t kNibbles = kTile * D / 2;
  const bool has_l = block.v.l != nullptr, has_b = block.v.b != nullptr;
  const auto copy = [arrived](const void* from, void* into, uint32_t bytes) {
    ptx::bulk_copy(ptx::shared_address(into), from, bytes, arrived);
  };
  if constexpr (kSum == Sum::kA) {
    ptx::expect_bytes(arrived, kNibbles);
  } else {
    ptx::expect_bytes(arrived, (has_l ? 3 : 2) * kNibbles + (has_b ? 2 : 0) * kNibbles + sizeof(to.v_scale));
    copy(block.v.h, to.v_h, kNibbles);
    if (has_l) copy(block.v.l, to.v_l, kNibbles);
    if (has_b) copy(block.v.b, to.v_b, 2 * kNibbles);
    copy(block.v_scale, to.v_scale, sizeof(to.v_scale));
  }
  copy(block.k_h, to.k_h, kNibbles);
}

/// A plane's four nibbles of a key and of the next one, D / 2 bytes behind: bytes 0 and 2 hold channels 0 and 1, bytes
/// 1 and 3 channels 2 and 3.
template <int D>
__device__ uint32_t two_keys(const uint8_t* nibbles) {
  const uint32_t next = *reinterpret_cast<const uint16_t*>(nibbles + D / 2);
  return *reinterpret_cast<const uint16_t*>(nibbles) | next << 16;
}

/// u of a share.
template <int D>
__device__ void unpack_codes(const BlockBytes<D>& bytes, const ShareAt<D>& at, KeyOperands<D>& keys) {
  uint32_t even[2], odd[2];  // channels of two keys
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const uint32_t codes = two_keys<D>(bytes.k_h + (4 * at.quad + 2 * pair) * (D / 2) + at.channel / 2);
    even[pair] = codes >> 4 & 0x0F0F0F0Fu;
    odd[pair] = codes & 0x0F0F0F0Fu;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto& of = i % 2 == 0 ? even : odd;
    keys.u[row_of<D>(at.channel + i) * kKeyWords + at.quad] = __byte_perm(of[0], of[1], i < 2 ? 0x6420 : 0x7531);
  }
}

/// y of a share. has_l, has_b: whether the cache keeps those planes of V; inverse_e: 1 / E_M. A reading is 256 a + b: a
/// + 128 is the byte of both nibbles, b + 128 the other plane's byte with its sign turned. As the low bits of
/// kRoundMagic the two are a float. What a cache does not keep counts as zeros, for which another constant makes up.
template <int D>
__device__ void unpack_values(const BlockBytes<D>& bytes, const ShareAt<D>& at, bool has_l, bool has_b, float inverse_e,
                              KeyOperands<D>& keys) {
  const float zero = kRoundMagicFloat + 256 * 128 + (has_b ? 128 : has_l ? 0 : -numerics::kHalfReading);
  uint32_t y[4][4];  // channel, key
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int key = 4 * at.quad + n, nibbles = (key - n % 2) * (D / 2) + at.channel / 2;
    const uint32_t h = two_keys<D>(bytes.v_h + nibbles), l = has_l ? two_keys<D>(bytes.v_l + nibbles) : 0;
    const int8_t* low = bytes.v_b + key * D + at.channel;
    const uint32_t b = has_b ? *reinterpret_cast<const uint32_t*>(low) ^ 0x80808080u : 0;
    const float scale = numerics::from_bf16(bytes.v_scale[numerics::scale_slot(key)]);
    const float weight = numerics::fit_weight(scale, inverse_e);
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) {  // of the channel
      const uint32_t a = parity == 0 ? ptx::join_nibbles(h, l >> 4) : ptx::join_nibbles(h << 4, l);
      const uint32_t readings = __byte_perm(b, a, (parity == 0 ? 0x5240 : 0x5341) + n % 2 * 0x2020);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t whole = __byte_perm(readings, kRoundMagic, i == 0 ? 0x7610 : 0x7632);
        const float reading = numerics::sub(numerics::float_of(whole), zero);
        y[2 * i + parity][n] = numerics::bits_of(numerics::add(numerics::mul(reading, weight), kRoundMagicFloat));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t first = __byte_perm(y[i][0], y[i][1], 0x5140), last = __byte_perm(y[i][2], y[i][3], 0x5140);
    const int word = row_of<D>(at.channel + i) * kKeyWords + at.quad;
    keys.y1[word] = __byte_perm(first, last, 0x7632);
    keys.y0[word] = __byte_perm(first, last, 0x5410);
  }
}

}  // namespace fold::cuda::cache
