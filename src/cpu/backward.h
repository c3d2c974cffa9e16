#pragma once
#include "cpu/backward_grid.h"
#include "plan/attention_params.h"

namespace fold::cpu {

/// Gradients of attention over whole sequences. The workspace is the dQ grid (4 or 8 bytes per element of dQ), a few
/// numbers per row, and the tiles of each thread. `audit`, if given, counts what the grid holds; results are the same.
void attention_backward(const plan::BackwardParams& p, GridAudit* audit = nullptr);

}  // namespace fold::cpu
