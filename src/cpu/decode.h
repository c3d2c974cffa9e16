#pragma once
#include "plan/decode_params.h"

namespace fold::cpu {

/// One decode step, or (params.numerator set) the partial sums of one. Arguments are checked by the caller.
void decode(const plan::DecodeParams& params);

/// Partial sums to outputs.
void finish(const plan::FinishParams& params);

}  // namespace fold::cpu
