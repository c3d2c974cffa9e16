#pragma once
#include <cuda_runtime_api.h>

#include "plan/decode_params.h"

namespace fold::cuda {

/// What decode_step of the API finds on the CPU before it writes and decodes. Tables that make no sense bring nothing:
/// q_lens are cut to 0..T, and a request of a negative length, or whose keys would be too many for 32 bits, brings no
/// token.
void step_tables(const plan::StepParams& params, cudaStream_t stream);

}  // namespace fold::cuda
