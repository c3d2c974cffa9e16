#pragma once
#include "numerics/exp2.h"

// The declared reference, when a row is done, and its finish: docs/numerics.md, sections 5 and 8.
namespace fold::numerics {

constexpr float kLog2E = 0x1.715476p+0f;  ///< fp32(log2 e)
constexpr float kLn2 = 0x1.62e43p-1f;     ///< fp32(ln 2)
constexpr int kGridExponent = 16;         ///< a numerator counts E * 2^-(kGridExponent + kFraction)

/// Key (relative to the row's first key) of sample i when `rest` = n - 64 keys are not scored exactly.
FOLD_HD int64_t sample_key(int i, int64_t rest) { return 1 + (2 * i + 1) * rest / (2 * kSamples); }

constexpr int64_t kScoredKeys = 1 + kNewest + kSamples;  ///< rows with at most this many keys are scored exactly

/// Sums over scored keys of w = fix(s - m) and of w^2.
struct ScoreSums {
  int64_t weights = 0, squares = 0;  // units 2^-kFraction
};

FOLD_HD void add_score(ScoreSums& sums, uint32_t w) {
  sums.weights += w;
  sums.squares += static_cast<int64_t>((static_cast<uint64_t>(w) * w) >> kFraction);
}

struct Reference {
  float z;       ///< declared log2 of the row's mass
  float spread;  ///< log2 of the row's effective number of keys
};

/// From the largest logit scored, the sums of what counts once, and those of what stands for `rest` keys.
FOLD_HD Reference declared_reference(float largest, const ScoreSums& counted, const ScoreSums& sampled, int64_t rest) {
  float total = static_cast<float>(counted.weights), squares = static_cast<float>(counted.squares);
  if (rest > 0) {
    const float factor = div(static_cast<float>(rest - kTrimmed), static_cast<float>(kSamples - kTrimmed));
    total = fma(static_cast<float>(sampled.weights), factor, total);
    squares = fma(static_cast<float>(sampled.squares), factor, squares);
  }
  const float mass = log2(total);
  constexpr float kUnit = kFraction;
  return {add(largest, sub(mass, kUnit)), sub(sub(mul(2.0f, mass), log2(squares)), kUnit)};
}

// What a pass left of a row, and where that sends it.

/// The sums of a row that say whether its grids were right.
struct RowMass {
  int64_t den;   ///< of the weights, unit 2^-kFraction
  int64_t mass;  ///< of the weights times V's scales, unit E 2^-kFraction
  int64_t keys;  ///< how many are visible
  float peak;    ///< the largest x of a key whose V was read
};

constexpr float kFreeSpread = 4.0f;  ///< rows of a larger spread rest on many keys

/// Whether 2^(LSE - Z) is in [1/4, 64), or in [1/2, 64) where the row rests on many keys: what it leaves unread for
/// want of a bit, it leaves unread of them all. A sample that makes the total 2^h too large makes the spread, in which
/// the total counts twice, up to 2 h too large.
FOLD_HD bool reference_holds(int64_t den, float spread) {
  if (den >= 0xFFFFFFFFll || den < (int64_t{1} << (kFraction - 2))) return false;
  if (den >= int64_t{1} << (kFraction - 1)) return true;
  const float high = sub(kFraction, log2(static_cast<float>(den)));
  return !(sub(spread, mul(2.0f, high)) > kFreeSpread);
}

/// Whether the sums are those of weights none of which saturated, and the numerator is in range. E of the first run
/// bounds the mass; a smaller one may not, where the run that it came from read other keys.
FOLD_HD bool sums_hold(const RowMass& row) { return reference_holds(row.den, 0.0f) && row.mass <= row.den + row.keys; }

/// log2 of the least mass at which the rounding of n weights cannot be seen in a row of the given spread.
FOLD_HD float mass_floor(int64_t n, float spread) {
  const float keys = log2(static_cast<float>(n));
  const float random = add(7.0f, mul(add(keys, spread), 0.5f)), together = add(5.0f, keys);
  return random > together ? random : together;
}

/// Binary digits of a number; 0 for 0.
FOLD_HD int bit_length(int64_t n) {
#if defined(__CUDA_ARCH__)
  return 64 - __clzll(n);
#else
  return n == 0 ? 0 : 64 - __builtin_clzll(static_cast<unsigned long long>(n));
#endif
}

constexpr int kMinExponent = -100;  ///< of E: no scale is smaller
constexpr int kMaxFiner = 60;       ///< bits that E may shrink by in all
constexpr int kWorthwhile = 3;      ///< bits below which another run is not worth it
constexpr int kMaxRuns = 8;

/// By how many bits a row's E should shrink, or if negative grow: 0 if its grid is fine or cannot get much finer.
/// e_exponent: E = 2^e_exponent; shrunk: bits by which it did already. The reference holds.
FOLD_HD int finer_bits(const RowMass& row, float spread, int e_exponent, int shrunk) {
  if (!sums_hold(row)) {
    const int bits = bit_length(row.den) - bit_length(row.mass) - 1;
    return bits > -shrunk ? bits : -shrunk;
  }
  if (row.mass > 0 && log2(static_cast<float>(row.mass)) >= mass_floor(row.keys, spread)) return 0;
  int bits = bit_length(row.den) - bit_length(row.mass + row.keys) - 1;
  if (bits > kMaxFiner - shrunk) bits = kMaxFiner - shrunk;
  if (bits > e_exponent - kMinExponent) bits = e_exponent - kMinExponent;
  return bits < kWorthwhile ? 0 : bits;
}

/// The reference that takes the place of one that did not hold.
FOLD_HD float corrected_z(float z, const RowMass& row) {
  constexpr float kSaturates = 32 - kFraction;  // x of a weight that may have saturated
  const bool exact = row.den >= (1 << 10) && (row.den < 0xFFFFFFFFll || row.peak < kSaturates);
  return add(z, exact ? sub(log2(static_cast<float>(row.den)), static_cast<float>(kFraction + 1)) : row.peak);
}

// Finish.

/// A row's denominator with its sink, unit 2^-kFraction. sink: log2 units, relative to Z; -inf without one.
FOLD_HD double with_sink(int64_t den, float sink) {
  return static_cast<double>(den) + ldexp_exact(exp2_wide(sink), kFraction);
}

/// One rotated output channel. den: sink included; e_exponent: E = 2^e_exponent.
FOLD_HD float finish_channel(int64_t num, double den, int e_exponent) {
  return static_cast<float>(ldexp_exact(static_cast<double>(num) / den, e_exponent - kGridExponent));
}

/// Natural-log LSE of a row. den and sink as in with_sink.
FOLD_HD float finish_lse(float z, double den, float sink) {
  const float over = sink > 64.0f ? sink : sub(log2(static_cast<float>(den)), static_cast<float>(kFraction));
  return mul(add(z, over), kLn2);
}

}  // namespace fold::numerics
