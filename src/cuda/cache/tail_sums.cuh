#pragma once
#include "cuda/cache/requests.cuh"
#include "cuda/ptx/warp_mma.cuh"
#include "numerics/block.h"
#include "numerics/tail.h"

// The integer sums behind a fit (docs/numerics.md, section 9), on the int8 tensor cores.
//
// A = sum_j c_j u_j^T and B = sum_j c_j y_j^T with c_j = 64 u_j - usum, because sum_j usum u_j^T = usum usum^T. In
// bytes:
// - c = 8 c1 + c0, c1 = 8 u + ((-usum) >> 3) within +-120, and c0 = (-usum) & 7 is the same for a block's 64 keys;
// - y = 256 y1 + y0, y1 signed and y0 unsigned.
// So A = sum (c1 8u + c0 u), B = 2048 sum c1 y1 + 8 sum (c1 y0 + 32 c0 y1) + sum c0 y0. A key adds at most 120 * 255 +
// 224 * 128 = 59272 to any of these sums: int32 holds kFlushBlocks blocks.
namespace fold::cuda::cache {

constexpr int kFitThreads = 512;
constexpr int kFitWarps = kFitThreads / 32;
constexpr int kFlushBlocks = 512;
static_assert(int64_t{kFlushBlocks} * kTile * 59272 < (int64_t{1} << 31));

/// Memory of one thread block's fit in the workspace.
template <int D>
struct alignas(256) FitSlot {
  int64_t a[D * D];                // A's sums; then L, row-major
  int64_t b[D * D];                // B's sums; then Y, row-major
  double c[D <= 128 ? 1 : D * D];  // C where shared memory has no room
};

/// Which of the two sums a pass over the keys makes: registers hold one of them.
enum class Sum { kA, kB };

template <int D, Sum kSum>
struct SumShape {
  static constexpr int kPanel = kSum == Sum::kA ? (D == 128 ? 128 : 64) : D == 256 ? 32 : 64;  ///< rows of a pass
  static constexpr int kWarpsDown = kPanel / 32;  ///< a warp has 32 of them
  static constexpr int kWarpsAcross = kFitWarps / kWarpsDown;
  static constexpr int kTiles = D / 8 / kWarpsAcross;  ///< and this many times 8 columns
  static constexpr int kWeights = kSum == Sum::kA ? 1 : 3;
};

/// A block of stored keys, from its first one on.
struct StoredBlock {
  const uint8_t* k_h;
  numerics::PlaneRow v;
  const uint16_t* v_scale;  // permuted
};

/// Words of four consecutive keys' bytes in a row, 16 and 4 more: fragments, 8 rows by 4 words, use all memory banks.
constexpr int kRowWords = 20;

/// Operands of one block. A row is a channel's; rows are in the order of row_of.
template <int D>
struct SumShared {
  uint32_t u[D * kRowWords], y1[D * kRowWords], y0[D * kRowWords];
  uint32_t c1[SumShape<D, Sum::kA>::kPanel * kRowWords];
  uint32_t c0[SumShape<D, Sum::kA>::kPanel];  // four times the same byte
  StoredBlock block;                          // to be fetched next
  float inverse_e;                            // 1 / E_M
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

/// A thread's share of a block: four channels of four keys.
struct Share {
  uint16_t k_h[4], v_h[4], v_l[4];
  uint32_t v_b[4];
  uint16_t scale[4];
};

/// The shares of a block by number: the first key's number and the first channel's. A warp has 16 times 4 channels of
/// twice 4 keys.
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

template <int D, Sum kSum>
__device__ void fetch_share(const StoredBlock& block, const ShareAt<D>& at, Share& share) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int key = 4 * at.quad + n, nibbles = key * (D / 2) + at.channel / 2;
    const auto pair = [nibbles](const uint8_t* plane) { return *reinterpret_cast<const uint16_t*>(plane + nibbles); };
    share.k_h[n] = pair(block.k_h);
    if constexpr (kSum == Sum::kB) {
      share.v_h[n] = pair(block.v.h);
      if (block.v.l != nullptr) share.v_l[n] = pair(block.v.l);
      if (block.v.b != nullptr) {
        share.v_b[n] = *reinterpret_cast<const uint32_t*>(block.v.b + key * D + at.channel);
      }
      share.scale[n] = block.v_scale[numerics::scale_slot(key)];
    }
  }
}

/// Readings of key n's four channels. has_l, has_b: whether the cache keeps those planes.
__device__ inline void share_readings(const Share& share, int n, bool has_l, bool has_b, int (&reading)[4]) {
  const uint8_t h[2] = {static_cast<uint8_t>(share.v_h[n]), static_cast<uint8_t>(share.v_h[n] >> 8)};
  const uint8_t l[2] = {static_cast<uint8_t>(share.v_l[n]), static_cast<uint8_t>(share.v_l[n] >> 8)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!has_l) {
      reading[i] = numerics::reading({h, nullptr, nullptr}, i);
    } else {
      reading[i] = numerics::reading({h, l, nullptr}, i);
    }
  }
  if (!has_b) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) reading[i] += static_cast<int8_t>(share.v_b[n] >> 8 * i);
}

/// Byte `from` of x becomes byte `to` of the word.
__device__ inline void insert_byte(uint32_t& word, int to, int x, int from) {
  word = __byte_perm(word, static_cast<uint32_t>(x), (0x3210 & ~(0xF << 4 * to)) | (4 + from) << 4 * to);
}

/// u, and for B y, of a share.
template <int D, Sum kSum>
__device__ void unpack_share(const Share& share, const ShareAt<D>& at, SumShared<D>& s) {
  const bool has_l = s.block.v.l != nullptr, has_b = s.block.v.b != nullptr;  // of any block
  uint32_t u[4] = {}, y1[4] = {}, y0[4] = {};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const uint8_t codes[2] = {static_cast<uint8_t>(share.k_h[n]), static_cast<uint8_t>(share.k_h[n] >> 8)};
#pragma unroll
    for (int i = 0; i < 4; ++i) insert_byte(u[i], n, numerics::nibble(codes[i / 2], i), 0);
    if constexpr (kSum == Sum::kB) {
      const float weight = numerics::fit_weight(numerics::from_bf16(share.scale[n]), s.inverse_e);
      int reading[4];
      share_readings(share, n, has_l, has_b, reading);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int y = __float2int_rn(numerics::mul(static_cast<float>(reading[i]), weight));
        insert_byte(y1[i], n, y, 1);
        insert_byte(y0[i], n, y, 0);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int word = row_of<D>(at.channel + i) * kRowWords + at.quad;
    s.u[word] = u[i];
    if constexpr (kSum == Sum::kB) {
      s.y1[word] = y1[i];
      s.y0[word] = y0[i];
    }
  }
}

/// c1 and c0 of the panel's rows, from u.
template <int D, Sum kSum>
__device__ void centre_panel(int panel, SumShared<D>& s) {
  constexpr int kThreads = kFitThreads / SumShape<D, kSum>::kPanel;  // of a row
  const int thread = thread_here(), row = thread / kThreads, part = thread % kThreads;
  const uint32_t* u = s.u + (panel + row) * kRowWords;
  unsigned sum = 0;
#pragma unroll
  for (int word = part; word < 16; word += kThreads) sum = __dp4a(u[word], 0x01010101u, sum);
#pragma unroll
  for (int step = 1; step < kThreads; step *= 2) sum += __shfl_xor_sync(kWarp, sum, step);
  const int less = -static_cast<int>(sum);
  const uint32_t high = static_cast<uint32_t>(less >> 3 & 0xFF) * 0x01010101u;
#pragma unroll
  for (int word = part; word < 16; word += kThreads) s.c1[row * kRowWords + word] = __vadd4(u[word] << 3, high);
  if (part == 0) s.c0[row] = static_cast<uint32_t>(less & 7) * 0x01010101u;
}

/// A warp's sums of a panel, by weight (1, or 2048, 8, 1) and by tile of 16 rows and 8 columns (ptx/warp_mma.cuh).
template <int D, Sum kSum>
struct PanelSums {
  int tiles[SumShape<D, kSum>::kWeights][2][SumShape<D, kSum>::kTiles][4];
};

template <auto kProduct>
__device__ void multiply(int (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  kProduct(sums, a[0], a[1], a[2], a[3], b[0], b[1]);
}

/// Adds the unpacked block.
template <int D, Sum kSum>
__device__ void multiply_block(const SumShared<D>& s, int down, int across, PanelSums<D, kSum>& sums) {
  const int thread = thread_here(), g = thread % 32 / 4, t = thread % 4;
  uint32_t c0[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) c0[m][i] = s.c0[down + 16 * m + g + 8 * i];
  }
#pragma unroll
  for (int step = 0; step < 2; ++step) {  // 32 keys
    uint32_t c1[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        c1[m][i] = s.c1[(down + g + 16 * m + i % 2 * 8) * kRowWords + t + 8 * step + i / 2 * 4];
      }
    }
#pragma unroll
    for (int n = 0; n < SumShape<D, kSum>::kTiles; ++n) {
      const int word = (across + g + 8 * n) * kRowWords + t + 8 * step;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint32_t z[4] = {c0[m][0], c0[m][1], c0[m][0], c0[m][1]};
        if constexpr (kSum == Sum::kA) {
          const uint32_t u[2] = {s.u[word], s.u[word + 4]}, u_8[2] = {u[0] << 3, u[1] << 3};
          multiply<ptx::mma_s8u8>(sums.tiles[0][m][n], c1[m], u_8);
          multiply<ptx::mma_u8u8>(sums.tiles[0][m][n], z, u);
        } else {
          const uint32_t y1[2] = {s.y1[word], s.y1[word + 4]}, y0[2] = {s.y0[word], s.y0[word + 4]};
          const uint32_t z_32[4] = {z[0] << 5, z[1] << 5, z[0] << 5, z[1] << 5};
          multiply<ptx::mma_s8s8>(sums.tiles[0][m][n], c1[m], y1);
          multiply<ptx::mma_s8u8>(sums.tiles[1][m][n], c1[m], y0);
          multiply<ptx::mma_u8s8>(sums.tiles[1][m][n], z_32, y1);
          multiply<ptx::mma_u8u8>(sums.tiles[2][m][n], z, y0);
        }
      }
    }
  }
}

/// Stores a warp's sums, or adds them to what is stored, and starts again from 0. out: (D, D), by channel
template <int D, Sum kSum>
__device__ void flush_sums(int first_row, int across, bool add, PanelSums<D, kSum>& sums, int64_t* out) {
  const int thread = thread_here(), g = thread % 32 / 4, t = thread % 4;
#pragma unroll 1
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < SumShape<D, kSum>::kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto value = [&](int weight) -> int64_t {
          return m == 0 ? sums.tiles[weight][0][n][i] : sums.tiles[weight][1][n][i];
        };
        const int row = channel_of<D>(first_row + 16 * m + g + i / 2 * 8);
        const int at = row * D + channel_of<D>(across + 8 * n + 2 * t + i % 2);
        int64_t sum = add ? out[at] : 0;
        if constexpr (kSum == Sum::kA) {
          sum += value(0);
        } else {
          sum += 2048 * value(0) + 8 * value(1) + value(2);
        }
        out[at] = sum;
      }
    }
  }
  sums = {};
}

/// A or B of blocks [first, last), at least one, by a thread block. block_at(index): a StoredBlock; E_M = 2^e_exponent;
/// out: (D, D)
template <int D, Sum kSum, typename Blocks>
__device__ void sum_blocks(const Blocks& block_at, int first, int last, int e_exponent, int64_t* out, SumShared<D>& s) {
  using Shape = SumShape<D, kSum>;
  constexpr bool kAhead = ShareAt<D>::kShares <= kFitThreads;  // a share a thread: fetched a block ahead
  const int warp = thread_here() / 32;
  const int down = warp % Shape::kWarpsDown * 32, across = warp / Shape::kWarpsDown * Shape::kTiles * 8;
#pragma unroll 1
  for (int panel = 0; panel < D; panel += Shape::kPanel) {
    PanelSums<D, kSum> sums = {};
    if (threadIdx.x == 0) {
      s.block = block_at(first);
      s.inverse_e = numerics::pow2(-e_exponent);
    }
    __syncthreads();
    Share share = {};
    const auto fetch = [&](int index) { fetch_share<D, kSum>(s.block, ShareAt<D>(index), share); };
    const auto unpack = [&](int index) { unpack_share<D, kSum>(share, ShareAt<D>(index), s); };
    if (const int thread = thread_here(); kAhead && thread < ShareAt<D>::kShares) fetch(thread);
#pragma unroll 1
    for (int block = first; block < last; ++block) {
      const int thread = thread_here();
      if constexpr (kAhead) {
        if (thread < ShareAt<D>::kShares) unpack(thread);
      } else {
#pragma unroll 1
        for (int index = thread; index < ShareAt<D>::kShares; index += kFitThreads) {
          fetch(index);
          unpack(index);
        }
      }
      __syncthreads();
      if (thread == 0 && block + 1 < last) s.block = block_at(block + 1);
      centre_panel<D, kSum>(panel, s);
      __syncthreads();
      if (kAhead && thread < ShareAt<D>::kShares && block + 1 < last) fetch(thread);
      multiply_block<D, kSum>(s, down, across, sums);
      const int done = block + 1 - first;
      if (block + 1 == last || done % kFlushBlocks == 0) {
        flush_sums<D, kSum>(panel + down, across, done > kFlushBlocks, sums, out);
      }
      __syncthreads();
    }
  }
}

}  // namespace fold::cuda::cache
