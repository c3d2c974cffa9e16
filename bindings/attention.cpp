#include "export.h"
#include "launch.h"
#include "tensor.h"

namespace fold::binding {
namespace {

/// The arguments that forward and backward share, in the order in which Python passes them.
AttentionOptions options(const OptionalTensor& sinks, const OptionalTensor& cu_seqlens_q,
                         const OptionalTensor& cu_seqlens_k, const tvm::ffi::Optional<double>& softmax_scale,
                         bool causal, int64_t window_left, int64_t window_right) {
  AttentionOptions o;
  if (softmax_scale.has_value()) o.softmax_scale = softmax_scale.value();
  o.causal = causal;
  o.window_left = window_left;
  o.window_right = window_right;
  o.sinks = view(sinks, "sinks");
  o.cu_seqlens_q = view(cu_seqlens_q, "cu_seqlens_q");
  o.cu_seqlens_k = view(cu_seqlens_k, "cu_seqlens_k");
  return o;
}

void forward(Tensor q, Tensor k, Tensor v, OptionalTensor sinks, OptionalTensor cu_seqlens_q,
             OptionalTensor cu_seqlens_k, tvm::ffi::Optional<double> softmax_scale, bool causal, int64_t window_left,
             int64_t window_right, Tensor out, Tensor lse) {
  const TensorView query = view(q, "q"), keys = view(k, "k"), values = view(v, "v");
  const TensorView result = view(out, "out"), log_sums = view(lse, "lse");
  const AttentionOptions o =
      options(sinks, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_left, window_right);
  const Launching where(query, [&] { return attention_forward_workspace(query, keys, values, result, log_sums, o); });
  attention_forward(query, keys, values, result, log_sums, o, where.launch());
}

void backward(Tensor dout, Tensor q, Tensor k, Tensor v, OptionalTensor sinks, OptionalTensor cu_seqlens_q,
              OptionalTensor cu_seqlens_k, tvm::ffi::Optional<double> softmax_scale, bool causal, int64_t window_left,
              int64_t window_right, Tensor out, Tensor lse, Tensor dq, Tensor dk, Tensor dv, OptionalTensor dsinks) {
  AttentionBackwardTensors t;
  t.q = view(q, "q");
  t.k = view(k, "k");
  t.v = view(v, "v");
  t.out = view(out, "out");
  t.lse = view(lse, "lse");
  t.dout = view(dout, "dout");
  t.dq = view(dq, "dq");
  t.dk = view(dk, "dk");
  t.dv = view(dv, "dv");
  t.dsinks = view(dsinks, "dsinks");
  const AttentionOptions o =
      options(sinks, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_left, window_right);
  const Launching where(t.q, [&] { return attention_backward_workspace(t, o); });
  attention_backward(t, o, where.launch());
}

}  // namespace
}  // namespace fold::binding

FOLD_EXPORT(attention_forward, fold::binding::forward)
FOLD_EXPORT(attention_backward, fold::binding::backward)
