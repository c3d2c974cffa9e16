#pragma once
#include "cpu/decode_range.h"

namespace fold::cpu {

/// Sets group.z to the sampled reference (docs/numerics.md, section 5).
void sample_reference(Group& group, const DecodeKernels& kernels);

/// Replaces z of the rows with redo[row] by their exact reference. Walks every visible key at the finest reading,
/// twice.
void exact_reference(Group& group, const DecodeKernels& kernels, const bool* redo);

}  // namespace fold::cpu
