#include "cuda/cache/cache_read.h"
#include "cuda/cache/read_rows.cuh"
#include "cuda/launch.h"

namespace fold::cuda {
namespace {

using namespace cache;

constexpr int kThreads = 256;

/// One warp a row and KV head: K and V.
template <int D>
__global__ void __launch_bounds__(kThreads) read_kernel(const __grid_constant__ plan::CacheReadParams p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int64_t heads = p.cache.layout.n_kv_heads, row = warp / heads, head = warp % heads;
  if (row >= p.rows) return;
  const int64_t request = request_of_row(p.cu_seqlens, p.batch, row);
  if (request < 0) return;
  read_key<D>(p.cache, p.block_table + request * p.block_table_stride, p.max_pages, row - p.cu_seqlens[request], head,
              lane, {p.k, p.k_dtype, row * p.k_stride_t + head * p.k_stride_h},
              {p.v, p.v_dtype, row * p.v_stride_t + head * p.v_stride_h});
}

}  // namespace

void cache_read(const plan::CacheReadParams& params, cudaStream_t stream) {
  const int64_t warps = params.rows * params.cache.layout.n_kv_heads;
  if (warps == 0 || params.batch == 0) return;
  const auto kernel = params.cache.layout.head_dim == 64    ? read_kernel<64>
                      : params.cache.layout.head_dim == 128 ? read_kernel<128>
                                                            : read_kernel<256>;
  launch_kernel(kernel, {(32 * warps + kThreads - 1) / kThreads, kThreads, 0}, stream, "rows of the cache", params);
}

}  // namespace fold::cuda
