#pragma once
#include "emulator.h"

namespace fold::cuda::ptx {
#define FOLD_MMA(name)                                                                                             \
  inline void mma_##name(int(&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, \
                         EMU_WHERE) {                                                                              \
    emu::mma(#name, d, {a0, a1, a2, a3, b0, b1}, emu::combine_##name, where);                                      \
  }
FOLD_MMA(u8s8)
FOLD_MMA(u8u8)
FOLD_MMA(s8u8)
FOLD_MMA(s8s8)
#undef FOLD_MMA
inline void mma_s8u8_k16(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0, EMU_WHERE) {
  emu::mma("s8u8_k16", d, {a0, a1, 0, 0, b0, 0}, emu::combine_s8u8, where);
}
inline void mma_u8s8_k16(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0, EMU_WHERE) {
  emu::mma("u8s8_k16", d, {a0, a1, 0, 0, b0, 0}, emu::combine_u8s8, where);
}
inline void load_transposed(uint32_t (&m)[4], uint32_t address, EMU_WHERE) { emu::load_transposed(m, address, where); }
}  // namespace fold::cuda::ptx
