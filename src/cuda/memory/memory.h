#pragma once
#include <cuda_runtime_api.h>

#include "plan/backend.h"

// Memory of the current device, in the order of a stream. All throw std::runtime_error if the driver refuses.
namespace fold::cuda {

void* allocate(int64_t bytes, cudaStream_t stream);
void release(void* memory, cudaStream_t stream);
void clear(void* memory, int64_t bytes, cudaStream_t stream);
void copy(void* to, const void* from, int64_t bytes, cudaStream_t stream);
void wait(cudaStream_t stream);

/// words[change.at] = change.value. The changes travel with the launches, so the host neither waits nor keeps them.
void set_words(int32_t* words, const plan::WordChange* changes, int64_t count, cudaStream_t stream);

}  // namespace fold::cuda
