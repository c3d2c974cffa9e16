#include <cstdint>

#include "cuda/cache/step_tables.h"
#include "cuda/launch.h"
#include "cuda/ptx/launch_order.cuh"

namespace fold::cuda {
namespace {

constexpr int kThreads = 128;

/// One thread a request.
__global__ void __launch_bounds__(kThreads) step_tables_kernel(const __grid_constant__ plan::StepParams p) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b > p.batch) return;
  p.cu_seqlens[b] = static_cast<int32_t>(b * p.tokens);
  if (b == p.batch) return;
  const int32_t* table = p.block_table + b * p.block_table_stride;
  const int64_t before = p.seqlens[b];
  int64_t n = p.q_lens == nullptr ? p.tokens : min(max(int64_t{p.q_lens[b]}, int64_t{0}), p.tokens);
  const bool padding = before == 0 && (p.max_pages == 0 || table[0] < 0);
  if (padding || before < 0 || before + n > INT32_MAX) n = 0;
  if (p.slot_mapping != nullptr) {
    int64_t given = 0;
    for (int64_t t = 0; t < p.tokens; ++t) given += p.slot_mapping[b * p.tokens + t] >= 0;
    n = min(n, given);
  }
  p.token_counts[b] = static_cast<int32_t>(n);
  p.lengths[b] = static_cast<int32_t>(before < 0 ? 0 : before + n);
  for (int64_t t = 0; p.slots != nullptr && t < p.tokens; ++t) {
    const int64_t key = before + t, page = key / p.page_size;
    const bool real = t < n && page < p.max_pages;
    p.slots[b * p.tokens + t] = real ? table[page] * p.page_size + key % p.page_size : -1;
  }
}

}  // namespace

void step_tables(const plan::StepParams& params, cudaStream_t stream) {
  launch_kernel(step_tables_kernel, {params.batch / kThreads + 1, kThreads, 0, true}, stream, "the step's tables",
                params);
}

}  // namespace fold::cuda
