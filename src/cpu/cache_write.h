#pragma once
#include "plan/decode_params.h"

namespace fold::cpu {

/// Writes the new tokens' planes, then the summaries of the blocks they complete and the fits of the marks they reach
/// (docs/numerics.md, sections 1, 2 and 9). Arguments are checked by the caller.
void cache_write(const plan::CacheWriteParams& params);

}  // namespace fold::cpu
