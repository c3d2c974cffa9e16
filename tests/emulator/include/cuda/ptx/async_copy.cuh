#pragma once
#include "emulator.h"

namespace fold::cuda::ptx {
inline uint32_t shared_address(const void* p) { return emu::shared_address(p); }
inline void init_barrier(uint32_t at, uint32_t arrivals = 1, EMU_WHERE) { emu::init_mbarrier(at, arrivals, where); }
inline void invalidate_barrier(uint32_t at, EMU_WHERE) { emu::invalidate_mbarrier(at, where); }
inline void fence_barrier_init() {}
inline void expect_bytes(uint32_t at, uint32_t bytes, EMU_WHERE) { emu::arrive(at, 1, bytes, where); }
inline void arrive(uint32_t at, uint32_t arrivals = 1, EMU_WHERE) { emu::arrive(at, arrivals, 0, where); }
inline bool phase_is_over(uint32_t at, uint32_t parity, EMU_WHERE) { return emu::phase_is_over(at, parity, where); }
inline bool phase_soon_over(uint32_t at, uint32_t parity, EMU_WHERE) { return emu::phase_is_over(at, parity, where); }
inline void wait_barrier(uint32_t at, uint32_t parity, EMU_WHERE) { emu::wait_phase(at, parity, where); }
inline void sync_named(int barrier, int threads, EMU_WHERE) {
  emu::barrier(barrier, static_cast<unsigned>(threads), true, true, where);
}
inline void arrive_named(int barrier, int threads, EMU_WHERE) {
  emu::barrier(barrier, static_cast<unsigned>(threads), false, true, where);
}
inline void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, EMU_WHERE) {
  emu::bulk_copy(to, from, bytes, barrier, where);
}
inline void fence_async() {}
inline void copy_4(uint32_t to, const void* from, EMU_WHERE) { emu::copy_async(to, from, 4, 4, where); }
inline void copy_16(uint32_t to, const void* from, EMU_WHERE) { emu::copy_async(to, from, 16, 16, where); }
inline void prefetch_if(bool, const void*) {}
inline void copy_16_if(bool wanted, uint32_t to, const void* from, EMU_WHERE) {
  if (wanted) emu::copy_async(to, from, 16, 16, where);
}
inline void copy_16_or_zero(uint32_t to, const void* from, bool kept, EMU_WHERE) {
  emu::copy_async(to, from, 16, kept ? 16 : 0, where);
}
inline void arrive_when_copied(uint32_t at, EMU_WHERE) { emu::arrive_when_copied(at, where); }
inline void wait_copies(EMU_WHERE) { emu::wait_copies(-1, where); }
inline void commit_copies() { emu::commit_copies(); }
template <int Groups>
void wait_copies_but(EMU_WHERE) {
  emu::wait_copies(Groups, where);
}
}  // namespace fold::cuda::ptx
