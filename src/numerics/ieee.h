#pragma once
#include <cmath>

#include "numerics/config.h"

// IEEE-754 building blocks: one rounding each, never contracted (the build passes -ffp-contract=off; device code uses
// the _rn intrinsics, which the compiler may not fuse).
namespace fold::numerics {

#if defined(__CUDA_ARCH__)
FOLD_HD float mul(float a, float b) { return __fmul_rn(a, b); }
FOLD_HD float add(float a, float b) { return __fadd_rn(a, b); }
FOLD_HD float sub(float a, float b) { return __fsub_rn(a, b); }
FOLD_HD float div(float a, float b) { return __fdiv_rn(a, b); }
FOLD_HD float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FOLD_HD float sqrt_rn(float a) { return __fsqrt_rn(a); }
FOLD_HD float rne(float a) { return rintf(a); }
FOLD_HD uint32_t bits_of(float a) { return __float_as_uint(a); }
FOLD_HD float float_of(uint32_t a) { return __uint_as_float(a); }
#else
FOLD_HD float mul(float a, float b) { return a * b; }
FOLD_HD float add(float a, float b) { return a + b; }
FOLD_HD float sub(float a, float b) { return a - b; }
FOLD_HD float div(float a, float b) { return a / b; }
FOLD_HD float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FOLD_HD float sqrt_rn(float a) { return __builtin_sqrtf(a); }
FOLD_HD float rne(float a) { return __builtin_rintf(a); }
FOLD_HD uint32_t bits_of(float a) { return __builtin_bit_cast(uint32_t, a); }
FOLD_HD float float_of(uint32_t a) { return __builtin_bit_cast(float, a); }
#endif

/// 2^e for -126 <= e <= 127.
FOLD_HD float pow2(int e) { return float_of(static_cast<uint32_t>(e + 127) << 23); }

/// a * 2^e, exact while the result is a normal number, -1022 <= e <= 1023.
FOLD_HD double ldexp_exact(double a, int e) {
  const uint64_t bits = static_cast<uint64_t>(e + 1023) << 52;
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, __longlong_as_double(static_cast<long long>(bits)));
#else
  return a * __builtin_bit_cast(double, bits);
#endif
}

FOLD_HD bool is_finite(float a) { return (bits_of(a) & 0x7F800000u) != 0x7F800000u; }

FOLD_HD float quiet_nan() { return float_of(0x7FC00000u); }

// bf16 and fp16 as raw bits.
constexpr uint16_t kBf16Nan = 0x7FC0;

FOLD_HD float from_bf16(uint16_t b) { return float_of(static_cast<uint32_t>(b) << 16); }

FOLD_HD uint16_t to_bf16(float a) {
  const uint32_t u = bits_of(a);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

/// A non-negative finite fp32 rounded up to bf16.
FOLD_HD uint16_t to_bf16_up(float a) { return static_cast<uint16_t>((bits_of(a) + 0xFFFFu) >> 16); }

FOLD_HD float from_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7FFFu;
  if (magnitude >= 0x7C00u) return float_of(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  if (magnitude >= 0x0400u) return float_of(sign | ((magnitude << 13) + 0x38000000u));
  const float value = static_cast<float>(magnitude) * pow2(-24);  // subnormal: exact
  return float_of(sign | bits_of(value));
}

FOLD_HD uint16_t to_f16(float a) {
  const uint32_t u = bits_of(a);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to 65536 or more
  if (magnitude >= 0x38800000u) {
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13));
  }
  // Subnormal results: units of 2^-24, so adding 2^-1 leaves the rounded count in the low mantissa bits.
  return static_cast<uint16_t>(sign | (bits_of(add(float_of(magnitude), 0.5f)) - 0x3F000000u));
}

}  // namespace fold::numerics
