#pragma once
#include "numerics/ieee.h"

// exp2, log2 and fixed-point weights: docs/numerics.md, section 4.
namespace fold::numerics {

constexpr float kExp2C1 = 0x1.62e42ap-1f, kExp2C2 = 0x1.ebf9c2p-3f, kExp2C3 = 0x1.c6b6d8p-5f, kExp2C4 = 0x1.3ce8acp-7f,
                kExp2C5 = 0x1.5bda4p-10f;
constexpr float kLog2C0 = 0x1.715476p+1f, kLog2C1 = 0x1.ec709cp-1f, kLog2C2 = 0x1.27ac74p-1f, kLog2C3 = 0x1.a1cb2p-2f;
constexpr float kExp2Min = -126.0f, kExp2Max = 40.0f;  ///< arguments are clamped to this range

/// 2^x as mantissa * 2^exponent, mantissa in about [0.707, 1.415]. A NaN counts as the lower end.
struct Exp2 {
  float mantissa;
  int exponent;
};

/// The polynomial: 2^f for |f| <= 1/2.
FOLD_HD float exp2_mantissa(float f) {
  float p = kExp2C5;
  p = fma(p, f, kExp2C4);
  p = fma(p, f, kExp2C3);
  p = fma(p, f, kExp2C2);
  p = fma(p, f, kExp2C1);
  return fma(p, f, 1.0f);
}

FOLD_HD Exp2 exp2_parts(float x) {
  x = x > kExp2Min ? x : kExp2Min;
  x = x < kExp2Max ? x : kExp2Max;
  const float n = rne(x);
  return {exp2_mantissa(sub(x, n)), static_cast<int>(n)};
}

/// 2^x in fp64 for arguments up to 900, which a sink may reach. Accurate as exp2.
FOLD_HD double exp2_wide(float x) {
  x = x > kExp2Min ? x : kExp2Min;
  x = x < 900.0f ? x : 900.0f;
  const float n = rne(x);
  return ldexp_exact(static_cast<double>(exp2_mantissa(sub(x, n))), static_cast<int>(n));
}

/// 2^x; relative error at most 2 ulp for -126 <= x <= 40 (tests/cpp/test_exp2.cpp walks the range).
FOLD_HD float exp2(float x) {
  const Exp2 e = exp2_parts(x);
  return mul(e.mantissa, pow2(e.exponent));
}

/// log2(y) of a positive, finite, normal y; absolute error at most 2 ulp of max(|log2 y|, 1).
FOLD_HD float log2(float y) {
  const uint32_t bits = bits_of(y);
  const uint32_t offset = bits - 0x3F3504F3u;  // bits of the fp32 0x1.6a09e6p-1
  const int k = static_cast<int>(offset) >> 23;
  const float m = float_of(bits - (static_cast<uint32_t>(k) << 23));
  const float z = div(sub(m, 1.0f), add(m, 1.0f));
  const float t = mul(z, z);
  float p = kLog2C3;
  p = fma(p, t, kLog2C2);
  p = fma(p, t, kLog2C1);
  p = fma(p, t, kLog2C0);
  return fma(p, z, static_cast<float>(k));
}

/// rne of a non-negative fp32, saturating to 32 bits.
FOLD_HD uint32_t round_u32(float a) {
#if defined(__CUDA_ARCH__)
  return __float2uint_rn(a);
#else
  return a < 4294967296.0f ? static_cast<uint32_t>(static_cast<int64_t>(rne(a))) : 0xFFFFFFFFu;
#endif
}

/// fix(x, r): 2^x * r in fixed point with kFraction bits, 0 <= r <= 2^60.
FOLD_HD uint32_t fix(const Exp2& e, float r) {
  return round_u32(mul(mul(e.mantissa, r), pow2(e.exponent + kFraction)));
}

FOLD_HD uint32_t fix(float x) { return fix(exp2_parts(x), 1.0f); }

}  // namespace fold::numerics
