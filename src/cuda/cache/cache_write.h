#pragma once
#include <cuda_runtime_api.h>

#include "plan/backend.h"

namespace fold::cuda {

/// Bytes of device memory that cache_write() needs.
int64_t cache_write_workspace(const plan::CacheWriteParams& params, const plan::CacheWriteBounds& bounds);

/// The bytes of cpu::cache_write. Throws std::runtime_error if the driver refuses. workspace: 256-byte aligned.
void cache_write(const plan::CacheWriteParams& params, const plan::CacheWriteBounds& bounds, void* workspace,
                 cudaStream_t stream);

}  // namespace fold::cuda
