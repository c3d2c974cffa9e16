#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <vector>

// What every call asks about devices, asked of the driver once.
namespace fold::cuda {

/// Throws if a call of the driver failed. step: what it was for.
inline void require_success(cudaError_t status, const char* step) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(step) + ": " + cudaGetErrorString(status));
}

inline int current_device() {
  int device = 0;
  require_success(cudaGetDevice(&device), "the current device");
  return device;
}

class Devices {
 public:
  static const Devices& all() {
    static const Devices devices;
    return devices;
  }

  /// Null, or why the kernels do not run on this device.
  const char* problem(int device) const {
    if (!problem_.empty()) return problem_.c_str();
    if (device < 0 || device >= static_cast<int>(devices_.size())) return "there is no such device";
    return devices_[static_cast<size_t>(device)].problem;
  }

  int multiprocessors(int device) const { return devices_.at(static_cast<size_t>(device)).multiprocessors; }

 private:
  struct Device {
    const char* problem = "the driver does not say what the device is";
    int multiprocessors = 1;
  };

  Devices() {
    int count = 0;
    if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
      problem_ = cudaGetErrorString(status);
      return;
    }
    for (int device = 0; device < count; ++device) devices_.push_back(ask(device));
  }

  static Device ask(int device) {
    int major = 0, minor = 0, multiprocessors = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
      return {};
    }
    return {major == 9 && minor == 0 ? nullptr : "the kernels are for compute capability 9.0", multiprocessors};
  }

  std::string problem_;  // of all devices
  std::vector<Device> devices_;
};

/// Of the current device.
inline int multiprocessors() { return Devices::all().multiprocessors(current_device()); }

}  // namespace fold::cuda
