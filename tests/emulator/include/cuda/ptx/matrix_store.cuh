#pragma once
#include "emulator.h"

namespace fold::cuda::ptx {
inline void store_matrices(uint32_t address, const uint32_t (&m)[4], EMU_WHERE) {
  const int lane = static_cast<int>(emu::current->thread.x % 32);
  for (int q = 0; q < 4; ++q) {
    const uint32_t row = __shfl_sync(~0u, address, 8 * q + lane / 4, where);
    std::memcpy(emu::shared_pointer(row, 16, 16, where) + lane % 4 * 4, &m[q], 4);
  }
}
}  // namespace fold::cuda::ptx
