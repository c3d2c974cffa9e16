#pragma once
#include "cuda/cache/requests.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/warp_mma.cuh"
#include "numerics/block.h"
#include "numerics/tail.h"

// The integer sums behind a fit (docs/numerics.md, section 9), on the int8 tensor cores.
//
// A = sum_b (64 sum_j u_j u_j^T - s_b s_b^T) and B = sum_b (64 sum_j u_j y_j^T - s_b t_b^T): s_b and t_b are the sums
// of a block's u and y. In bytes, y = 256 y1 + y0, s = 256 s1 + s0 and t = 2^16 t2 + 2^8 t1 + t0, where y1 and t2 are
// signed. The second products add over blocks as the first add over keys, and are made for kFlushBlocks of them at
// once. Those add at most 64 * 15 * 255 or 255 * 255 each to any of the sums: int32 has room.
namespace fold::cuda::cache {

constexpr int kFitThreads = 512;
constexpr int kFitWarps = kFitThreads / 32;
template <int D>
constexpr int kFlushBlocks = D == 256 ? 32 : 64;  ///< as many as shared memory has room for

/// Memory of one thread block's fit in the workspace.
template <int D>
struct alignas(256) FitSlot {
  int64_t a[D * D];                // A's sums, rows and columns in the order of row_of; then Y, row-major
  int64_t b[D * D];                // B's sums, likewise; then L, row-major
  double c[D <= 128 ? 1 : D * D];  // L, then C, where shared memory has no room
};

/// Which of the two sums a pass over the keys makes: registers hold one of them.
enum class Sum { kA, kB };

template <int D, Sum kSum>
struct SumShape {
  static constexpr int kPanel = D == 128 || (D == 256 && kSum == Sum::kA) ? 128 : 64;  ///< rows of a pass
  static constexpr int kWarpsDown = kPanel / 32;                                       ///< a warp has 32 of them
  static constexpr int kWarpsAcross = kFitWarps / kWarpsDown;
  static constexpr int kTiles = D / 8 / kWarpsAcross;       ///< and this many times 8 columns
  static constexpr int kWeights = kSum == Sum::kA ? 1 : 2;  ///< sums with u, or with y1 and y0
};

/// A block of stored keys, from its first one on.
struct StoredBlock {
  const uint8_t* k_h;
  numerics::PlaneRow v;
  const uint16_t* v_scale;  // permuted
};

/// Words of four consecutive keys' bytes in a row, and 4 more: fragments, 8 rows by 4 words, use all memory banks.
constexpr int kKeyWords = kTile / 4 + 4;
template <int D>
constexpr int kBlockWords = kFlushBlocks<D> / 4 + 4;  ///< the same of blocks

/// A block as it comes from memory.
template <int D>
struct alignas(128) BlockBytes {
  uint8_t k_h[kTile * D / 2], v_h[kTile * D / 2], v_l[kTile * D / 2];
  int8_t v_b[kTile * D];
  uint16_t v_scale[kTile];
};

/// Operands of one block. A row is a channel's; rows are in the order of row_of.
template <int D>
struct KeyOperands {
  uint32_t u[D * kKeyWords], y1[D * kKeyWords], y0[D * kKeyWords];
};

/// A block is unpacked while the last one is still multiplied, where shared memory has room for both.
template <int D>
constexpr int kOperands = D == 256 ? 1 : 2;

template <int D>
struct SumShared {
  BlockBytes<D> bytes[2];  // of a block, and of the next one
  KeyOperands<D> keys[kOperands<D>];
  uint32_t s[2][D * kBlockWords<D>], t[3][D * kBlockWords<D>];  // of kFlushBlocks, by byte, the lowest first
  StoredBlock blocks[kFlushBlocks<D>];
  uint64_t arrived[2];  // barriers of `bytes`
  float inverse_e;      // 1 / E_M
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

/// Readings of a key's four channels from their bytes in each plane. has_l, has_b: whether the cache keeps those
/// planes.
__device__ inline void share_readings(uint16_t v_h, uint16_t v_l, uint32_t v_b, bool has_l, bool has_b,
                                      int (&reading)[4]) {
  const uint8_t h[2] = {static_cast<uint8_t>(v_h), static_cast<uint8_t>(v_h >> 8)};
  const uint8_t l[2] = {static_cast<uint8_t>(v_l), static_cast<uint8_t>(v_l >> 8)};
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
  for (int i = 0; i < 4; ++i) reading[i] += static_cast<int8_t>(v_b >> 8 * i);
}

/// Byte `from` of x becomes byte `to` of the word.
__device__ inline void insert_byte(uint32_t& word, int to, int x, int from) {
  word = __byte_perm(word, static_cast<uint32_t>(x), (0x3210 & ~(0xF << 4 * to)) | (4 + from) << 4 * to);
}

/// u of a share.
template <int D>
__device__ void unpack_codes(const BlockBytes<D>& bytes, const ShareAt<D>& at, KeyOperands<D>& keys) {
  uint32_t u[4] = {};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const uint8_t* codes = bytes.k_h + (4 * at.quad + n) * (D / 2) + at.channel / 2;
    const uint16_t pairs = *reinterpret_cast<const uint16_t*>(codes);
    const uint8_t pair[2] = {static_cast<uint8_t>(pairs), static_cast<uint8_t>(pairs >> 8)};
#pragma unroll
    for (int i = 0; i < 4; ++i) insert_byte(u[i], n, numerics::nibble(pair[i / 2], i), 0);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) keys.u[row_of<D>(at.channel + i) * kKeyWords + at.quad] = u[i];
}

/// y of a share. Numbers below 2^22 are converted and rounded to the nearest, ties to even, by adding 1.5 * 2^23, which
/// is faster than conversions; the sum's low bits are the integer's.
template <int D>
__device__ void unpack_values(const BlockBytes<D>& bytes, const ShareAt<D>& at, const SumShared<D>& s,
                              KeyOperands<D>& keys) {
  constexpr float kWhole = 0x1.8p23f;
  const bool has_l = s.blocks[0].v.l != nullptr, has_b = s.blocks[0].v.b != nullptr;  // of any block
  uint32_t y1[4] = {}, y0[4] = {};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int key = 4 * at.quad + n, nibbles = key * (D / 2) + at.channel / 2;
    const auto pair = [nibbles](const uint8_t* plane) { return *reinterpret_cast<const uint16_t*>(plane + nibbles); };
    const float scale = numerics::from_bf16(bytes.v_scale[numerics::scale_slot(key)]);
    const float weight = numerics::fit_weight(scale, s.inverse_e);
    int reading[4];
    share_readings(pair(bytes.v_h), pair(bytes.v_l),
                   *reinterpret_cast<const uint32_t*>(bytes.v_b + key * D + at.channel), has_l, has_b, reading);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float exact = numerics::sub(numerics::float_of(numerics::bits_of(kWhole) + reading[i]), kWhole);
      const int y = static_cast<int>(numerics::bits_of(numerics::add(numerics::mul(exact, weight), kWhole)));
      insert_byte(y1[i], n, y, 1);
      insert_byte(y0[i], n, y, 0);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int word = row_of<D>(at.channel + i) * kKeyWords + at.quad;
    keys.y1[word] = y1[i];
    keys.y0[word] = y0[i];
  }
}

/// s, and for B t, of the unpacked block, which is number `index` of those that are multiplied at once.
template <int D, Sum kSum>
__device__ void sum_keys(const KeyOperands<D>& keys, int index, SumShared<D>& s) {
  constexpr int kThreads = kFitThreads / D;  // of a row
  const int thread = thread_here(), row = thread / kThreads, part = thread % kThreads;
  unsigned u = 0;
  int y = 0;
#pragma unroll
  for (int word = row * kKeyWords + part; word < row * kKeyWords + kTile / 4; word += kThreads) {
    u = __dp4a(keys.u[word], 0x01010101u, u);
    if constexpr (kSum == Sum::kB) {
      y += 256 * __dp4a(static_cast<int>(keys.y1[word]), 0x01010101, 0);
      y += static_cast<int>(__dp4a(keys.y0[word], 0x01010101u, 0u));
    }
  }
#pragma unroll
  for (int step = 1; step < kThreads; step *= 2) {
    u += __shfl_xor_sync(kWarp, u, step);
    if constexpr (kSum == Sum::kB) y += __shfl_xor_sync(kWarp, y, step);
  }
  if (part != 0) return;
  const auto store = [&](uint32_t* rows, int byte) {
    reinterpret_cast<uint8_t*>(rows + row * kBlockWords<D>)[index] = static_cast<uint8_t>(byte);
  };
#pragma unroll
  for (int byte = 0; byte < 2; ++byte) store(s.s[byte], static_cast<int>(u) >> 8 * byte);
  if constexpr (kSum == Sum::kB) {
#pragma unroll
    for (int byte = 0; byte < 3; ++byte) store(s.t[byte], y >> 8 * byte);
  }
}

/// A warp's sums of a panel, by weight (64, or 2^14 and 64) and by tile of 16 rows and 8 columns (ptx/warp_mma.cuh).
template <int D, Sum kSum>
struct PanelSums {
  int tiles[SumShape<D, kSum>::kWeights][2][SumShape<D, kSum>::kTiles][4];
};

/// Fragments of 16 rows of kWords words, from `row` on, and of 8: 32 keys or blocks.
template <int kWords>
struct RowFragment {
  uint32_t word[4];

  __device__ RowFragment(const uint32_t* rows, int row, int step) {
    const int thread = thread_here(), g = thread % 32 / 4, t = thread % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = rows[(row + g + i % 2 * 8) * kWords + t + 8 * step + i / 2 * 4];
  }
};
template <int kWords>
struct ColumnFragment {
  uint32_t word[2];

  __device__ ColumnFragment(const uint32_t* rows, int row, int step) {
    const int thread = thread_here(), g = thread % 32 / 4, t = thread % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) word[i] = rows[(row + g) * kWords + t + 8 * step + 4 * i];
  }
};

template <int kWords>
__device__ void multiply_u8(int (&sums)[4], const RowFragment<kWords>& a, const ColumnFragment<kWords>& b) {
  ptx::mma_u8u8(sums, a.word[0], a.word[1], a.word[2], a.word[3], b.word[0], b.word[1]);
}
template <int kWords>
__device__ void multiply_s8(int (&sums)[4], const RowFragment<kWords>& a, const ColumnFragment<kWords>& b) {
  ptx::mma_u8s8(sums, a.word[0], a.word[1], a.word[2], a.word[3], b.word[0], b.word[1]);
}

/// Adds the unpacked block's keys.
template <int D, Sum kSum>
__device__ void multiply_block(const KeyOperands<D>& keys, int down, int across, PanelSums<D, kSum>& sums) {
  using Column = ColumnFragment<kKeyWords>;
#pragma unroll
  for (int step = 0; step < kTile / 32; ++step) {
    const RowFragment<kKeyWords> u[2] = {{keys.u, down, step}, {keys.u, down + 16, step}};
#pragma unroll
    for (int n = 0; n < SumShape<D, kSum>::kTiles; ++n) {
      if constexpr (kSum == Sum::kA) {
        const Column right(keys.u, across + 8 * n, step);
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply_u8(sums.tiles[0][m][n], u[m], right);
      } else {
        const Column y1(keys.y1, across + 8 * n, step), y0(keys.y0, across + 8 * n, step);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_s8(sums.tiles[0][m][n], u[m], y1);
          multiply_u8(sums.tiles[1][m][n], u[m], y0);
        }
      }
    }
  }
}

/// Sums of s t^T (or s s^T) over the blocks, for a tile: products of bytes, by powers of 256 from the highest down.
template <int D, Sum kSum>
__device__ void multiply_sums(const SumShared<D>& s, int row, int column, int64_t (&sums)[4]) {
  constexpr int kWords = kBlockWords<D>, kBytes = kSum == Sum::kA ? 2 : 3;  // of the right side
#pragma unroll
  for (int power = kBytes; power >= 0; --power) {
    int products[4] = {};
#pragma unroll
    for (int left = 0; left < 2; ++left) {
      const int right = power - left;
      if (right < 0 || right >= kBytes) continue;
#pragma unroll
      for (int step = 0; step < kFlushBlocks<D> / 32; ++step) {
        const RowFragment<kWords> a(s.s[left], row, step);
        const ColumnFragment<kWords> b(kSum == Sum::kA ? s.s[right % 2] : s.t[right], column, step);
        if (right == 2) {
          multiply_s8(products, a, b);
        } else {
          multiply_u8(products, a, b);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 256 * sums[i] + products[i];
  }
}

/// Elements 2 half and 2 half + 1 of a thread's part of a tile lie side by side in (D, D).
template <int D>
__device__ longlong2& pair_of(int64_t* out, int row, int column, int half) {
  const int thread = thread_here(), g = thread % 32 / 4, t = thread % 4;
  return *reinterpret_cast<longlong2*>(out + (row + g + 8 * half) * D + column + 2 * t);
}

/// Stores a warp's sums, or adds them to what is stored. out: (D, D), rows and columns in the order of row_of
template <int D, Sum kSum>
__device__ void flush_sums(const SumShared<D>& s, int down, int across, bool add, const PanelSums<D, kSum>& sums,
                           int64_t* out) {
  constexpr int kTiles = SumShape<D, kSum>::kTiles;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        longlong2 keys = {sums.tiles[0][m][n][2 * half], sums.tiles[0][m][n][2 * half + 1]};
        if constexpr (kSum == Sum::kB) {
          keys.x = 256 * keys.x + sums.tiles[1][m][n][2 * half];
          keys.y = 256 * keys.y + sums.tiles[1][m][n][2 * half + 1];
        }
        longlong2& at = pair_of<D>(out, down + 16 * m, across + 8 * n, half);
        const longlong2 before = add ? at : longlong2{};
        at = {before.x + 64 * keys.x, before.y + 64 * keys.y};
      }
    }
  }
#pragma unroll 1
  for (int tile = 0; tile < 2 * kTiles; ++tile) {
    const int row = down + tile / kTiles * 16, column = across + tile % kTiles * 8;
    int64_t blocks[4] = {};
    multiply_sums<D, kSum>(s, row, column, blocks);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      longlong2& at = pair_of<D>(out, row, column, half);
      at = {at.x - blocks[2 * half], at.y - blocks[2 * half + 1]};
    }
  }
}

/// A panel of A or B of the `count` blocks from `first` on. block_at(index): a StoredBlock
template <int D, Sum kSum, typename Blocks>
__device__ void sum_panel(const Blocks& block_at, int first, int count, bool add, int panel, int64_t* out,
                          SumShared<D>& s) {
  using Shape = SumShape<D, kSum>;
  const int warp = thread_here() / 32;
  const int down = panel + warp % Shape::kWarpsDown * 32, across = warp / Shape::kWarpsDown * Shape::kTiles * 8;
  for (int at = thread_here(); at < D * kBlockWords<D>; at += kFitThreads) {
    s.s[0][at] = s.s[1][at] = 0;  // of blocks that are not there
  }
  if (const int block = thread_here(); block < count) s.blocks[block] = block_at(first + block);
  const auto arrived = [&s](int block) { return ptx::shared_address(&s.arrived[block % 2]); };
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) ptx::init_barrier(arrived(i));
    ptx::fence_barrier_init();
  }
  ptx::fence_async();
  __syncthreads();
  const auto fetch = [&](int block) {
    if (threadIdx.x == 0 && block < count) {
      fetch_block<D, kSum>(s.blocks[block], s.bytes[block % 2], arrived(block));
    }
  };
  fetch(0);
  fetch(1);
  PanelSums<D, kSum> sums = {};
#pragma unroll 1
  for (int block = 0; block < count; ++block) {
    const BlockBytes<D>& bytes = s.bytes[block % 2];
    KeyOperands<D>& keys = s.keys[block % kOperands<D>];
    ptx::wait_barrier(arrived(block), block / 2 % 2);
#pragma unroll 1
    for (int share = thread_here(); share < ShareAt<D>::kShares; share += kFitThreads) {
      unpack_codes(bytes, ShareAt<D>(share), keys);
    }
    if constexpr (kSum == Sum::kB) {
#pragma unroll 1
      for (int share = thread_here(); share < ShareAt<D>::kShares; share += kFitThreads) {
        unpack_values(bytes, ShareAt<D>(share), s, keys);
      }
    }
    __syncthreads();
    fetch(block + 2);
    sum_keys<D, kSum>(keys, block, s);
    multiply_block<D, kSum>(keys, down, across, sums);
    if constexpr (kOperands<D> == 1) __syncthreads();
  }
  __syncthreads();
  flush_sums<D, kSum>(s, down, across, add, sums, out);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) ptx::invalidate_barrier(arrived(i));
  }
  __syncthreads();
}

/// A or B of blocks [first, last), at least one, by a thread block. block_at(index): a StoredBlock; E_M = 2^e_exponent;
/// out: as of flush_sums. Not inlined: registers are short.
template <int D, Sum kSum, typename Blocks>
__device__ __noinline__ void sum_blocks(const Blocks& block_at, int first, int last, int e_exponent, int64_t* out,
                                        SumShared<D>& s) {
  if (threadIdx.x == 0) s.inverse_e = numerics::pow2(-e_exponent);
#pragma unroll 1
  for (int block = first; block < last; block += kFlushBlocks<D>) {
#pragma unroll 1
    for (int panel = 0; panel < D; panel += SumShape<D, kSum>::kPanel) {
      sum_panel<D, kSum>(block_at, block, min(kFlushBlocks<D>, last - block), block > first, panel, out, s);
    }
  }
}

}  // namespace fold::cuda::cache
