#pragma once
#include <cuda_runtime_api.h>

#include "plan/decode_params.h"

namespace fold::cuda {

/// Keys at their finest reading, rotated back, with the CPU's bits. Rows that are no request's stay as they are; a key
/// without a page in the pool, or past the block table's columns, reads as NaN.
void cache_read(const plan::CacheReadParams& params, cudaStream_t stream);

}  // namespace fold::cuda
