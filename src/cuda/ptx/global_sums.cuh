#pragma once

// What many thread blocks add up in global memory, without asking for what was there. The compiler does not know that a
// pointer is to global memory where it was read from shared memory, and would make a branch of it.
namespace fold::cuda::ptx {

__device__ inline void add_global(unsigned long long* to, unsigned long long value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "l"(value) : "memory");
}
__device__ inline void max_global(int* to, int value) {
  asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(value) : "memory");
}

}  // namespace fold::cuda::ptx
