#pragma once
#include <cuda_runtime_api.h>

#include "plan/backend.h"

namespace fold::cuda {

/// Bytes of device memory that cache_write() needs.
int64_t cache_write_workspace(const plan::CacheWriteParams& params, const plan::CacheWriteBounds& bounds);

/// The bytes of cpu::cache_write. Throws std::runtime_error if the driver refuses. workspace: 256-byte aligned.
void cache_write(const plan::CacheWriteParams& params, const plan::CacheWriteBounds& bounds, void* workspace,
                 cudaStream_t stream);

/// The same for the tokens of a decoding step, and its tables: few tokens a request. The bytes are a multiple of 256.
int64_t step_write_workspace(const plan::StepParams& params);
void step_write(const plan::StepParams& params, void* workspace, cudaStream_t stream);

}  // namespace fold::cuda
