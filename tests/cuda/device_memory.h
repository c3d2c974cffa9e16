#pragma once
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "fold/tensor.h"

// Device memory for tests, and the comparison of what comes back.
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

/// Equal bits; any NaN equals any NaN.
template <typename T>
bool same_bits(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) && std::isnan(b)) return true;
  }
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <typename T>
void expect_same(const std::vector<T>& got, const std::vector<T>& want, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  size_t differ = 0, first = 0;
  for (size_t i = got.size(); i-- > 0;) {
    if (same_bits(got[i], want[i])) continue;
    ++differ;
    first = i;
  }
  EXPECT_EQ(differ, 0u) << what << ": first [" << first << "] " << +got[first] << " not " << +want[first] << ", of "
                        << got.size();
}

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
