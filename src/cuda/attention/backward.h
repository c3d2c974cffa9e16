#pragma once
#include <cuda_runtime.h>

#include "plan/attention_params.h"

namespace fold::cuda {

/// Bytes of workspace of attention_backward, a function of shapes alone.
int64_t attention_backward_workspace(const plan::BackwardParams& params);

/// Gradients of attention over whole sequences: 16-bit inputs, head dims 64, 96 and 128. Every pointer is device
/// memory; rows are 16-byte aligned. workspace: 256-byte aligned, in any state. Launches kernels on the stream and
/// returns.
void attention_backward(const plan::BackwardParams& params, void* workspace, cudaStream_t stream);

#ifdef FOLD_COUNT_GRID_OVERFLOWS
/// Additions to the dQ grid that left int32's range since the last call. Waits for the device.
unsigned long long take_grid_overflows();
#endif

}  // namespace fold::cuda
