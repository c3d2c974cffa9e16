#pragma once

// Kernels of one stream whose launches overlap (programmatic stream serialization).
namespace fold::cuda::ptx {

/// Until the kernels before this one have finished and what they wrote can be seen. Every kernel that is launched to
/// overlap calls it before it ends, before it writes memory that others know, and before it reads what the kernel just
/// before it writes. What is older it may read at once (from L2: __ldcg), if the kernel before it has itself waited
/// before it let this one start.
__device__ inline void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// The next kernel's CTAs may be placed from here on.
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace fold::cuda::ptx
