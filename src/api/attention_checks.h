#pragma once
#include "api/backend.h"
#include "fold/attention.h"
#include "plan/attention_params.h"

namespace fold::api {

/// Shapes and types that attention over whole sequences has on a device.
void require_attention_shape(int64_t heads, int64_t kv_heads, int64_t head_dim, Device device, bool gradient);
std::initializer_list<DType> attention_types(Device device);

/// Checks every argument and describes the operation. The views count as the host's (take_place); what cu_seqlens hold
/// is looked at where they are. Throws fold::Error.
plan::ForwardParams forward_params(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                                   const TensorView& lse, const AttentionOptions& options, const Place& place = {});
plan::BackwardParams backward_params(const AttentionBackwardTensors& t, const AttentionOptions& options,
                                     const Place& place = {});

}  // namespace fold::api
