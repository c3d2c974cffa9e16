#pragma once
#include "numerics/ieee64.h"

// Quotients by one divisor without a division each.
namespace fold::numerics {

/// A row's quotients (docs/numerics.md, section 1).
///
/// div(x, e) where that is at least 1/4 in magnitude, and something nearer to 0 than 0.3 where it is not: rne() of it
/// is rne(div(x, e)). e: a row's scale, or 1/256 of it; inverse: div(1, e); |x| <= 256 e.
///
/// Why. q = fp32(x inverse) is at most 1.5 ulp off. e has 8 significant bits, so q e and x are multiples of
/// g = ulp(q) ulp8(e) >= 2^-140, and the remainder, at most 1.5 ulp(q) e <= 384 g, is exact. The last fma rounds
/// x / e + d once, |d| <= 1.5 * 2^-24 ulp. A point halfway between two fp32 numbers has a 25-bit odd significand, so
/// that times e is not the 24-bit x but differs from it by at least g / 2: x / e is at least 2^-9 ulp away from it.
FOLD_HD float quotient(float x, float e, float inverse) {
  const float q = mul(x, inverse);
  return fma(fma(-q, e, x), inverse, q);
}

/// Remainders x - a e from here on are infinite when multiplied by 256, so their b is 127 or -128.
constexpr float kLargeRemainder = 0x1p120f;

/// div(a, d), for a = 0 or numbers whose quotients and remainders stay normal. inverse: div(1, d). (Markstein: from a q
/// that is one of the two numbers beside a / d, a - q d is exact, and q + (a - q d) inverse rounds as a / d does. The
/// first step makes q that: a * inverse is at most 1.5 ulp off.)
FOLD_HD double quotient(double a, double d, double inverse) {
  double q = mul(a, inverse);
  q = fma(fma(-q, d, a), inverse, q);
  return fma(fma(-q, d, a), inverse, q);
}

}  // namespace fold::numerics
