#include "cuda/cache/cache_read.h"
#include "cuda/decode/rows.cuh"
#include "cuda/launch.h"
#include "plan/cache_access.h"

namespace fold::cuda {
namespace {

constexpr int kThreads = 256;

/// The request that a row belongs to, or -1.
__device__ int64_t request_of_row(const plan::CacheReadParams& p, int64_t row) {
  int64_t first = 0, count = p.batch;  // the last request among them that starts at or before the row
  while (count > 1) {
    const int64_t half = count / 2;
    if (p.cu_seqlens[first + half] <= row) {
      first += half;
      count -= half;
    } else {
      count = half;
    }
  }
  return p.cu_seqlens[first] <= row && row < p.cu_seqlens[first + 1] ? first : -1;
}

/// A warp's row of K or V. planes: the row's; scale: bf16.
template <int D>
__device__ void read_row(const numerics::PlaneRow& planes, uint16_t scale, int lane, void* to, DType dtype,
                         int64_t at) {
  constexpr int N = D / 32;
  const float unit = numerics::mul(numerics::from_bf16(scale), 0x1p-8f);
  float x[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[i] = numerics::mul(static_cast<float>(numerics::reading(planes, lane * N + i)), unit);
  }
  rotate_row<D>(x, lane);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    store_element(x[i] == x[i] ? x[i] : numerics::quiet_nan(), to, dtype, at + lane * N + i);
  }
}

template <typename T>
__device__ const T* element(const T* section, int64_t at) {
  return section == nullptr ? nullptr : section + at;
}

/// One warp a row and KV head: K and V.
template <int D>
__global__ void __launch_bounds__(kThreads) read_kernel(const __grid_constant__ plan::CacheReadParams p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int64_t heads = p.cache.layout.n_kv_heads, row = warp / heads, head = warp % heads;
  if (row >= p.rows) return;
  const int64_t request = request_of_row(p, row);
  if (request < 0) return;
  const int64_t key = row - p.cu_seqlens[request], page_size = p.cache.layout.page_size, index = key / page_size;
  const int64_t id = index < p.max_pages ? p.block_table[request * p.block_table_stride + index] : -1;
  const int64_t k_at = row * p.k_stride_t + head * p.k_stride_h, v_at = row * p.v_stride_t + head * p.v_stride_h;
  if (id < 0 || id >= p.cache.num_pages) {
    for (int c = lane; c < D; c += 32) {
      store_element(numerics::quiet_nan(), p.k, p.k_dtype, k_at + c);
      store_element(numerics::quiet_nan(), p.v, p.v_dtype, v_at + c);
    }
    return;
  }
  const plan::HeadPage page = plan::head_page(p.cache, id, head);
  const int64_t slot = key % page_size, tile = slot / numerics::kTile * numerics::kTile;
  const int64_t scale = tile + numerics::scale_slot(static_cast<int>(slot - tile)), half = slot * (D / 2);
  read_row<D>({page.k_h + half, element(page.k_l, half), element(page.k_b, slot * D)}, page.k_scale[scale], lane, p.k,
              p.k_dtype, k_at);
  read_row<D>({page.v_h + half, element(page.v_l, half), element(page.v_b, slot * D)}, page.v_scale[scale], lane, p.v,
              p.v_dtype, v_at);
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
