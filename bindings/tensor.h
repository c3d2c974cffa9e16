#pragma once
#include <tvm/ffi/tvm_ffi.h>

#include <optional>
#include <string>

#include "fold/tensor.h"

namespace fold::binding {

using Tensor = tvm::ffi::TensorView;                              ///< a tensor argument, borrowed for the call
using OptionalTensor = tvm::ffi::Optional<tvm::ffi::TensorView>;  ///< the same or None

inline std::string dtype_text(const DLDataType& t) {
  const auto named = [&t](const char* kind) { return kind + std::to_string(t.bits); };
  switch (t.code) {
    case kDLFloat:
      return named("float");
    case kDLInt:
      return named("int");
    case kDLUInt:
      return named("uint");
    case kDLComplex:
      return named("complex");
    default:
      return "DLPack type " + std::to_string(t.code);
  }
}

inline DType dtype_of(const DLDataType& t, const char* name) {
  if (t.lanes == 1) {
    switch (t.code << 8 | t.bits) {
      case kDLFloat << 8 | 32:
        return DType::f32;
      case kDLFloat << 8 | 16:
        return DType::f16;
      case kDLBfloat << 8 | 16:
        return DType::bf16;
      case kDLInt << 8 | 8:
        return DType::i8;
      case kDLInt << 8 | 32:
        return DType::i32;
      case kDLInt << 8 | 64:
        return DType::i64;
      case kDLUInt << 8 | 8:
        return DType::u8;
      case kDLUInt << 8 | 64:
        return DType::u64;
      case kDLBool << 8 | 8:
        return DType::boolean;
    }
  }
  throw Error(Error::Kind::type, std::string(name) + ".dtype", dtype_text(t),
              "supported: float32, bfloat16, float16, int32, int64, int8, uint8, uint64, bool");
}

/// The library's view of a DLPack tensor; `name` is what an error calls it.
inline TensorView view(const Tensor& t, const char* name) {
  if (t.ndim() > kMaxDims) {
    throw Error(Error::Kind::value, std::string(name) + ".ndim", std::to_string(t.ndim()),
                "at most " + std::to_string(kMaxDims));
  }
  TensorView out;
  switch (t.device().device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      out.device = Device::cpu;
      break;
    case kDLCUDA:
      out.device = Device::cuda;
      break;
    default:
      throw Error(Error::Kind::type, std::string(name) + ".device",
                  "DLDeviceType(" + std::to_string(t.device().device_type) + ")", "supported: cpu");
  }
  out.device_index = t.device().device_id;
  out.dtype = dtype_of(t.dtype(), name);
  out.data = static_cast<char*>(t.data_ptr()) + t.byte_offset();
  out.ndim = t.ndim();
  for (int i = 0; i < out.ndim; ++i) {
    out.shape[i] = t.size(i);
    out.strides[i] = t.stride(i);
  }
  return out;
}

/// None becomes an undefined view.
inline TensorView view(const OptionalTensor& t, const char* name) {
  return t.has_value() ? view(t.value(), name) : TensorView();
}

}  // namespace fold::binding
