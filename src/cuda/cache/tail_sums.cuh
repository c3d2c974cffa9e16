#pragma once
#include "cuda/cache/tail_unpack.cuh"
#include "cuda/ptx/warp_mma.cuh"

// The integer sums behind a fit (docs/numerics.md, section 9), on the int8 tensor cores.
//
// A = sum_b (64 sum_j u_j u_j^T - s_b s_b^T) and B = sum_b (64 sum_j u_j y_j^T - s_b t_b^T): s_b and t_b are the sums
// of a block's u and y. In bytes, y = 256 y1 + y0, s = 256 s1 + s0 and t = 2^16 t2 + 2^8 t1 + t0, where y1 and t2 are
// signed. The second products add over blocks as the first add over keys, and are made for kFlushBlocks of them at
// once. Those add at most 64 * 15 * 255 or 255 * 255 each to any of the sums: int32 has room.
namespace fold::cuda::cache {

template <int D>
constexpr int kFlushBlocks = D == 256 ? 32 : 64;  ///< as many as shared memory has room for

/// Memory of a part's sums in the workspace, and of who solves its fit.
template <int D>
struct alignas(256) FitSlot {
  int64_t a[D * D];                // A's sums, rows and columns in the order of row_of; then Y, row-major
  int64_t b[D * D];                // B's sums, likewise; then L, row-major
  double c[D <= 128 ? 1 : D * D];  // L, then C, where shared memory has no room
};

template <int D, Sum kSum>
struct SumShape {
  static constexpr int kPanel = D == 128 || (D == 256 && kSum == Sum::kA) ? 128 : 64;  ///< rows of a pass
  static constexpr int kWarpsDown = kPanel / 32;                                       ///< a warp has 32 of them
  static constexpr int kWarpsAcross = kFitWarps / kWarpsDown;
  static constexpr int kTiles = D / 8 / kWarpsAcross;       ///< and this many times 8 columns
  static constexpr int kWeights = kSum == Sum::kA ? 1 : 2;  ///< sums with u, or with y1 and y0
};

template <int D>
constexpr int kBlockWords = kFlushBlocks<D> / 4 + 4;  ///< kKeyWords' counterpart, of blocks

/// A block is unpacked while the last one is still multiplied, where shared memory has room for both.
template <int D>
constexpr int kOperands = D == 256 ? 1 : 2;

/// Blocks on their way from memory.
template <int D>
constexpr int kStages = D == 256 ? 2 : 4;

template <int D>
struct SumShared {
  BlockBytes<D> bytes[kStages<D>];
  KeyOperands<D> keys[kOperands<D>];
  uint32_t s[2][D * kBlockWords<D>], t[3][D * kBlockWords<D>];  // of kFlushBlocks, by byte, the lowest first
  StoredBlock blocks[kFlushBlocks<D>];
  uint64_t arrived[kStages<D>];  // barriers of `bytes`
  float inverse_e;               // 1 / E_M
};

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
  const auto arrived = [&s](int block) { return ptx::shared_address(&s.arrived[block % kStages<D>]); };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages<D>; ++i) ptx::init_barrier(arrived(i));
    ptx::fence_barrier_init();
  }
  ptx::fence_async();
  __syncthreads();
  const auto fetch = [&](int block) {
    if (threadIdx.x == 0 && block < count) {
      fetch_block<D, kSum>(s.blocks[block], s.bytes[block % kStages<D>], arrived(block));
    }
  };
#pragma unroll 1
  for (int block = 0; block < kStages<D>; ++block) fetch(block);
  PanelSums<D, kSum> sums = {};
#pragma unroll 1
  for (int block = 0; block < count; ++block) {
    const BlockBytes<D>& bytes = s.bytes[block % kStages<D>];
    KeyOperands<D>& keys = s.keys[block % kOperands<D>];
    ptx::wait_barrier(arrived(block), block / kStages<D> % 2);
#pragma unroll 1
    for (int share = thread_here(); share < ShareAt<D>::kShares; share += kFitThreads) {
      unpack_codes(bytes, ShareAt<D>(share), keys);
    }
    if constexpr (kSum == Sum::kB) {
#pragma unroll 1
      for (int share = thread_here(); share < ShareAt<D>::kShares; share += kFitThreads) {
        unpack_values(bytes, ShareAt<D>(share), s.blocks[0].v.l != nullptr, s.blocks[0].v.b != nullptr, s.inverse_e,
                      keys);
      }
    }
    __syncthreads();
    fetch(block + kStages<D>);
    sum_keys<D, kSum>(keys, block, s);
    multiply_block<D, kSum>(keys, down, across, sums);
    if constexpr (kOperands<D> == 1) __syncthreads();
  }
  __syncthreads();
  flush_sums<D, kSum>(s, down, across, add, sums, out);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages<D>; ++i) ptx::invalidate_barrier(arrived(i));
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
