#pragma once
#include <cstdint>
#include <vector>

#include "plan/attention_params.h"

// Pure functions of shapes. Whatever a sequence's bits depend on (tile edges, grid widths, which task owns which sum)
// is decided here from that sequence's own shape and the element type, never from its neighbours or the machine.
namespace fold::plan {

// Tiles: rows of queries and of keys that are multiplied at once. A tile that is seen in part is cut to a multiple of
// kTileStep, which is a whole number of vectors (16 lanes) and of register blocks (4 or 6 rows).
constexpr int64_t kQueryTile = 96;
constexpr int64_t kKeyTile = 192;
constexpr int64_t kTileStep = 48;

/// Where one sequence lies among all rows.
struct Sequence {
  int64_t index;           // its number in the batch
  int64_t q_begin, q_len;  // first row in the tensor, counted from the sequence's own stride_b for a dense batch
  int64_t k_begin, k_len;
  int64_t q_global, k_global;  // first row among the rows of all sequences (workspace rows)
};

std::vector<Sequence> sequences(const ForwardParams& p);

/// Keys [first, last) that a query row sees; first == last for none. Both ends never decrease with the row.
struct KeyRange {
  int64_t first, last;
  bool empty() const { return first >= last; }
};

inline KeyRange visible_keys(const ForwardParams& p, const Sequence& s, int64_t row) {
  const int64_t diagonal = row + s.k_len - s.q_len;
  const int64_t left = diagonal - p.window_left, right = diagonal + p.window_right + 1;
  const int64_t first = left < 0 ? 0 : left < s.k_len ? left : s.k_len;
  const int64_t last = right < first ? first : right < s.k_len ? right : s.k_len;
  return {first, last};
}

/// Query rows [first, last) of the sequence among which every row that sees a key of [k_first, k_last) lies.
KeyRange rows_seeing(const ForwardParams& p, const Sequence& s, int64_t k_first, int64_t k_last);

/// One tile of one head: the unit of work that a thread takes.
struct TileTask {
  int64_t sequence;  // index into sequences()
  int64_t head;      // query head or KV head
  int64_t tile;      // its number within the sequence
};

std::vector<TileTask> query_tiles(const std::vector<Sequence>& all, int64_t heads);
std::vector<TileTask> key_tiles(const std::vector<Sequence>& all, int64_t kv_heads);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/// Channels are padded to whole vectors.
constexpr int64_t padded_head_dim(int64_t head_dim) { return round_up(head_dim, 16); }

/// Bits of the grid on which dQ is summed: 30 in int32 for 16-bit inputs, 61 in int64 for fp32.
constexpr int dq_grid_bits(DType dtype) { return dtype == DType::f32 ? 61 : 30; }

}  // namespace fold::plan
