#pragma once
#include "cuda/attention/backward_layout.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/wgmma.cuh"

// What the warps of the main loop's CTA share: its task and its shared memory.
namespace fold::cuda::backward {

constexpr int kKeyThreads = 256, kKeyWarps = kKeyThreads / 32, kMainThreads = kKeyThreads + 128;
constexpr int kStages = 2, kDsBuffers = 3;

/// What a CTA has to do. In shared memory, as registers are scarce.
struct Task {
  Sequence s;
  int head;                    // of K and V
  int part, parts;             // of what is multiplied with the key tile
  int key;                     // first of its tile
  TileRange rows;              // that see a key
  int plain, plain_end;        // of those, where every row sees every key
  int first_head, first_tile;  // of query rows, where the part begins
  int steps;                   // tiles of the part; -1: no task
  float scale2;                // Args::scale2: a register, not a load from constant memory for each element
};

/// A tile of query rows: its first row, and its number among the tiles of all heads.
struct alignas(16) Tile {
  int row, row_tile;
  bool masked;  // not every row sees every key of the task
};

template <int D>
struct Shared {
  static constexpr int kRows = Tiles<D>::kRows, kKeys = Tiles<D>::kKeys;
  static constexpr int kBlocks = (D + 63) / 64;  // of 64 channels: 128-byte rows, each block rows * 128 bytes
  static constexpr int kRowBlock = kRows * ptx::kSwizzleRow, kKeyBlock = kKeys * ptx::kSwizzleRow;
  static constexpr int kRowTile = kBlocks * kRowBlock, kKeyTile = kBlocks * kKeyBlock;

  alignas(1024) uint8_t k[kKeyTile];
  uint8_t v[kKeyTile];
  uint8_t q[kStages][kRowTile];
  uint8_t dout[kStages][kRowTile];
  uint8_t ds[kDsBuffers][kRows * kKeys * 2];  // dS^T: blocks of 64 query rows, of which a key has 128 bytes
  int32_t dq[kPieces][kPieceSums];
  alignas(16) float rows[kStages][kWeightNumbers][kRows];
  Task task;
  Tile tiles[kStages];
  // A tile's q with its numbers and dout have arrived, nobody needs it any more; dS is there; a warpgroup's pieces of
  // dQ are there, have left.
  uint64_t k_full, v_full, q_full[kStages], dout_full[kStages], empty[kStages], ds_full[kDsBuffers], dq_full[2],
      dq_empty[2];
};

static_assert(sizeof(Shared<128>) <= 227 * 1024 && sizeof(Shared<64>) <= 227 * 1024);

/// Tasks in the order of starting: sections of units whose rows share the L2 cache; in a section the tiles that the
/// most rows see first (causal: small keys).
template <int D>
__device__ Task find_task(const Args& a, unsigned number) {
  constexpr int kRows = Tiles<D>::kRows, kKeys = Tiles<D>::kKeys;
  Task task{};
  int unit, tile;
  if (!a.keys.cu_seqlens) {
    const unsigned tiles = (a.keys.length + kKeys - 1) / kKeys,
                   section = min(number / (a.section * tiles), a.sections - 1u);
    const unsigned first = section * a.section, width = section + 1 < a.sections ? a.section : a.units - first;
    const unsigned in_section = number - first * tiles;
    unit = static_cast<int>(first + in_section % width);
    tile = static_cast<int>(in_section / width);
    task.s = sequence<D>(a, unit / (a.kv_heads * a.parts));
    unit %= a.kv_heads * a.parts;
  } else {
    const unsigned at = number / a.units;
    unit = static_cast<int>(number % a.units);
    task.s = sequence<D>(a, sequence_of(a, a.keys, at, kKeys));
    tile = static_cast<int>(at - first_tile(a.keys, task.s.index, kKeys));
  }
  task.head = unit / a.parts;
  task.key = tile * kKeys;
  task.scale2 = a.scale2;
  if (task.key >= task.s.k_len) {  // behind the last packed sequence
    task.steps = -1;
    return task;
  }
  task.rows = tiles_seeing<D>(a, task.s, task.key);
  task.part = unit % a.parts;
  task.parts = parts_of<D>(a, task.s, task.rows);
  if (task.part >= task.parts) {
    task.steps = -1;
    return task;
  }
  const int tiles = task.rows.end - task.rows.begin, steps = tiles * a.group;
  const int first = static_cast<int>(int64_t{steps} * task.part / task.parts);
  task.steps = static_cast<int>(int64_t{steps} * (task.part + 1) / task.parts) - first;
  task.first_head = task.head * a.group + first / max(tiles, 1);
  task.first_tile = task.rows.begin + first % max(tiles, 1);
  const int end = task.key + kKeys, shift = task.s.q_len - task.s.k_len;
  if (end <= task.s.k_len) {
    task.plain = (max(end - 1 + shift - a.window_right, 0) + kRows - 1) / kRows;
    task.plain_end = max(min(task.key + shift + a.window_left + 1, task.s.q_len), 0) / kRows;
  }
  return task;
}

/// Tiles of a task, in the order in which they are multiplied: query heads, and tiles of rows of each.
struct TileWalk {
  const Args& a;
  const Task& task;
  int tile, row_tile;  // in the sequence, among those of all heads

  __device__ TileWalk(const Args& args, const Task& of) : a(args), task(of), tile(of.first_tile) {
    row_tile = static_cast<int>(task.first_head * a.tiles + task.s.first_tile) + tile;
  }
  /// Whether the next tile is another head's.
  __device__ bool advance() {
    ++row_tile;
    if (++tile < task.rows.end) return false;
    tile = task.rows.begin;
    row_tile += static_cast<int>(a.tiles) - (task.rows.end - tile);
    return true;
  }
};

/// Which rows see a key: those of [first, first + count).
struct RowRange {
  int first;
  unsigned count;
  __device__ bool has(int row) const { return static_cast<unsigned>(row - first) < count; }
};
__device__ inline RowRange rows_seeing(const Args& a, const Sequence& s, int key) {
  const int diagonal = key + s.q_len - s.k_len;
  const int first = max(diagonal - a.window_right, 0), last = min(diagonal + a.window_left + 1, s.q_len);
  return {first, key < s.k_len && first < last ? static_cast<unsigned>(last - first) : 0u};
}

/// Zeroes what would spoil sums although its weight is zero: rows of the next sequence, and elements that are not
/// finite (rows that see one have lse NaN, so its own effect is not lost). By the key warpgroups.
template <typename T, int Bytes>
__device__ inline void clean_tile(uint8_t* tile, int rows_of_tile, int rows) {
  constexpr uint32_t kExponent = std::is_same_v<T, __nv_bfloat16> ? 0x7f80 : 0x7c00;
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) * 16; at < Bytes; at += kKeyThreads * 16) {
    uint4& words = *reinterpret_cast<uint4*>(tile + at);
    const bool kept = at / ptx::kSwizzleRow % rows_of_tile < rows;
    uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (uint32_t& x : w) {
      if (!kept || (x & kExponent) == kExponent) x &= 0xffff0000;
      if (!kept || (x >> 16 & kExponent) == kExponent) x &= 0xffff;
    }
    words = {w[0], w[1], w[2], w[3]};
  }
}

}  // namespace fold::cuda::backward
