#pragma once
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/device.h"

namespace fold::cuda {

struct Grid {
  int64_t blocks;
  int threads;
  size_t shared_bytes;   // dynamic
  bool overlap = false;  // CTAs are placed while the kernel before still runs: this one waits for it by itself
};

inline Grid a_warp_each(int64_t rows, int threads) { return {(32 * rows + threads - 1) / threads, threads, 0}; }

/// How much dynamic shared memory kernels were allowed, so that the driver is asked once for each on a device.
class SharedMemoryAllowed {
 public:
  static SharedMemoryAllowed& of_all() {
    static SharedMemoryAllowed allowed;
    return allowed;
  }

  template <typename Kernel>
  void require(Kernel* kernel, size_t bytes, const char* step) {
    if (bytes <= kAlways) return;
    const std::pair<const void*, int> key(reinterpret_cast<const void*>(kernel), current_device());
    const std::lock_guard lock(mutex_);
    size_t& allowed = bytes_[key];
    if (bytes <= allowed) return;
    require_success(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
                    step);
    allowed = bytes;
  }

 private:
  static constexpr size_t kAlways = 40 * 1024;  ///< of 48 KiB, beside a kernel's own variables

  std::mutex mutex_;
  std::map<std::pair<const void*, int>, size_t> bytes_;
};

template <typename... Params, typename... Args>
void launch_kernel(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream, const char* step,
                   const Args&... args) {
  if (grid.blocks > std::numeric_limits<int32_t>::max()) throw std::runtime_error(std::string(step) + ": too large");
  SharedMemoryAllowed::of_all().require(kernel, grid.shared_bytes, step);
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(grid.blocks);
  config.blockDim = static_cast<unsigned>(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = grid.overlap ? 1 : 0;
  require_success(cudaLaunchKernelEx(&config, kernel, args...), step);
}

}  // namespace fold::cuda
