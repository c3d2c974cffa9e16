#pragma once
#include <cstdint>

#include "numerics/ieee.h"

// Power-of-two grids: real numbers rounded once to integers, whose sum then does not depend on the order of addition.
// docs/training.md derives the constants.
namespace fold::numerics {

// Magnitudes whose products fp32 tiles may form: far from fp32's ends, so that neither an overflow nor the flushing of
// subnormals (bf16 dot product instructions) can be seen beside the largest term of a sum.
constexpr double kSafeLow = 0x1p-80, kSafeHigh = 0x1p80;

/// Base-2 logits of a row that is computed in fp32 stay within this bound; a log-sum-exp beyond it would be too coarse
/// in fp32 to stand in for the row's maximum.
constexpr double kMaxLogit = 0x1p14;

/// Relative widening of every bound below. It covers a norm computed in fp32 (256 terms: 2^-15), P and dS rounded to
/// bf16 (2^-8 each, together below 2^-6.99) and fp32 sums over a key tile (192 * 2^-24).
constexpr double kWiden = 1.0 + 0x1p-6;

FOLD_HD bool zero_or_safe(double magnitude) {
  return magnitude == 0.0 || (magnitude >= kSafeLow && magnitude <= kSafeHigh);
}

/// Smallest e with bound <= 2^e, for a positive finite bound.
FOLD_HD int log2_ceil(double bound) {
  int e = 0;
  const double mantissa = std::frexp(bound, &e);  // in [1/2, 1)
  return mantissa == 0.5 ? e - 1 : e;
}

/// Bound of |dQ| before softmax_scale, for one row over the keys it sees:
///   |sum_j P_j (dP_j - Delta) K_jd| <= (sum_j P_j) (max_j |dP_j| + |Delta|) max_j |K_jd|,
///   |dP_j| = |dO . V_j| <= ||dO|| max_j ||V_j||, and |K_jd| <= ||K_j||.
/// sum_j P_j is 1 up to the error of log-sum-exp, see grid_shift.
FOLD_HD double dq_bound(double dout_norm, double v_norm, double delta, double k_norm) {
  return kWiden * (dout_norm * v_norm + delta) * k_norm;
}

/// The shift k with which x is rounded to the integer rne(x 2^k), so that sums fit a signed integer of bits + 2 bits.
///
/// Proof. Let 2^e >= bound and k = bits - e. P in the backward is 2^(t - lse2), t the scaled dot product of at most 256
/// terms, in fp32. The forward's t and the backward's differ by at most 2 * 256 * 2^-24 * kMaxLogit = 1/2 however the
/// two are ordered; the rounding of lse and of t - lse2 adds less than 4 * 2^-24 * kMaxLogit = 2^-8.
/// So sum_j P_j <= 2^(1/2 + 2^-8) < 1.419. The true sum of a row's partials is below 1.419 * 2^bits in units of the
/// grid; rounding adds at most 1/2 per partial. With fewer than 2^28 partials (key tiles) the sum is below
/// 1.419 * 2^bits + 2^27 < 2^(bits + 1), which a signed integer of bits + 2 bits holds; every single partial and every
/// sum of some of the partials obeys the same bound, so no order of addition can wrap.
FOLD_HD int grid_shift(double bound, int bits) { return bound > 0.0 ? bits - log2_ceil(bound) : 0; }

}  // namespace fold::numerics
