#pragma once
#include "numerics/ieee64.h"

// Constants and scalar formulas of the tail's fit: docs/numerics.md, section 9.
namespace fold::numerics {

constexpr int kFitIterations = 6;

/// Step 1: what is added to A's diagonal.
FOLD_HD double ridge(int64_t trace, int head_dim) {
  return add(div(mul(static_cast<double>(trace), 1e-3), static_cast<double>(head_dim)), 1.0);
}

/// Step 5: X before the first iteration.
FOLD_HD double start_sign(int channel, int direction) {
  int common = channel & direction, odd = 0;
  for (; common != 0; common &= common - 1) odd ^= 1;
  return odd == 0 ? 1.0 : -1.0;
}

/// Step 5: whether a column is, but for rounding, a combination of the earlier ones.
FOLD_HD bool is_dependent(double norm, double before) { return norm <= mul(1e-8, before); }

/// Step 7: f of a direction, NaN or infinity if it cannot be used.
FOLD_HD float direction_scale(double su, double sp, int e_exponent) {
  if (!(su > 0.0 && sp > 0.0)) return quiet_nan();
  return static_cast<float>(mul(mul(su, sp), mul(static_cast<double>(pow2(e_exponent)), 0x1p-8)));
}

/// What a V scale counts in units of E_M. An outlier takes no part.
FOLD_HD float fit_weight(float scale, float inverse_e) {
  const float share = mul(scale, inverse_e);
  return share > 1.0f ? 0.0f : share;
}

}  // namespace fold::numerics
