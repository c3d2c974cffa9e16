#include "cuda/cache/cache_read.h"
#include "cuda/cache/read_rows.cuh"
#include "cuda/launch.h"

namespace fold::cuda {
namespace {

using namespace cache;

/// One warp a row and KV head: K and V.
template <int D>
__global__ void __launch_bounds__(kReadThreads) read_kernel(const __grid_constant__ plan::CacheReadParams p) {
  const auto [warp, row, head, lane] = row_of_warp(p.cache.layout.n_kv_heads);
  if (row >= p.rows) return;
  const int64_t request = request_of_row(p.cu_seqlens, p.batch, row);
  if (request < 0) return;
  read_key<D>(p.cache, p.block_table + request * p.block_table_stride, p.max_pages, row - p.cu_seqlens[request], head,
              lane, {p.k, p.k_dtype, row * p.k_stride_t + head * p.k_stride_h},
              {p.v, p.v_dtype, row * p.v_stride_t + head * p.v_stride_h});
}

}  // namespace

void cache_read(const plan::CacheReadParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.batch == 0) return;
  const auto kernel = params.cache.layout.head_dim == 64    ? read_kernel<64>
                      : params.cache.layout.head_dim == 128 ? read_kernel<128>
                                                            : read_kernel<256>;
  launch_kernel(kernel, a_warp_each(params.rows * params.cache.layout.n_kv_heads, kReadThreads), stream,
                "rows of the cache", params);
}

}  // namespace fold::cuda
