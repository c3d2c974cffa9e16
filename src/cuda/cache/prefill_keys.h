#pragma once
#include <cuda_runtime_api.h>

#include "plan/prefill_params.h"

namespace fold::cuda {

/// The keys of a chunk of prompts, one request behind the other, cached ones with the CPU's bits. A cached key without
/// a page in the pool, or past the block table's columns, reads as NaN. Head dim 64 or 128.
void prefill_keys(const plan::PrefillKeysParams& params, cudaStream_t stream);

}  // namespace fold::cuda
