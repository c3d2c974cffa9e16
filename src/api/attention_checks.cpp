#include "api/attention_checks.h"

#include <cmath>
#include <string>
#include <vector>

#include "api/checks.h"

namespace fold::api {
namespace {

using std::to_string;

void require(bool ok, const std::string& what, int64_t got, const std::string& allowed) {
  if (!ok) fail_value(what, to_string(got), allowed);
}

/// One tensor argument of this dtype and shape.
void check_tensor(const char* name, const TensorView& x, DType dtype, const std::vector<int64_t>& shape,
                  const char* meaning) {
  require_tensor(name, x, static_cast<int>(shape.size()), {dtype});
  for (int i = 0; i < x.ndim; ++i) require_size(name, x, i, shape[static_cast<size_t>(i)], meaning);
  require_last_contiguous(name, x);
}

/// Rows that a GPU copies in boxes start at multiples of 16 bytes, all of them.
void check_row_starts(const char* name, const TensorView& x, const Place& place) {
  if (place.device == Device::cpu || x.numel() == 0) return;
  constexpr int64_t kBytes = 16;
  const std::string on = "on " + place_text(place) + " a multiple of ";
  if (const auto address = reinterpret_cast<uintptr_t>(x.data); address % kBytes != 0) {
    fail_value(std::string(name) + " address", to_string(address), on + to_string(kBytes));
  }
  const int64_t step = kBytes / dtype_size(x.dtype);
  for (int i = 0; i + 1 < x.ndim; ++i) {
    const int64_t stride = x.strides[static_cast<size_t>(i)];
    if (x.shape[static_cast<size_t>(i)] > 1 && (stride < 0 || stride % step != 0)) {
      fail_value(std::string(name) + ".strides[" + to_string(i) + "]", to_string(stride), on + to_string(step));
    }
  }
}

/// A tensor that is written.
void check_output(const char* name, const TensorView& x, DType dtype, const std::vector<int64_t>& shape,
                  const char* meaning) {
  check_tensor(name, x, dtype, shape, meaning);
  require_no_broadcast(name, x);
}

/// Checks cu_seqlens (B + 1,) over `total` rows, its values where the host may look, and returns B.
int64_t check_cu_seqlens(const char* name, const TensorView& x, int64_t total, const Place& place) {
  const std::string what = name;
  require_tensor(name, x, 1, {DType::i32});
  require_last_contiguous(name, x);
  if (x.shape[0] < 1) fail_value(what + ".shape", shape_text(x), "(batch + 1,)");
  const int64_t last = x.shape[0] - 1;
  if (place.device != Device::cpu) return last;
  const auto* at = x.as<const int32_t>();
  require(at[0] == 0, what + "[0]", at[0], "must be 0");
  for (int64_t i = 1; i < x.shape[0]; ++i) {
    require(at[i] >= at[i - 1], what + "[" + to_string(i) + "]", at[i],
            "must not be below " + what + "[" + to_string(i - 1) + "]=" + to_string(at[i - 1]));
  }
  require(at[last] <= total, what + "[" + to_string(last) + "]", at[last], "at most the rows, " + to_string(total));
  return last;
}

/// Strides of (B, S, heads, D) or (T, heads, D).
plan::RowsView rows_view(const TensorView& x) {
  const int row = x.ndim - 3;
  return {x.data, row ? x.strides[0] : 0, x.strides[static_cast<size_t>(row)], x.strides[static_cast<size_t>(row) + 1]};
}

/// Strides of (B, H, S) or (H, T).
plan::RowsView lse_view(const TensorView& x) {
  if (!x.defined()) return {};
  const int head = x.ndim - 2;
  return {x.data, head ? x.strides[0] : 0, x.strides[static_cast<size_t>(head) + 1],
          x.strides[static_cast<size_t>(head)]};
}

std::vector<int64_t> shape_of(const TensorView& x) { return {x.shape.begin(), x.shape.begin() + x.ndim}; }

std::vector<int64_t> lse_shape(const plan::ForwardParams& p) {
  if (p.cu_seqlens_q) return {p.heads, p.total_q};
  return {p.batch, p.heads, p.seqlen_q};
}

void check_options(const AttentionOptions& options, plan::ForwardParams& p) {
  const double scale = options.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  p.softmax_scale = static_cast<float>(scale);
  if (!std::isfinite(p.softmax_scale)) fail_value("softmax_scale", to_string(scale), "a finite number");
  require(options.window_left >= -1, "window_left", options.window_left, "-1 (unlimited) or more");
  require(options.window_right >= -1, "window_right", options.window_right, "-1 (unlimited) or more");
  const auto width = [](int64_t keys) {
    return keys < 0 || keys > plan::kUnlimitedWindow ? plan::kUnlimitedWindow : keys;
  };
  p.window_left = width(options.window_left);
  p.window_right = options.causal ? 0 : width(options.window_right);
  if (options.sinks.defined()) {
    check_tensor("sinks", options.sinks, DType::f32, {p.heads}, "one per query head");
    p.sinks = options.sinks.as<const float>();
  }
}

/// q, k, v, and the options: everything the forward and the backward share.
plan::ForwardParams input_params(const TensorView& q, const TensorView& k, const TensorView& v,
                                 const AttentionOptions& options, const Place& place, bool gradient) {
  plan::ForwardParams p{};
  const bool packed = options.cu_seqlens_q.defined();
  if (packed != options.cu_seqlens_k.defined()) {
    fail_value(packed ? "cu_seqlens_k" : "cu_seqlens_q", "nothing", "cu_seqlens_q and cu_seqlens_k come together");
  }
  const int ndim = packed ? 3 : 4;
  require_tensor("q", q, ndim, attention_types(place.device));
  require_tensor("k", k, ndim, {q.dtype});
  const size_t row = packed ? 0 : 1;
  p.dtype = q.dtype;
  p.heads = q.shape[row + 1];
  p.kv_heads = k.shape[row + 1];
  p.head_dim = q.shape[row + 2];
  p.total_q = p.seqlen_q = q.shape[row];
  p.total_k = p.seqlen_k = k.shape[row];
  require_attention_shape(p.heads, p.kv_heads, p.head_dim, place.device, gradient);
  if (packed) {
    p.batch = check_cu_seqlens("cu_seqlens_q", options.cu_seqlens_q, p.total_q, place);
    const int64_t batch_k = check_cu_seqlens("cu_seqlens_k", options.cu_seqlens_k, p.total_k, place);
    require(batch_k == p.batch, "sequences of cu_seqlens_k", batch_k, "as many as cu_seqlens_q, " + to_string(p.batch));
    p.cu_seqlens_q = options.cu_seqlens_q.as<const int32_t>();
    p.cu_seqlens_k = options.cu_seqlens_k.as<const int32_t>();
    check_tensor("k", k, p.dtype, {p.total_k, p.kv_heads, p.head_dim}, "q and k share head_dim");
  } else {
    p.batch = q.shape[0];
    p.total_q *= p.batch;
    p.total_k *= p.batch;
    check_tensor("k", k, p.dtype, {p.batch, p.seqlen_k, p.kv_heads, p.head_dim}, "q and k share batch and head_dim");
  }
  if (place.device != Device::cpu) {
    const std::string allowed = "on " + place_text(place) + " below " + to_string(plan::kMostDeviceRows);
    require(p.total_q < plan::kMostDeviceRows, "rows of q", p.total_q, allowed);
    require(p.total_k < plan::kMostDeviceRows, "rows of k", p.total_k, allowed);
  }
  require_last_contiguous("q", q);
  check_tensor("v", v, p.dtype, shape_of(k), "as k");
  check_row_starts("q", q, place);
  check_row_starts("k", k, place);
  check_row_starts("v", v, place);
  check_options(options, p);
  p.q = rows_view(q);
  p.k = rows_view(k);
  p.v = rows_view(v);
  return p;
}

}  // namespace

void require_attention_shape(int64_t heads, int64_t kv_heads, int64_t head_dim, Device device, bool gradient) {
  if (device == Device::cpu) {
    require(head_dim >= 1 && head_dim <= 256, "head_dim", head_dim, "1 to 256");
  } else {
    const bool both = head_dim == 64 || head_dim == 96 || head_dim == 128;
    require(both || (head_dim == 256 && !gradient), "head_dim", head_dim,
            "supported on cuda: 64, 96, 128, and without a gradient 256");
  }
  require(kv_heads >= 1, "kv_heads", kv_heads, "1 or more");
  require(heads >= 1 && heads % kv_heads == 0, "heads", heads, "a multiple of kv_heads=" + to_string(kv_heads));
}

std::initializer_list<DType> attention_types(Device device) {
  static constexpr std::initializer_list<DType> kHalfTypes = {DType::bf16, DType::f16};
  return device == Device::cpu ? kFloatTypes : kHalfTypes;
}

plan::ForwardParams forward_params(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                                   const TensorView& lse, const AttentionOptions& options, const Place& place) {
  plan::ForwardParams p = input_params(q, k, v, options, place, false);
  check_output("out", out, p.dtype, shape_of(q), "as q");
  check_row_starts("out", out, place);
  if (lse.defined()) check_output("lse", lse, DType::f32, lse_shape(p), "heads and rows of q");
  p.out = rows_view(out);
  p.lse = lse_view(lse);
  return p;
}

plan::BackwardParams backward_params(const AttentionBackwardTensors& t, const AttentionOptions& options,
                                     const Place& place) {
  plan::BackwardParams b{};
  plan::ForwardParams& p = b.forward = input_params(t.q, t.k, t.v, options, place, true);
  check_tensor("out", t.out, p.dtype, shape_of(t.q), "as q");
  check_tensor("lse", t.lse, DType::f32, lse_shape(p), "heads and rows of q");
  check_tensor("dout", t.dout, p.dtype, shape_of(t.q), "as q");
  b.grad_dtype = t.dq.defined() ? t.dq.dtype : p.dtype;
  if (b.grad_dtype != p.dtype && b.grad_dtype != DType::f32) {
    fail_type("dq.dtype", dtype_name(b.grad_dtype), std::string("supported: ") + dtype_name(p.dtype) + ", float32");
  }
  check_output("dq", t.dq, b.grad_dtype, shape_of(t.q), "as q");
  check_output("dk", t.dk, b.grad_dtype, shape_of(t.k), "as k");
  check_output("dv", t.dv, b.grad_dtype, shape_of(t.k), "as k");
  check_row_starts("out", t.out, place);
  check_row_starts("dout", t.dout, place);
  check_row_starts("dq", t.dq, place);
  check_row_starts("dk", t.dk, place);
  check_row_starts("dv", t.dv, place);
  if (t.dsinks.defined()) {
    if (!p.sinks) fail_value("dsinks", "a tensor", "nothing where there are no sinks");
    check_output("dsinks", t.dsinks, DType::f32, {p.heads}, "as sinks");
    b.dsinks = t.dsinks.as<float>();
  }
  p.out = rows_view(t.out);
  p.lse = lse_view(t.lse);
  b.dout = rows_view(t.dout);
  b.dq = rows_view(t.dq);
  b.dk = rows_view(t.dk);
  b.dv = rows_view(t.dv);
  return b;
}

}  // namespace fold::api
