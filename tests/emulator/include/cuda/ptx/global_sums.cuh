#pragma once
#include "emulator.h"

namespace fold::cuda::ptx {
inline void add_global(unsigned long long* to, unsigned long long value) { atomicAdd(to, value); }
inline void max_global(int* to, int value) { atomicMax(to, value); }
}  // namespace fold::cuda::ptx
