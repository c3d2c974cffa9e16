#pragma once
#include "numerics/planes.h"
#include "numerics/reference.h"

// What the finish of a public partial sum makes of a row: docs/numerics.md, section 8.
namespace fold::numerics {

struct PartialRow {
  bool empty;      ///< sees no key: output 0, LSE -inf
  bool done;       ///< empty, or reference and grid were right
  int e_exponent;  ///< E = 2^e_exponent
  RowMass mass;    ///< sums that do not hold where the row is not done
};

/// E of every row that has a sum is a power of two, as decode makes them.
FOLD_HD bool is_grid(float e) { return is_finite(e) && e >= kMinScale && (bits_of(e) & 0x007FFFFFu) == 0; }

/// grid: Z, E, spread; sums: of weights, of weights times V's scales, visible keys.
FOLD_HD PartialRow partial_row(const float* grid, const int64_t* sums) {
  const float z = grid[0], e = grid[1], spread = grid[2];
  if (!is_finite(z) && z < 0 && e == 0) return {true, true, 0, {}};
  const RowMass mass{sums[0], sums[1], sums[2], 0};
  if (!is_finite(z) || !is_grid(e)) return {false, false, 0, {}};
  const int exponent = static_cast<int>(bits_of(e) >> 23) - 127;
  if (!reference_holds(mass.den, spread) || !sums_hold(mass) || finer_bits(mass, spread, exponent, 0) != 0)
    return {false, false, exponent, {}};
  return {false, true, exponent, mass};
}

}  // namespace fold::numerics
