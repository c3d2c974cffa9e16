#pragma once
#include <cuda_runtime_api.h>

#include "plan/attention_params.h"

namespace fold::cuda {

/// Bytes of device memory that attention_forward() needs, from shapes alone.
int64_t attention_forward_workspace(const plan::ForwardParams& params);

/// out and lse of whole sequences. Every pointer is device memory; cu_seqlens are read by the kernels alone, which keep
/// to the tensors' rows whatever they hold. Arguments are checked by the caller: bf16 or fp16, head dim 64, 96 or 128,
/// rows that start at multiples of 16 bytes. workspace: attention_forward_workspace() bytes, 256-byte aligned, in any
/// state. Throws std::runtime_error if the driver refuses.
void attention_forward(const plan::ForwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace fold::cuda
