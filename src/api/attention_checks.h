#pragma once
#include "fold/attention.h"
#include "plan/attention_params.h"

namespace fold::api {

/// Heads and head dims that attention over whole sequences has.
void require_attention_shape(int64_t heads, int64_t kv_heads, int64_t head_dim);

/// Checks every argument and describes the operation. Throws fold::Error.
plan::ForwardParams forward_params(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                                   const TensorView& lse, const AttentionOptions& options);
plan::BackwardParams backward_params(const AttentionBackwardTensors& t, const AttentionOptions& options);

}  // namespace fold::api
