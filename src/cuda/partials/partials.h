#pragma once
#include <cuda_runtime_api.h>

#include "plan/decode_params.h"

namespace fold::cuda {

/// into += other, with the CPU's bits. A row whose grids differ becomes a poisoned one: grid NaN, sums 0.
void add_partials(const plan::AddPartialsParams& params, cudaStream_t stream);

/// Partial sums to outputs, with the CPU's bits.
void finish(const plan::FinishParams& params, cudaStream_t stream);

}  // namespace fold::cuda
