#pragma once
#include "numerics/planes.h"

// Scalar formulas of a block's summary: docs/numerics.md, section 2.
namespace fold::numerics {

/// What a reading counts in a block's mean: its unit e/256, and the mean's 1/64 first, so that nothing overflows.
FOLD_HD float mean_unit(uint16_t scale) { return mul(from_bf16(scale), 0x1p-8f / kTile); }

/// A channel's mean code in 1/16. sum: of its 64 codes.
FOLD_HD uint8_t mean_code(int sum) { return static_cast<uint8_t>((16 * sum + 32) / 64); }

}  // namespace fold::numerics
