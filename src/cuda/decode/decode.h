#pragma once
#include <cuda_runtime_api.h>

#include "plan/backend.h"

namespace fold::cuda {

/// Bytes of device memory that decode() needs, from the declared maxima alone (batch, tokens, heads).
int64_t decode_workspace(const plan::DecodeParams& params);

/// One decode step, or (params.numerator set) the partial sums of one, with the bits of cpu::decode. Every pointer but
/// `gates` is device memory; what the tensors hold (lengths, page ids) is read by the kernels alone, so a captured
/// graph of this call may be replayed with other contents. A token whose visible keys lie past the table's columns or
/// in a page that the pool does not have sees no key. Arguments are checked by the caller as far as the host can.
/// workspace: decode_workspace() bytes, 256-byte aligned, in any state. Throws std::runtime_error if the driver
/// refuses.
/// written: the cache write launched right before, whose tables are the decode's seqlens and q_lens; null: none.
void decode(const plan::DecodeParams& params, const plan::DecodeBounds& bounds, const plan::StepParams* written,
            void* workspace, cudaStream_t stream);

}  // namespace fold::cuda
