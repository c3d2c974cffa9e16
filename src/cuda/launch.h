#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

namespace fold::cuda {

/// Throws if a call of the driver failed. step: what it was for.
inline void require_success(cudaError_t status, const char* step) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(step) + ": " + cudaGetErrorString(status));
}

struct Grid {
  int64_t blocks;
  int threads;
  size_t shared_bytes;   // dynamic
  bool overlap = false;  // CTAs are placed while the kernel before still runs: this one waits for it by itself
};

template <typename... Params, typename... Args>
void launch_kernel(void (*kernel)(Params...), const Grid& grid, cudaStream_t stream, const char* step,
                   const Args&... args) {
  if (grid.blocks > std::numeric_limits<int32_t>::max()) throw std::runtime_error(std::string(step) + ": too large");
  require_success(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes)),
      step);
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
