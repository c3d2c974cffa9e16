#pragma once
#include "emulator.h"

namespace fold::cuda::ptx {
inline void wait_for_earlier_kernels(EMU_WHERE) { emu::wait_for_earlier_kernels(where); }
inline void let_next_kernel_start() { emu::let_next_kernel_start(); }
}  // namespace fold::cuda::ptx
