#pragma once
#include "numerics/exp2.h"

// The declared reference and the finish of a row: docs/numerics.md, sections 5 and 8.
namespace fold::numerics {

constexpr float kLog2E = 0x1.715476p+0f;  ///< fp32(log2 e)
constexpr float kLn2 = 0x1.62e43p-1f;     ///< fp32(ln 2)
constexpr int kGridExponent = 16;         ///< a numerator counts E * 2^-(kGridExponent + kFraction)

/// Key (relative to the row's first key) of sample i when `rest` = n - 64 keys are not scored exactly.
FOLD_HD int64_t sample_key(int i, int64_t rest) { return 1 + (2 * i + 1) * rest / (2 * kSamples); }

constexpr int64_t kScoredKeys = 1 + kNewest + kSamples;  ///< rows with at most this many keys are scored exactly

/// Z from the largest logit scored, the fixed-point sum of what counts once, and that of what stands for `rest` keys.
FOLD_HD float reference_z(float largest, int64_t counted, int64_t sampled, int64_t rest) {
  float total = static_cast<float>(counted);
  if (rest > 0) {
    const float factor = div(static_cast<float>(rest - kTrimmed), static_cast<float>(kSamples - kTrimmed));
    total = fma(static_cast<float>(sampled), factor, total);
  }
  return add(largest, sub(log2(total), static_cast<float>(kFraction)));
}

/// Whether a row's denominator (sink included) shows that its reference was right: 2^(LSE - Z) in [1/2, 64).
FOLD_HD bool reference_holds(int64_t den) { return den >= (int64_t{1} << (kFraction - 1)) && den < 0xFFFFFFFFll; }

/// One rotated output channel. e_exponent: E = 2^e_exponent.
FOLD_HD float finish_channel(int64_t num, int64_t den, int e_exponent) {
  const double ratio = static_cast<double>(num) / static_cast<double>(den);
  return mul(static_cast<float>(ratio), pow2(e_exponent - kGridExponent));
}

/// Natural-log LSE of a row.
FOLD_HD float finish_lse(float z, int64_t den) {
  return mul(add(z, sub(log2(static_cast<float>(den)), static_cast<float>(kFraction))), kLn2);
}

}  // namespace fold::numerics
