#pragma once

namespace fold::cuda::ptx {

/// The larger magnitude; NaN if either is NaN.
__device__ inline float max_magnitude(float a, float b) {
  float largest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(fabsf(a)), "f"(fabsf(b)));
  return largest;
}

}  // namespace fold::cuda::ptx
