#pragma once
#include "emulator.h"

namespace fold::cuda::ptx {
inline float max_magnitude(float a, float b) {
  return a != a || b != b ? __int_as_float(0x7FFFFFFF) : fmaxf(fabsf(a), fabsf(b));
}
inline uint32_t join_nibbles(uint32_t high, uint32_t low) { return (high & 0xF0F0F0F0u) | (low & 0x0F0F0F0Fu); }
}  // namespace fold::cuda::ptx
