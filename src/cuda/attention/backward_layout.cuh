#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/ptx/wgmma.cuh"
#include "plan/attention_params.h"

// What the kernels of the backward share: tiles, where sequences lie, and the workspace.
namespace fold::cuda::backward {

/// Tiles of a head dim. Their edges count from a sequence's first row, so that its bits do not depend on its
/// neighbours.
template <int D>
struct Tiles {
  static constexpr int kRows = D == 64 ? 128 : 64;  // query rows
  static constexpr int kKeys = 128;
};

/// Sums of dQ lie in the workspace as the threads of the main loop hold them: a tile is 8 pieces of 16 rows x 64
/// channels, one for each consumer warp, and piece[128 i + 4 lane + ..] are the 4 sums that wgmma leaves to a lane for
/// its channels 8 i .. 8 i + 7. At head dim 64 (128 rows) warpgroup w holds rows 64 w .. 64 w + 63, else (64 rows)
/// channels 64 w .. 64 w + 63.
constexpr int kPieces = 8, kPieceSums = 16 * 64, kTileSums = kPieces * kPieceSums;

/// Of the rows of a tile, each an array over the rows: log-sum-exp in base 2, Delta, and the grid's 2^shift.
/// lse +inf: the row sees no key, or there is none. NaN in lse and scale: something that the row sees is not finite.
/// Weights need those before kScale.
enum RowNumber { kLse, kDelta, kScale, kRowNumbers, kWeightNumbers = kScale };

/// Where the log-sum-exp and Delta of a tile's row lie: of each 16 rows, the four that wgmma leaves to a thread side by
/// side.
__device__ inline int place_of_row(int r) { return r / 16 * 16 + r % 8 / 2 * 4 + r / 8 % 2 * 2 + r % 2; }

/// Keys whose largest norms are also kept together.
constexpr int kNormBlock = 64;

/// Of a key, or of the keys of a block: (largest) norms of the rows of K and V; infinity or NaN if one is not finite.
struct Norms {
  float k, v;
};

/// Lengths are below plan::kMostDeviceRows: such a window hides nothing, and sums of it and a row stay in an int.
constexpr int kMaxWindow = static_cast<int>(plan::kMostDeviceRows) - 1;

/// Query rows or keys of all sequences.
struct Rows {
  const int32_t* cu_seqlens;  // (B + 1,) or null: dense
  int length;                 // dense: of each sequence
  int64_t total;

  /// Where a packed sequence begins, b <= B. Whatever cu_seqlens hold, it stays inside the tensors.
  __device__ int begin(int b) const { return static_cast<int>(min(max(int64_t{cu_seqlens[b]}, int64_t{0}), total)); }
};

/// The arguments of all kernels.
struct Args {
  plan::RowsView out, dout, dq, dk, dv, k, v;
  plan::RowsView lse;  // fp32 (B, H, Sq) or (H, Tq)
  const float* sinks;  // (H,) or null
  float* dsinks;       // (H,) or null
  Rows queries, keys;
  int batch, heads, kv_heads, group;
  int window_left, window_right;  // at most kMaxWindow
  float scale;                    // softmax_scale
  float scale2;                   // softmax_scale * log2(e), rounded
  float lse_unit;                 // turns a natural log-sum-exp into units of scale2

  // What a key tile is multiplied with is walked in at most so many parts, each with sums of dK and dV of its own where
  // there is more than one: for heads so few that their key tiles do not fill the device, or are a few long ones. Of
  // head counts, and dense of the lengths, alone.
  int parts;
  int units;              // of work over a key tile: KV heads and parts, dense: of all sequences
  int section, sections;  // dense: units whose tiles run at the same time; the last section has what is left, too

  // Of all sequences; packed: upper bounds.
  int64_t tiles;        // of query rows
  int64_t norm_blocks;  // of keys
  int64_t tasks;        // key tiles and units

  int32_t* dirty;      // (B, HK) whether something is not finite, or a row sees no key
  Norms* key_norms;    // (HK, norm_blocks, kNormBlock)
  Norms* block_norms;  // (HK, norm_blocks)
  float* rows;         // (H, tiles, kRowNumbers, kRows)
  int32_t* sums;       // (H, tiles, kTileSums)
  float* dk_parts;     // (parts, HK, Tk, D), of key tiles with more than one part; or null
  float* dv_parts;     // as dk_parts
};

struct Sequence {
  int index;
  int q_begin, q_len, k_begin, k_len;  // begins: of packed rows, 0 in a dense batch
  int64_t first_tile;                  // of its query rows
  int64_t first_block;                 // of its keys' norms
};

/// Where a sequence's tiles begin among those of all. One more for each packed sequence before it pays for all that are
/// filled in part: begin / tile + 1 is at least begin / tile of the next, less its own tiles.
__device__ inline int64_t first_tile(const Rows& rows, int b, int tile) {
  return rows.cu_seqlens ? int64_t{rows.begin(b) / tile} + b : b * int64_t{(rows.length + tile - 1) / tile};
}

template <int D>
__device__ inline Sequence sequence(const Args& a, int b) {
  Sequence s{b, 0, a.queries.length, 0, a.keys.length, 0, 0};
  if (a.queries.cu_seqlens) {
    s.q_begin = a.queries.begin(b);
    s.q_len = max(a.queries.begin(b + 1) - s.q_begin, 0);
    s.k_begin = a.keys.begin(b);
    s.k_len = max(a.keys.begin(b + 1) - s.k_begin, 0);
  }
  s.first_tile = first_tile(a.queries, b, Tiles<D>::kRows);
  s.first_block = first_tile(a.keys, b, kNormBlock);
  return s;
}

/// The sequence that a tile, counted among those of all, belongs to.
__device__ inline int sequence_of(const Args& a, const Rows& rows, int64_t at, int tile) {
  if (!rows.cu_seqlens) return static_cast<int>(at / ((rows.length + tile - 1) / tile));
  int low = 0, high = a.batch - 1;  // the last one that begins at or before it
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_tile(rows, middle, tile) <= at) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// The keys [first, last) that a row sees: row + Sk - Sq - left <= key <= row + Sk - Sq + right.
struct KeyRange {
  int first, last;
};
__device__ inline KeyRange visible_keys(const Args& a, const Sequence& s, int row) {
  const int diagonal = row + s.k_len - s.q_len;
  return {max(diagonal - a.window_left, 0), min(diagonal + a.window_right + 1, s.k_len)};
}

/// Tiles [begin, end) of query rows.
struct TileRange {
  int begin, end;
};

/// Those that see one of the keys of the tile that begins with `key`: of the rows i with
/// i - shift - left <= key <= i - shift + right.
template <int D>
__host__ __device__ inline TileRange tiles_seeing(const Args& a, const Sequence& s, int key) {
  constexpr int kRows = Tiles<D>::kRows;
  const int shift = s.q_len - s.k_len, end = min(key + Tiles<D>::kKeys, s.k_len);
  const int first = max(key + shift - a.window_right, 0), last = min(end + shift + a.window_left, s.q_len);
  return {first / kRows, first < last ? (last + kRows - 1) / kRows : first / kRows};
}

/// Parts in which a key tile is walked that these rows of a KV head's query heads see: so many that the sequence makes
/// about kTasks tasks of one length, of kFewest tiles at least. A function of head counts, windows and the
/// sequence's own lengths, so that its bits do not depend on its neighbours.
template <int D>
__host__ __device__ inline int parts_of(const Args& a, const Sequence& s, TileRange rows) {
  constexpr int kKeys = Tiles<D>::kKeys;
  constexpr int64_t kTasks = 115, kFewest = 8;  // 132 multiprocessors, less what rounding parts up adds
  if (a.parts == 1) return 1;
  const int key_tiles = (s.k_len + kKeys - 1) / kKeys;
  const TileRange first = tiles_seeing<D>(a, s, 0), last = tiles_seeing<D>(a, s, (key_tiles - 1) * kKeys);
  // Between the first and the last key tile the rows become more or fewer evenly.
  const int64_t twice = int64_t{first.end - first.begin + last.end - last.begin} * key_tiles * a.heads;
  const int64_t most = max(twice / (2 * kTasks) + 1, kFewest), tiles = int64_t{rows.end - rows.begin} * a.group;
  return static_cast<int>(min(max((tiles + most - 1) / most, int64_t{1}), int64_t{a.parts}));
}

template <typename T>
__device__ inline T* row_address(const plan::RowsView& x, const Sequence& s, int begin, int64_t row, int head) {
  return static_cast<T*>(x.data) + s.index * x.stride_b + (begin + row) * x.stride_row + head * x.stride_head;
}

__device__ inline void store_pair(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = {x, y}; }
template <typename G>
__device__ inline void store_pair(G* to, float x, float y) {
  *reinterpret_cast<uint32_t*>(to) = ptx::pair<G>(x, y);
}

/// The columns that wgmma leaves to a thread, of one row: x[2 i + e] for column 8 i + 2 (lane % 4) + e. The first
/// `width` columns go to to[..], width: a multiple of 32, at most 4 N; by the whole warp. to: 16-byte aligned, the same
/// for the 4 lanes of a row.
template <int N>
__device__ inline void store_row(float* to, const float (&x)[N], int width) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    if (8 * i < width) store_pair(to + 8 * i + 2 * (threadIdx.x % 4), x[2 * i], x[2 * i + 1]);
  }
}

/// 16-bit elements change hands first, so that a lane writes 16 bytes.
template <typename G, int N>
__device__ inline void store_row(G* to, const float (&x)[N], int width) {
  const bool high = threadIdx.x & 2, odd = threadIdx.x & 1;
  const auto exchange = [](uint32_t& a, uint32_t& b, bool second, int lanes) {  // a of the second for b of the first
    const uint32_t got = __shfl_xor_sync(0xffffffff, second ? a : b, lanes);
    (second ? a : b) = got;
  };
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    uint32_t w[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) w[e] = ptx::pair<G>(x[8 * i + 2 * e], x[8 * i + 2 * e + 1]);
    exchange(w[0], w[2], high, 2);
    exchange(w[1], w[3], high, 2);
    exchange(w[0], w[1], odd, 1);
    exchange(w[2], w[3], odd, 1);
    if (32 * i < width) {
      __stwb(reinterpret_cast<uint4*>(to + 32 * i + 8 * (threadIdx.x % 4)), make_uint4(w[0], w[1], w[2], w[3]));
    }
  }
}

}  // namespace fold::cuda::backward
