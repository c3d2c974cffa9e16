#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>

#include "fold/error.h"

namespace fold {

enum class DType : int32_t { f32, bf16, f16, i32, i64, u8, i8, u64, boolean };

enum class Device : int32_t { cpu, cuda };

constexpr int kMaxDims = 5;

/// A non-owning view of a strided tensor. Strides are counted in elements and are 64-bit; 0 (broadcast) is allowed.
/// A default-constructed view stands for "not given".
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int ndim = -1;
  std::array<int64_t, kMaxDims> shape{};
  std::array<int64_t, kMaxDims> strides{};
  Device device = Device::cpu;
  int device_index = 0;

  TensorView() = default;

  /// A contiguous (row-major) view.
  TensorView(void* data_, DType dtype_, std::initializer_list<int64_t> dims)
      : data(data_), dtype(dtype_), ndim(static_cast<int>(dims.size())) {
    if (ndim > kMaxDims) throw Error(Error::Kind::value, "ndim", std::to_string(ndim), "at most 5");
    int i = 0;
    for (int64_t d : dims) shape[i++] = d;
    int64_t stride = 1;
    for (i = ndim - 1; i >= 0; --i) {
      strides[i] = stride;
      stride *= shape[i];
    }
  }

  bool defined() const { return ndim >= 0; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

constexpr int64_t dtype_size(DType t) {
  switch (t) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::i64:
    case DType::u64:
      return 8;
    default:
      return 1;
  }
}

}  // namespace fold
