#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/device.h"

namespace fold::cuda {

struct Grid {
  int64_t blocks;
  int threads;
  size_t shared_bytes;  // dynamic
  /// CTAs are placed while the kernel before still runs: this one waits for it by itself. A multiprocessor takes CTAs
  /// of both if it need not divide its memory into cache and shared memory anew, so all such kernels ask for the same.
  bool overlap = false;

  bool operator==(const Grid&) const = default;
};

/// A launch as data.
struct KernelCall {
  const void* kernel;
  Grid grid;
  std::vector<std::byte> params;
  std::vector<size_t> offsets;  // of each parameter among those bytes
  const char* step;

  bool operator==(const KernelCall&) const = default;
};

/// While a thread has one, its launches are added to it.
class LaunchList {
 public:
  static inline thread_local LaunchList* current = nullptr;
  virtual void add(KernelCall call) = 0;

 protected:
  ~LaunchList() = default;
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

template <typename... Params>
KernelCall kernel_call(void (*kernel)(Params...), const Grid& grid, const char* step, const Params&... params) {
  KernelCall call{reinterpret_cast<const void*>(kernel), grid, {}, {}, step};
  const auto append = [&call](const auto& param) {
    call.offsets.push_back((call.params.size() + alignof(std::max_align_t) - 1) / alignof(std::max_align_t) *
                           alignof(std::max_align_t));
    call.params.resize(call.offsets.back() + sizeof(param));
    std::memcpy(call.params.data() + call.offsets.back(), &param, sizeof(param));
  };
  (append(params), ...);
  return call;
}

template <typename... Params, typename... Args>
void launch_kernel(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream, const char* step,
                   const Args&... args) {
  if (grid.blocks > std::numeric_limits<int32_t>::max()) throw std::runtime_error(std::string(step) + ": too large");
  SharedMemoryAllowed::of_all().require(kernel, grid.shared_bytes, step);
  if (LaunchList* const list = LaunchList::current; list != nullptr) {
    return list->add(kernel_call<Params...>(kernel, grid, step, args...));
  }
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(grid.blocks);
  config.blockDim = static_cast<unsigned>(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute overlap[2]{};
  overlap[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap[0].val.programmaticStreamSerializationAllowed = 1;
  overlap[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  overlap[1].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  config.attrs = overlap;
  config.numAttrs = grid.overlap ? 2 : 0;
  require_success(cudaLaunchKernelEx(&config, kernel, args...), step);
}

}  // namespace fold::cuda
