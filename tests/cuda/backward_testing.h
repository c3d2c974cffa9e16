#pragma once
#include <limits>

#include "attention_device.h"
#include "cuda/attention/backward.h"

// The backward on the device by its kernels' own entry. out and lse come from the fp64 reference, so that a test of the
// backward does not depend on the forward.
namespace fold::testing {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

inline int64_t stride_of(const TensorView& x, int from_the_end) {
  return x.strides[static_cast<size_t>(x.ndim - from_the_end)];
}

/// (B, S, heads, D), or packed (T, heads, D).
inline plan::RowsView rows_view(const TensorView& x) {
  return {x.data, x.ndim == 4 ? x.strides[0] : 0, stride_of(x, 3), stride_of(x, 2)};
}

struct Backward {
  plan::BackwardParams params;
  int64_t workspace;
};

/// Parameters of a call on device tensors, without any check.
inline Backward backward_call(const AttentionBackwardTensors& t, const AttentionOptions& o) {
  const bool packed = o.cu_seqlens_q.defined();
  plan::BackwardParams b{};
  plan::ForwardParams& f = b.forward;
  f.q = rows_view(t.q);
  f.k = rows_view(t.k);
  f.v = rows_view(t.v);
  f.out = rows_view(t.out);
  f.lse = packed ? plan::RowsView{t.lse.data, 0, 1, t.lse.strides[0]}
                 : plan::RowsView{t.lse.data, t.lse.strides[0], 1, t.lse.strides[1]};
  f.sinks = static_cast<const float*>(o.sinks.data);
  f.cu_seqlens_q = static_cast<const int32_t*>(o.cu_seqlens_q.data);
  f.cu_seqlens_k = static_cast<const int32_t*>(o.cu_seqlens_k.data);
  f.dtype = t.q.dtype;
  f.batch = packed ? o.cu_seqlens_q.shape[0] - 1 : t.q.shape[0];
  f.heads = t.q.shape[static_cast<size_t>(t.q.ndim - 2)];
  f.kv_heads = t.k.shape[static_cast<size_t>(t.k.ndim - 2)];
  f.head_dim = t.q.shape[static_cast<size_t>(t.q.ndim - 1)];
  f.seqlen_q = packed ? 0 : t.q.shape[1];
  f.seqlen_k = packed ? 0 : t.k.shape[1];
  f.total_q = packed ? t.q.shape[0] : f.batch * f.seqlen_q;
  f.total_k = packed ? t.k.shape[0] : f.batch * f.seqlen_k;
  f.window_left = o.window_left < 0 ? plan::kUnlimitedWindow : o.window_left;
  f.window_right = o.causal ? 0 : o.window_right < 0 ? plan::kUnlimitedWindow : o.window_right;
  f.softmax_scale = static_cast<float>(o.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(f.head_dim))));
  b.dout = rows_view(t.dout);
  b.dq = rows_view(t.dq);
  b.dk = rows_view(t.dk);
  b.dv = rows_view(t.dv);
  b.dsinks = static_cast<float*>(t.dsinks.data);
  b.grad_dtype = t.dq.dtype;
  return {b, cuda::attention_backward_workspace(b)};
}

inline AttentionBackwardTensors put_problem(Device& device, Problem& p) {
  AttentionBackwardTensors t;
  t.q = device.put(p.q.view());
  t.k = device.put(p.k.view());
  t.v = device.put(p.v.view());
  t.out = device.put(p.out.view());
  t.lse = device.put(p.lse.view());
  t.dout = device.put(p.dout.view());
  t.dq = device.result(p.dq);
  t.dk = device.result(p.dk);
  t.dv = device.result(p.dv);
  if (p.options.sinks.defined()) t.dsinks = device.result(p.dsinks);
  return t;
}

/// dq, dk, dv and dsinks of a problem whose out and lse are there.
inline void backward_on_device(Problem& p) {
  Device device;
  const AttentionBackwardTensors t = put_problem(device, p);
  const Backward call = backward_call(t, device.options(p.options));
  const Launch launch = device.launch(call.workspace);
  cuda::attention_backward(call.params, launch.workspace.data, nullptr);
  device.fetch();
}

/// out and lse as a forward without errors of its own would return them.
inline void set_forward(Problem& p, const Expected& e) {
  for (int64_t i = 0; i < p.out.numel(); ++i) p.out.set(i, e.out[static_cast<size_t>(i)]);
  for (int64_t i = 0; i < p.lse.numel(); ++i) p.lse.set(i, e.lse[static_cast<size_t>(i)]);
}

inline void use_grad_dtype(Problem& p, DType type) {
  for (Tensor* x : {&p.dq, &p.dk, &p.dv}) *x = Tensor(type, x->shape);
}

/// Rows of another tensor: `from` rows [from_row, from_row + rows) of sequence `sequence` to packed rows at `to_row`.
inline void copy_rows(const Tensor& from, int64_t sequence, Tensor& to, int64_t to_row) {
  const int64_t rows = from.shape[1], bytes = rows * from.shape[2] * from.shape[3] * dtype_size(from.dtype);
  std::memcpy(to.bytes.data() + to_row * (bytes / std::max<int64_t>(1, rows)), from.bytes.data() + sequence * bytes,
              static_cast<size_t>(bytes));
}

}  // namespace fold::testing
