#pragma once
#include <cstdint>

// Copies from global to shared memory that threads do not wait for, and the barriers that count their bytes.
namespace fold::cuda::ptx {

/// The 32-bit address of an object in shared memory.
__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// mbarriers: a phase is over after `arrivals` arrivals and as many bytes as they announced.
__device__ inline void init_barrier(uint32_t barrier, uint32_t arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void invalidate_barrier(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/// Makes initialised barriers visible to the copy engine.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void arrive(uint32_t barrier, uint32_t arrivals = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline bool phase_is_over(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}
/// Waits a while before it says no.
__device__ inline bool phase_soon_over(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}
__device__ inline void wait_barrier(uint32_t barrier, uint32_t parity) {
  while (!phase_soon_over(barrier, parity)) {
  }
}

/// Barriers among `threads` threads (whole warps), numbered 1 to 15; 0 is __syncthreads'.
__device__ inline void sync_named(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
/// Counts as present, and goes on.
__device__ inline void arrive_named(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// to, from and bytes: multiples of 16. Completes on the barrier.
__device__ inline void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

/// Orders the thread's accesses of shared memory before later ones by the copy engine and the tensor cores, once a
/// barrier has told them.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Sends for the line of 128 bytes, as far as L2, if `wanted`.
__device__ inline void prefetch_if(bool wanted, const void* from) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p prefetch.global.L2 [%0];\n}" ::"l"(from),
               "r"(static_cast<int>(wanted))
               : "memory");
}

/// 4 bytes.
__device__ inline void copy_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
/// 16 bytes, past L1.
__device__ inline void copy_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/// The same if `wanted`.
__device__ inline void copy_16_if(bool wanted, uint32_t to, const void* from) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(to),
               "l"(from), "r"(static_cast<int>(wanted))
               : "memory");
}
/// 16 bytes, or zeros (nothing is read) if not `kept`.
__device__ inline void copy_16_or_zero(uint32_t to, const void* from, bool kept) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(kept ? 16 : 0) : "memory");
}
/// Arrives on a barrier once all of the thread's copies so far are there.
__device__ inline void arrive_when_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/// Waits for the thread's own copies.
__device__ inline void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
/// Ends a group of the thread's copies.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits for all but the newest `Groups` groups.
template <int Groups>
__device__ void wait_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}

}  // namespace fold::cuda::ptx
