#include "fold/attention.h"

#include "export.h"
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
  attention_forward(view(q, "q"), view(k, "k"), view(v, "v"), view(out, "out"), view(lse, "lse"),
                    options(sinks, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_left, window_right));
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
  attention_backward(t, options(sinks, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_left, window_right));
}

}  // namespace
}  // namespace fold::binding

FOLD_EXPORT(attention_forward, fold::binding::forward)
FOLD_EXPORT(attention_backward, fold::binding::backward)
