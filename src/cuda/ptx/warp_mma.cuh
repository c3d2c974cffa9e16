#pragma once
#include <cstdint>

// Warp-level integer matrix products, m16n8k32. Lane 4 g + c holds of A: rows g and g + 8, k = 4 c .. 4 c + 3 (a0, a1)
// and 16 more (a2, a3); of B: column g, the same k (b0, b1); of the sums: columns 2 c and 2 c + 1 of row g (d[0], d[1])
// and of row g + 8 (d[2], d[3]).
namespace fold::cuda::ptx {

#define FOLD_MMA(name, a_type, b_type)                                                                     \
  __device__ inline void name(int(&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, \
                              uint32_t b1) {                                                               \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." a_type "." b_type                                \
                 ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                    \
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                          \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                  \
  }
FOLD_MMA(mma_u8s8, "u8", "s8")
FOLD_MMA(mma_u8u8, "u8", "u8")
FOLD_MMA(mma_s8u8, "s8", "u8")
FOLD_MMA(mma_s8s8, "s8", "s8")
#undef FOLD_MMA

// m16n8k16: only k = 4 c .. 4 c + 3.
#define FOLD_MMA_K16(name, a_type, b_type)                                         \
  __device__ inline void name(int(&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32." a_type "." b_type        \
                 ".s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"        \
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                  \
                 : "r"(a0), "r"(a1), "r"(b0));                                     \
  }
FOLD_MMA_K16(mma_s8u8_k16, "s8", "u8")
FOLD_MMA_K16(mma_u8s8_k16, "u8", "s8")
#undef FOLD_MMA_K16

/// Four 8 x 8 matrices of 16-bit elements, transposed: lane i gives the address of row i % 8 of matrix i / 8; lane
/// 4 g + c receives in m[q] the elements (2 c, g) and (2 c + 1, g) of matrix q.
__device__ inline void load_transposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

}  // namespace fold::cuda::ptx
