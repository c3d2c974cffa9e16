#pragma once
#include "numerics/summary.h"

// What is stored about 64 keys: docs/numerics.md, section 2.
namespace fold::numerics {

/// Readings of a row's channels from every plane given, in units of e/256. r: (head_dim,)
FOLD_HD void readings(const PlaneRow& row, int head_dim, int* r) {
  for (int i = 0; i < head_dim / 2; ++i) {
    r[2 * i] = 4096 * ((row.h[i] >> 4) - 8);
    r[2 * i + 1] = 4096 * ((row.h[i] & 15) - 8);
  }
  if (row.l == nullptr) {
    for (int i = 0; i < head_dim; ++i) r[i] += kHalfReading;
    return;
  }
  for (int i = 0; i < head_dim / 2; ++i) {
    r[2 * i] += 256 * (row.l[i] >> 4);
    r[2 * i + 1] += 256 * (row.l[i] & 15);
  }
  if (row.b == nullptr) return;
  for (int i = 0; i < head_dim; ++i) r[i] += row.b[i];
}

/// Codes u of plane h. u: (head_dim,)
FOLD_HD void codes(const uint8_t* h, int head_dim, int* u) {
  for (int i = 0; i < head_dim / 2; ++i) {
    u[2 * i] = h[i] >> 4;
    u[2 * i + 1] = h[i] & 15;
  }
}

/// Row `row` of planes whose first row is given.
FOLD_HD PlaneRow plane_row(const PlaneRow& first, int64_t row, int head_dim) {
  return {first.h + row * (head_dim / 2), first.l == nullptr ? nullptr : first.l + row * (head_dim / 2),
          first.b == nullptr ? nullptr : first.b + row * head_dim};
}

/// The largest V scale of a block, NaN if a K or V scale is. k_scale, v_scale: (64,), in any order.
FOLD_HD uint16_t block_bound(const uint16_t* k_scale, const uint16_t* v_scale) {
  uint16_t bound = 0;  // scales are positive or NaN, which order like their bits
  for (int j = 0; j < kTile; ++j) {
    bound = v_scale[j] > bound ? v_scale[j] : bound;
    bound = k_scale[j] == kBf16Nan ? kBf16Nan : bound;
  }
  return bound;
}

/// Values this many powers of two above the typical block's count as outliers (docs/numerics.md, sections 6 and 9).
constexpr int kOutlierBits = 2;

/// The typical exponent of blocks' bounds. sum: of pow2_ceil_exponent(bound) over `blocks` of them, at least one.
FOLD_HD int typical_exponent(int64_t sum, int64_t blocks) {
  return static_cast<int>(sum >= 0 ? sum / blocks : -((blocks - 1 - sum) / blocks));
}

/// What a settled block's outliers add to the gates of its values.
FOLD_HD float outlier_depth(uint16_t bound, int typical) {
  const int above = pow2_ceil_exponent(bound) - kOutlierBits - typical;
  return above > 0 ? static_cast<float>(above) : 0.0f;
}

/// The block's mean code of each K channel, in 1/16. k_h: (64, head_dim/2); ubar: (head_dim,)
FOLD_HD void block_ubar(const uint8_t* k_h, int head_dim, uint8_t* ubar) {
  int sum[kMaxHeadDim] = {}, u[kMaxHeadDim];
  for (int j = 0; j < kTile; ++j) {
    codes(k_h + j * (head_dim / 2), head_dim, u);
    for (int i = 0; i < head_dim; ++i) sum[i] += u[i];
  }
  for (int i = 0; i < head_dim; ++i) ubar[i] = mean_code(sum[i]);
}

/// The block's mean V row; returns its scale. v: planes of the first key; v_scale: (64,), permuted; mean: (head_dim,)
FOLD_HD uint16_t block_mean(const PlaneRow& v, const uint16_t* v_scale, int head_dim, int8_t* mean) {
  float sum[kMaxHeadDim] = {};
  int r[kMaxHeadDim];
  for (int j = 0; j < kTile; ++j) {
    readings(plane_row(v, j, head_dim), head_dim, r);
    const float unit = mean_unit(v_scale[scale_slot(j)]);
    for (int i = 0; i < head_dim; ++i) sum[i] = add(sum[i], mul(unit, static_cast<float>(r[i])));
  }
  int8_t rest[kMaxHeadDim];
  return split_row(sum, head_dim, mean, rest);
}

}  // namespace fold::numerics
