#pragma once
#include <limits>

#include "numerics/reference.h"

// Which planes of a key are read: docs/numerics.md, section 6.
namespace fold::numerics {

/// Thresholds in log2 below a row's Z.
struct Gates {
  float k_l, k_b, v_h, v_l, v_b;
};

constexpr float kOpen = std::numeric_limits<float>::infinity();  ///< a gate that everything passes

struct GateRow {
  float depth;
  Gates gates;
};

/// depth=None: every V is read, every plane of it only where the weight asks.
#define FOLD_GATES(...)
#define FOLD_DENSE_GATES(...) constexpr Gates kDenseGates{__VA_ARGS__};
#include "numerics/gates.inc"
#undef FOLD_GATES
#undef FOLD_DENSE_GATES

FOLD_HD float lerp_gate(float a, float b, float t) { return fma(sub(b, a), t, a); }

/// The gates of a depth (log2 of the row's mass); +infinity stands for depth=None.
FOLD_HD Gates gates_for_depth(float depth) {
  constexpr GateRow table[] = {
  // local: device code cannot index a host array
#define FOLD_GATES(depth, ...) {depth, {__VA_ARGS__}},
#define FOLD_DENSE_GATES(...)
#include "numerics/gates.inc"
#undef FOLD_GATES
#undef FOLD_DENSE_GATES
  };
  constexpr int rows = static_cast<int>(sizeof(table) / sizeof(table[0]));
  if (!is_finite(depth)) return kDenseGates;
  GateRow low = table[0], high = table[1];
  for (int i = 1; i + 1 < rows; ++i) {
    if (depth > table[i].depth) low = table[i], high = table[i + 1];
  }
  const float inside = depth < low.depth ? low.depth : depth > high.depth ? high.depth : depth;
  const float shift = sub(depth, inside);
  const float t = div(sub(inside, low.depth), sub(high.depth, low.depth));
  return {
      add(lerp_gate(low.gates.k_l, high.gates.k_l, t), shift), add(lerp_gate(low.gates.k_b, high.gates.k_b, t), shift),
      add(lerp_gate(low.gates.v_h, high.gates.v_h, t), shift), add(lerp_gate(low.gates.v_l, high.gates.v_l, t), shift),
      add(lerp_gate(low.gates.v_b, high.gates.v_b, t), shift)};
}

constexpr float kCrowd = 12.0f;  ///< rows of a larger spread rest on keys that depth=None would not read K's plane b of

/// The gates of a row of the given spread. Where no single share is large, the rounding of many adds up.
FOLD_HD Gates widened(const Gates& gates, float spread) {
  const float k = spread > kCrowd ? sub(spread, kCrowd) : 0.0f;
  const float v = spread > kFreeSpread ? mul(sub(spread, kFreeSpread), 0.5f) : 0.0f;
  return {add(gates.k_l, k), add(gates.k_b, k), gates.v_h, add(gates.v_l, v), add(gates.v_b, v)};
}

/// Standard deviation of a level-0 logit's rounding over (e_q e_k |qa|), times 2: 2 sqrt(256 / 12).
constexpr float kMarginFactor = 0x1.279a74p+3f;

}  // namespace fold::numerics
