#pragma once
#include "plan/attention_params.h"

namespace fold::cpu {

/// Attention over whole sequences. The workspace is a packed copy of K and V and O(S) numbers per head.
void attention_forward(const plan::ForwardParams& p);

}  // namespace fold::cpu
