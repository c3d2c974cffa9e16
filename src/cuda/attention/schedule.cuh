#pragma once
#include <algorithm>
#include <cstdint>

#include "plan/attention_params.h"

// Which rows of which head a thread block takes next, and which keys they see. Nothing here changes a bit of a result:
// the order of the items is free.
namespace fold::cuda::attention {

/// Rows of one head and the key tiles that they see. Rows, keys and tiles count from the sequence's first.
struct Item {
  int sequence, head;  // sequence < 0: nothing is left
  int q_begin, q_len;  // the sequence's first row in the tensor (packed), and its rows
  int k_begin, k_len;
  int first_row;
  int tiles_begin, tiles_end;  // tiles that some row sees
  int whole_begin, whole_end;  // of those, the ones that every row sees whole

  __device__ bool masked(int tile) const { return tile < whole_begin || tile >= whole_end; }
};

/// A tile of rows of a packed sequence.
struct RowTile {
  int sequence, tile;
};

/// Items are taken in the order of tickets: sections of heads whose keys and values fit into L2, in each the rows that
/// see most keys first.
struct Schedule {
  int window_left, window_right;  // keys seen beside the diagonal, below plan::kMostDeviceRows
  int rows;                       // of a tile
  unsigned tiles;                 // row tiles: of a dense sequence, or (packed) at most, of all sequences
  unsigned lanes;                 // (sequence, head) pairs, or (packed) heads
  unsigned section;               // lanes of a section
  unsigned* taken;                // tickets taken beyond the grid's first ones, at first 0; null where there are none
  const RowTile* packed;          // (tiles,), longest first; null: dense
  const unsigned* packed_tiles;   // how many there are
};

/// Keys [first, last) that a row sees; both ends never decrease with the row.
struct KeyRange {
  int first, last;
};
__device__ inline KeyRange visible_keys(const Schedule& schedule, int q_len, int k_len, int row) {
  const int diagonal = row + k_len - q_len;
  const int first = min(max(diagonal - schedule.window_left, 0), k_len);
  return {first, min(max(diagonal + schedule.window_right + 1, first), k_len)};
}

/// One sequence of the batch. Number `batch` of a packed batch are the rows behind the last sequence, which see
/// nothing. Whatever cu_seqlens hold, rows stay inside the tensors.
__device__ inline void set_sequence(Item& item, const plan::ForwardParams& p, int sequence) {
  item.sequence = sequence;
  item.q_begin = item.k_begin = item.k_len = 0;
  if (p.cu_seqlens_q == nullptr) {
    item.q_len = static_cast<int>(p.seqlen_q);
    item.k_len = static_cast<int>(p.seqlen_k);
    return;
  }
  const int total_q = static_cast<int>(p.total_q), total_k = static_cast<int>(p.total_k);
  const bool behind = sequence == p.batch;
  item.q_begin = min(max(p.cu_seqlens_q[sequence], 0), total_q);
  item.q_len = (behind ? total_q : min(max(p.cu_seqlens_q[sequence + 1], item.q_begin), total_q)) - item.q_begin;
  if (behind) return;
  item.k_begin = min(max(p.cu_seqlens_k[sequence], 0), total_k);
  item.k_len = min(max(p.cu_seqlens_k[sequence + 1], item.k_begin), total_k) - item.k_begin;
}

/// Sets what a tile of rows sees, in tiles of `keys`.
__device__ inline void set_rows(Item& item, const Schedule& schedule, int first_row, int keys) {
  item.first_row = first_row;
  const KeyRange first = visible_keys(schedule, item.q_len, item.k_len, first_row);
  const KeyRange last = visible_keys(schedule, item.q_len, item.k_len, min(first_row + schedule.rows, item.q_len) - 1);
  item.tiles_begin = first.first / keys;
  item.tiles_end = last.last > first.first ? (last.last + keys - 1) / keys : item.tiles_begin;
  item.whole_begin = (last.first + keys - 1) / keys;
  item.whole_end = first.last / keys;
}

/// Items, as rows, are fewer than plan::kMostDeviceRows.
__device__ inline void set_item(Item& item, const plan::ForwardParams& p, const Schedule& schedule, unsigned ticket,
                                int keys) {
  const unsigned tiles = schedule.packed == nullptr ? schedule.tiles : *schedule.packed_tiles;
  if (ticket >= tiles * schedule.lanes) {
    item.sequence = -1;
    return;
  }
  const unsigned per_section = tiles * schedule.section, first_lane = ticket / per_section * schedule.section;
  const unsigned rest = ticket % per_section, lanes = min(schedule.section, schedule.lanes - first_lane);
  const unsigned place = rest / lanes, lane = first_lane + rest % lanes, heads = static_cast<unsigned>(p.heads);
  int tile;
  if (schedule.packed == nullptr) {
    set_sequence(item, p, static_cast<int>(lane / heads));
    item.head = static_cast<int>(lane % heads);
    tile = static_cast<int>(tiles - 1 - place);
  } else {
    const RowTile row_tile = schedule.packed[place];
    set_sequence(item, p, row_tile.sequence);
    item.head = static_cast<int>(lane);
    tile = row_tile.tile;
  }
  set_rows(item, schedule, tile * schedule.rows, keys);
}

// The list of a packed batch's row tiles, sorted by length up to an eighth.
constexpr int kListThreads = 1024;
constexpr int kLengthClasses = 256;

/// Longer is lower.
__device__ inline int length_class(int tiles) {
  const int n = tiles + 1, octave = 31 - __clz(n);
  const int eighth = octave >= 3 ? n >> (octave - 3) & 7 : n << (3 - octave) & 7;
  return kLengthClasses - 1 - (octave * 8 + eighth);
}

/// One thread block. Writes the list, its length, and the start of the count of tickets.
__global__ __launch_bounds__(kListThreads) void list_row_tiles(const __grid_constant__ plan::ForwardParams p,
                                                               const __grid_constant__ Schedule schedule, int keys,
                                                               RowTile* list, unsigned* count) {
  __shared__ unsigned starts[kLengthClasses];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x < kLengthClasses) starts[threadIdx.x] = 0;
  __syncthreads();
  for (int pass = 0; pass < 2; ++pass) {  // counts, then places
    for (int sequence = warp; sequence <= p.batch; sequence += kListThreads / 32) {
      Item item;
      set_sequence(item, p, sequence);
      for (int tile = lane; tile * schedule.rows < item.q_len; tile += 32) {
        set_rows(item, schedule, tile * schedule.rows, keys);
        const unsigned at = atomicAdd(&starts[length_class(item.tiles_end - item.tiles_begin)], 1u);
        if (pass == 1 && at < schedule.tiles) list[at] = {sequence, tile};
      }
    }
    __syncthreads();
    if (pass == 1) return;
    if (threadIdx.x == 0) {
      unsigned sum = 0;
      for (unsigned& start : starts) {
        const unsigned size = start;
        start = sum;
        sum += size;
      }
      *count = min(sum, schedule.tiles);  // sequences that overlap could have more
      *schedule.taken = 0;
    }
    __syncthreads();
  }
}

}  // namespace fold::cuda::attention
