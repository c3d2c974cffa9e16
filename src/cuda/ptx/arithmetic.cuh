#pragma once
#include <cstdint>

namespace fold::cuda::ptx {

/// The larger magnitude; NaN if either is NaN.
__device__ inline float max_magnitude(float a, float b) {
  float largest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(fabsf(a)), "f"(fabsf(b)));
  return largest;
}

/// Byte-wise: the high nibbles of `high`, the low ones of `low`.
__device__ inline uint32_t join_nibbles(uint32_t high, uint32_t low) {
  uint32_t joined;
  asm("lop3.b32 %0, %1, %2, 0xF0F0F0F0, 0xE4;" : "=r"(joined) : "r"(high), "r"(low));
  return joined;
}

}  // namespace fold::cuda::ptx
