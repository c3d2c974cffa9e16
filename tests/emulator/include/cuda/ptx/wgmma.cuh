#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "emulator.h"
#include "numerics/ieee.h"

// Products of a warpgroup. Every thread computes what it holds of the sums, at the latest when it waits: what is read
// from shared memory has to stay until then.
namespace fold::cuda::ptx {

enum class Major { k, mn };
constexpr int kSwizzleRow = 128;

/// Its address over 16, and the stride of blocks.
template <Major M>
uint64_t operand(uint32_t address, uint32_t block_stride = 16) {
  return uint64_t{block_stride} << 32 | address / 16;
}
inline uint64_t further(uint64_t operand, uint32_t bytes) { return operand + bytes / 16; }

inline void wgmma_arrive(EMU_WHERE) { __syncwarp(~0u, where); }
inline void wgmma_commit(EMU_WHERE) {
  __syncwarp(~0u, where);
  emu::commit_products();
}
template <int N>
void wgmma_wait(EMU_WHERE) {
  emu::wait_products(N);
  __syncwarp(~0u, where);
}
template <int N>
void keep_registers(float (&)[N]) {}
inline int anew(int x) { return x; }

/// The 16 k of `Count` rows of A, or columns of B, from `first` on; 2 at most, and an even one first.
template <typename T, Major M, int Count>
void load(float (*x)[16], uint64_t operand, int first, emu::Where where) {
  constexpr int kAtOnce = M == Major::k ? 8 : Count;
  const auto stride = static_cast<uint32_t>(operand >> 32);
  for (int i = 0; i < Count * 16 / kAtOnce; ++i) {
    const int outer = M == Major::k ? first + i / 2 : first, k = M == Major::k ? i % 2 * 8 : i;
    const auto row = static_cast<uint32_t>(M == Major::k ? outer : k);
    const auto column = static_cast<uint32_t>(M == Major::k ? k : outer);
    const uint32_t at =
        static_cast<uint32_t>(operand) * 16 + row * kSwizzleRow + column / 64 * stride + column % 64 * 2;
    T values[kAtOnce];
    std::memcpy(values, emu::shared_pointer(at ^ (at >> 3 & 0x70), sizeof(values), 2, where), sizeof(values));
    for (int j = 0; j < kAtOnce; ++j) (M == Major::k ? x[i / 2][k + j] : x[j][k]) = static_cast<float>(values[j]);
  }
}

/// d: this thread's sums. a: its rows g and g + 8.
template <typename T, int N, Major B>
void add_products(float (&d)[N / 2], const float (&a)[2][16], uint64_t rhs, bool accumulate, emu::Where where) {
  const int c = static_cast<int>(emu::current->thread.x % 4);
  for (int i = 0; i < N / 8; ++i) {
    float b[2][16];
    load<T, B, 2>(b, rhs, 8 * i + 2 * c, where);
    for (int j = 0; j < 4; ++j) {
      float& to = d[4 * i + j];
      float sum = accumulate ? to : 0.0f;
      for (int k = 0; k < 16; ++k) sum += a[j / 2][k] * b[j % 2][k];
      to = sum;
    }
  }
}

template <typename T, int N, Major A, Major B>
void wgmma(float (&d)[N / 2], uint64_t lhs, uint64_t rhs, bool accumulate, EMU_WHERE) {
  emu::product([&d, lhs, rhs, accumulate, where] {
    const int thread = static_cast<int>(emu::current->thread.x % 128), row = thread / 32 * 16 + thread % 32 / 4;
    float a[2][16];
    for (int r = 0; r < 2; ++r) load<T, A, 1>(a + r, lhs, row + 8 * r, where);
    add_products<T, N, B>(d, a, rhs, accumulate, where);
  });
}
template <typename T, int N, Major B>
void wgmma(float (&d)[N / 2], const uint32_t (&lhs)[4], uint64_t rhs, bool accumulate, EMU_WHERE) {
  float a[2][16];
  for (int lane = 0; lane < 4; ++lane) {  // of the quad
    for (int i = 0; i < 4; ++i) {
      const int from = static_cast<int>(emu::current->thread.x % 32 & ~3u) + lane;
      const uint32_t word = __shfl_sync(~0u, lhs[i], from, where);
      for (int e = 0; e < 2; ++e) {
        const auto bits = static_cast<uint16_t>(word >> 16 * e);
        a[i % 2][i / 2 * 8 + 2 * lane + e] = static_cast<float>(std::bit_cast<T>(bits));
      }
    }
  }
  emu::product([&d, a, rhs, accumulate, where] { add_products<T, N, B>(d, a, rhs, accumulate, where); });
}

template <typename T>
uint32_t pair(float low, float high) {
  const auto bits = [](float x) {
    return std::is_same_v<T, __nv_bfloat16> ? numerics::to_bf16(x) : numerics::to_f16(x);
  };
  return uint32_t{bits(high)} << 16 | bits(low);
}

inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

}  // namespace fold::cuda::ptx
