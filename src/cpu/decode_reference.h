#pragma once
#include "cpu/decode_range.h"

namespace fold::cpu {

/// Declares the rows' references from a sample of their keys: sets z and spread, and opens the gates of rows that
/// spread their weight (docs/numerics.md, sections 5 and 6).
void sample_reference(Group& group, const DecodeKernels& kernels);

}  // namespace fold::cpu
