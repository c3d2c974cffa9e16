#include "api/checks.h"

#include <algorithm>

namespace fold::api {

void fail_value(const std::string& what, const std::string& got, const std::string& allowed) {
  throw Error(Error::Kind::value, what, got, allowed);
}

void fail_type(const std::string& what, const std::string& got, const std::string& allowed) {
  throw Error(Error::Kind::type, what, got, allowed);
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float32";
    case DType::bf16:
      return "bfloat16";
    case DType::f16:
      return "float16";
    case DType::i32:
      return "int32";
    case DType::i64:
      return "int64";
    case DType::u8:
      return "uint8";
    case DType::i8:
      return "int8";
    case DType::u64:
      return "uint64";
    case DType::boolean:
      return "bool";
  }
  return "unknown";
}

std::string shape_text(const TensorView& t) {
  std::string text = "(";
  for (int i = 0; i < t.ndim; ++i) text += (i > 0 ? ", " : "") + std::to_string(t.shape[i]);
  return text + ")";
}

void require_tensor(const char* name, const TensorView& t, int ndim, std::initializer_list<DType> dtypes) {
  if (!t.defined()) fail_value(name, "nothing", "a tensor is required");
  if (t.ndim != ndim)
    fail_value(std::string(name) + ".ndim", std::to_string(t.ndim), "supported: " + std::to_string(ndim));
  if (std::find(dtypes.begin(), dtypes.end(), t.dtype) == dtypes.end()) {
    std::string allowed = "supported:";
    for (const DType& d : dtypes) allowed += std::string(&d == dtypes.begin() ? " " : ", ") + dtype_name(d);
    fail_type(std::string(name) + ".dtype", dtype_name(t.dtype), allowed);
  }
  if (t.device != Device::cpu) fail_type(std::string(name) + ".device", "cuda", "supported: cpu");
  for (int i = 0; i < ndim; ++i) {
    if (t.shape[i] < 0) fail_value(std::string(name) + ".shape", shape_text(t), "sizes must not be negative");
  }
  if (t.data == nullptr && t.numel() > 0) fail_value(name, "null data", "a tensor with memory is required");
}

void require_size(const char* name, const TensorView& t, int dim, int64_t size, const char* meaning) {
  if (t.shape[dim] == size) return;
  fail_value(std::string(name) + ".shape", shape_text(t),
             "dimension " + std::to_string(dim) + " must be " + std::to_string(size) + " (" + meaning + ")");
}

void require_last_contiguous(const char* name, const TensorView& t) {
  const int last = t.ndim - 1;
  if (last < 0 || t.shape[last] <= 1 || t.strides[last] == 1 || t.numel() == 0) return;
  fail_value(std::string(name) + ".stride(-1)", std::to_string(t.strides[last]), "must be 1");
}

void require_contiguous(const char* name, const TensorView& t) {
  if (t.numel() == 0) return;
  int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] > 1 && t.strides[i] != stride) {
      fail_value(std::string(name) + ".stride(" + std::to_string(i) + ")", std::to_string(t.strides[i]),
                 "must be " + std::to_string(stride) + " (contiguous)");
    }
    stride *= t.shape[i];
  }
}

void require_no_broadcast(const char* name, const TensorView& t) {
  if (t.numel() == 0) return;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] > 1 && t.strides[i] == 0) {
      fail_value(std::string(name) + ".stride(" + std::to_string(i) + ")", "0",
                 "must not be 0 in a tensor that is written");
    }
  }
}

}  // namespace fold::api
