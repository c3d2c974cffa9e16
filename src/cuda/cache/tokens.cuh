#pragma once
#include "cuda/cache/requests.cuh"
#include "cuda/ptx/launch_order.cuh"

// Which tokens are real where a slot mapping marks some as padding.
namespace fold::cuda::cache {

constexpr int kTokenThreads = 1024;
constexpr int kTokensAThread = 8;

/// One thread block a request: token_of and counts.
__global__ void __launch_bounds__(kTokenThreads) list_tokens(const __grid_constant__ Write w) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  __shared__ ScanShared scan;
  const TokenRange range = token_range(w, static_cast<int>(blockIdx.x));
  int found = 0;
  for (int64_t first = range.first; first < range.last; first += kTokenThreads * kTokensAThread) {
    const int64_t mine = first + threadIdx.x * kTokensAThread;
    unsigned real = 0;
    for (int i = 0; i < kTokensAThread; ++i) {
      if (mine + i < range.last && w.params.slot_mapping[mine + i] >= 0) real |= 1u << i;
    }
    unsigned total = 0;
    int64_t at = range.first + found + exclusive_sum(__popc(real), total, scan);
    for (int i = 0; i < kTokensAThread; ++i) {
      if ((real >> i & 1) != 0) w.token_of[at++] = static_cast<int>(mine + i);
    }
    found += static_cast<int>(total);
  }
  if (threadIdx.x == 0) w.counts[blockIdx.x] = found;
}

}  // namespace fold::cuda::cache
