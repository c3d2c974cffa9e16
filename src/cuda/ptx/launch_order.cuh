#pragma once

// Kernels of one stream whose launches overlap (programmatic stream serialization).
namespace fold::cuda::ptx {

/// Until the kernels before this one have finished and what they wrote can be seen. Every kernel that is launched to
/// overlap calls it before it reads or writes memory.
__device__ inline void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// The next kernel's CTAs may be placed from here on.
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace fold::cuda::ptx
