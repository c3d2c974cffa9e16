#pragma once
#include <array>
#include <vector>

#include "cuda/launch.h"
#include "cuda/ptx/async_copy.cuh"

// Boxes of tensors.
namespace fold::cuda::ptx {
struct TensorBoxes {
  const void* data;
  std::array<int64_t, 4> size;
  std::array<int64_t, 3> stride;
  int rows;
};
}  // namespace fold::cuda::ptx
using CUtensorMap = fold::cuda::ptx::TensorBoxes;

namespace fold::cuda::ptx {
inline CUtensorMap tensor_map(const TensorBoxes& boxes, bool) {
  if (reinterpret_cast<uintptr_t>(boxes.data) % 16 != 0 || boxes.rows > 256) emu::fail("a tensor map");
  for (size_t i = 0; i < 3; ++i) {
    if (boxes.size[i + 1] != 1 && boxes.stride[i] % 8 != 0) emu::fail("a tensor map's stride");
  }
  return boxes;
}
inline void prefetch_map(const CUtensorMap&) {}

inline void copy_box(uint32_t to, const CUtensorMap& map, uint32_t barrier, int channel, int row, int head,
                     int sequence, EMU_WHERE) {
  if (to % 1024 != 0) emu::fail("a box's place is not aligned", where);
  std::vector<emu::Piece> pieces;
  for (int r = 0; r < map.rows; ++r) {
    for (int piece = 0; piece < 8; ++piece) {
      const std::array<int64_t, 4> at = {channel + 8 * piece, row + r, head, sequence};
      bool inside = true;
      int64_t element = at[0];
      for (size_t i = 0; i < 4; ++i) {
        inside = inside && at[i] >= 0 && at[i] < map.size[i];
        if (i > 0 && map.size[i] != 1) element += at[i] * map.stride[i - 1];
      }
      pieces.push_back({to + static_cast<uint32_t>(128 * r + 16 * (piece ^ r % 8)),
                        inside ? static_cast<const uint16_t*>(map.data) + element : nullptr});
    }
  }
  emu::copy_pieces(pieces, barrier, where);
}

inline void bulk_add_i32(void* to, uint32_t from, uint32_t bytes, EMU_WHERE) { emu::bulk_add(to, from, bytes, where); }
inline void commit_bulk() { emu::commit_additions(); }
template <int N>
void wait_bulk_read() {
  emu::wait_additions(N);
}

inline void sleep_on_barrier(uint32_t barrier, uint32_t parity, EMU_WHERE) { emu::wait_phase(barrier, parity, where); }
template <int>
void give_registers() {}
template <int>
void take_registers() {}
}  // namespace fold::cuda::ptx
