#pragma once
#include <cstdint>

namespace fold::cuda::ptx {

/// Four 8 x 8 matrices of 16-bit elements to shared memory: lane i gives the address of row i % 8 of matrix i / 8 (16
/// bytes); m[q] of lane 4 g + c holds the elements (g, 2 c) and (g, 2 c + 1) of matrix q.
__device__ inline void store_matrices(uint32_t address, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
}

}  // namespace fold::cuda::ptx
