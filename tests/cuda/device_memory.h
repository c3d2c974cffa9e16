#pragma once
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "fold/tensor.h"

// Device memory for tests.
namespace fold::testing {

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// Device memory holding a copy of host values.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : size_(values.size()) {
    check(cudaMalloc(&data_, std::max<size_t>(1, size_) * sizeof(T)));
    set(values);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(data_); }

  T* data() const { return data_; }
  void set(const std::vector<T>& values) {
    check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> back() const {
    std::vector<T> values(size_);
    check(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  size_t size_;
  T* data_ = nullptr;
};

inline TensorView on_device(TensorView view, void* data) {
  view.data = data;
  view.device = Device::cuda;
  return view;
}

inline bool has_device() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

/// Skips its tests where there is no device.
class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_device()) GTEST_SKIP() << "no CUDA device";
  }
};

}  // namespace fold::testing
