#pragma once
#include "cuda/counting.cuh"
#include "fold/tensor.h"
#include "numerics/planes.h"

// Rows of D channels held by a warp: lane i has channels i * D / 32 .. (i + 1) * D / 32.
namespace fold::cuda {

/// numerics::rotate, over a warp. x: (D / 32,)
template <int D>
__device__ void rotate_row(float (&x)[D / 32], int lane) {
  constexpr int N = D / 32;
#pragma unroll
  for (int s = 1; s < N; s *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if ((i & s) != 0) continue;
      const float a = x[i], b = x[i + s];
      x[i] = numerics::add(a, b);
      x[i + s] = numerics::sub(a, b);
    }
  }
#pragma unroll
  for (int s = 1; s < 32; s *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float other = __shfl_xor_sync(kWarp, x[i], s);
      x[i] = (lane & s) != 0 ? numerics::sub(other, x[i]) : numerics::add(x[i], other);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = numerics::mul(x[i], numerics::rotation_scale(D));
}

/// N elements from data + at on, at any address, past L1. All are read before one is converted.
template <int N>
__device__ void load_elements(float (&x)[N], const void* data, DType dtype, int64_t at) {
  uint32_t bits[N];
  if (dtype == DType::f32) {
#pragma unroll
    for (int i = 0; i < N; ++i) bits[i] = __ldcg(static_cast<const uint32_t*>(data) + at + i);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) bits[i] = __ldcg(static_cast<const uint16_t*>(data) + at + i);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[i] = dtype == DType::f32    ? numerics::float_of(bits[i])
           : dtype == DType::bf16 ? numerics::from_bf16(static_cast<uint16_t>(bits[i]))
                                  : numerics::from_f16(static_cast<uint16_t>(bits[i]));
  }
}

template <int N>
__device__ void store_elements(const float (&x)[N], void* data, DType dtype, int64_t at) {
  if (dtype == DType::f32) {
#pragma unroll
    for (int i = 0; i < N; ++i) static_cast<float*>(data)[at + i] = x[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    static_cast<uint16_t*>(data)[at + i] = dtype == DType::bf16 ? numerics::to_bf16(x[i]) : numerics::to_f16(x[i]);
  }
}
__device__ inline void store_element(float value, void* data, DType dtype, int64_t at) {
  store_elements({value}, data, dtype, at);
}

// Products of one key with one query row. Everything 16-byte aligned; q_split: even channels before odd ones, as
// planes h and l hold them.

__device__ inline int dot_bytes(uint4 a, uint4 b, int dot) {
  dot = __dp4a(static_cast<int>(a.x), static_cast<int>(b.x), dot);
  dot = __dp4a(static_cast<int>(a.y), static_cast<int>(b.y), dot);
  dot = __dp4a(static_cast<int>(a.z), static_cast<int>(b.z), dot);
  return __dp4a(static_cast<int>(a.w), static_cast<int>(b.w), dot);
}
template <class F>
__device__ uint4 bytewise(uint4 a, uint4 b, F f) {
  return {f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w)};
}

/// The even and the odd channels of a 16-byte piece of nibbles, a byte each.
struct EvenOdd {
  uint4 even, odd;
};
/// Codes of plane h, h + 8.
__device__ inline EvenOdd codes_of(uint4 h) {
  return {bytewise(h, h, [](uint32_t x, uint32_t) { return x >> 4 & 0x0F0F0F0Fu; }),
          bytewise(h, h, [](uint32_t x, uint32_t) { return x & 0x0F0F0F0Fu; })};
}
/// Planes h and l together: a.
__device__ inline EvenOdd values_of(uint4 h, uint4 l) {
  return {
      bytewise(h, l, [](uint32_t x, uint32_t y) { return ((x & 0xF0F0F0F0u) | (y >> 4 & 0x0F0F0F0Fu)) ^ 0x80808080u; }),
      bytewise(h, l,
               [](uint32_t x, uint32_t y) { return ((x << 4 & 0xF0F0F0F0u) | (y & 0x0F0F0F0Fu)) ^ 0x80808080u; })};
}

/// D0 of docs/numerics.md, section 3. dot: of the codes with qa; sum_a: the channel sum of qa.
__device__ inline int centred(int dot, int sum_a) { return 32 * dot - 241 * sum_a; }

/// D0. h: (D / 2,)
template <int D>
__device__ int dot_h(const uint8_t* h, const int8_t* a_split, int sum_a) {
  int dot = 0;
#pragma unroll 2
  for (int i = 0; i < D / 32; ++i) {
    const EvenOdd codes = codes_of(reinterpret_cast<const uint4*>(h)[i]);
    const auto* a = reinterpret_cast<const uint4*>(a_split);
    dot = dot_bytes(codes.odd, a[D / 32 + i], dot_bytes(codes.even, a[i], dot));
  }
  return centred(dot, sum_a);
}

/// D1. h, l: (D / 2,)
template <int D>
__device__ int dot_hl(const uint8_t* h, const uint8_t* l, const int8_t* a_split, const int8_t* b_split) {
  int high = 0, low = 0;
#pragma unroll 2
  for (int i = 0; i < D / 32; ++i) {
    const EvenOdd values = values_of(reinterpret_cast<const uint4*>(h)[i], reinterpret_cast<const uint4*>(l)[i]);
    const auto *a = reinterpret_cast<const uint4*>(a_split), *b = reinterpret_cast<const uint4*>(b_split);
    high = dot_bytes(values.odd, a[D / 32 + i], dot_bytes(values.even, a[i], high));
    low = dot_bytes(values.odd, b[D / 32 + i], dot_bytes(values.even, b[i], low));
  }
  return 256 * high + low;
}

/// D2. key: (D,) plane b
template <int D>
__device__ int dot_b(const int8_t* key, const int8_t* a, const int8_t* b) {
  int high = 0, low = 0;
#pragma unroll 2
  for (int i = 0; i < D / 16; ++i) {
    const uint4 bytes = reinterpret_cast<const uint4*>(key)[i];
    high = dot_bytes(bytes, reinterpret_cast<const uint4*>(a)[i], high);
    low = dot_bytes(bytes, reinterpret_cast<const uint4*>(b)[i], low);
  }
  return 256 * high + low;
}

__device__ inline float unit_of_level(float e_q, int level) { return numerics::mul(e_q, level == 0 ? 0.5f : 0x1p-8f); }

/// F of level 0 or 1, in that level's unit.
__device__ inline float logit(int dot, float unit) { return numerics::mul(static_cast<float>(dot), unit); }

/// F of level 2.
__device__ inline float logit_2(int d1, int d2, float e_q) {
  const float dot = numerics::add(static_cast<float>(d1), numerics::mul(static_cast<float>(d2), 0x1p-8f));
  return numerics::mul(dot, numerics::mul(e_q, 0x1p-8f));
}

}  // namespace fold::cuda
