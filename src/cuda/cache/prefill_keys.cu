#include "cuda/cache/prefill_keys.h"
#include "cuda/cache/read_rows.cuh"
#include "cuda/launch.h"

namespace fold::cuda {
namespace {

using namespace cache;

/// A request's tokens, cut to the tensors' rows as attention cuts them.
struct Tokens {
  int64_t first, count;
};
__device__ Tokens tokens_of(const plan::PrefillKeysParams& p, int64_t request) {
  const int64_t first = min(max(int64_t{p.cu_seqlens[request]}, int64_t{0}), p.tokens);
  return {first, min(max(int64_t{p.cu_seqlens[request + 1]}, first), p.tokens) - first};
}

/// One warp: a running sum of the requests' keys, as far as there is room.
__global__ void __launch_bounds__(32) key_starts_kernel(const __grid_constant__ plan::PrefillKeysParams p) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane == 0) p.key_starts[0] = 0;
  int64_t before = 0, room = p.rows;
  for (int64_t first = 0; first < p.batch; first += 32) {
    const int64_t request = first + lane;
    int64_t end = 0;
    if (request < p.batch) end = max(int64_t{p.seqlens[request]}, int64_t{0}) + tokens_of(p, request).count;
#pragma unroll
    for (int s = 1; s < 32; s *= 2) {
      const int64_t other = __shfl_up_sync(kWarp, end, s);
      if (lane >= s) end += other;
    }
    end += before;
    // Sums do not fall, so those that fit come first.
    const int fit = __popc(__ballot_sync(kWarp, end <= room));
    const int64_t last = __shfl_sync(kWarp, end, fit == 0 ? 0 : fit - 1);
    if (fit != 0) before = last;
    if (fit != 32) room = before;
    if (request < p.batch) p.key_starts[request + 1] = static_cast<int32_t>(min(end, before));
  }
}

/// One warp a row and KV head: K and V.
template <int D>
__global__ void __launch_bounds__(kReadThreads) prefill_keys_kernel(const __grid_constant__ plan::PrefillKeysParams p) {
  const auto [warp, row, head, lane] = row_of_warp(p.cache.layout.n_kv_heads);
  if (row >= p.rows) return;
  const int64_t request = request_of_row(p.key_starts, p.batch, row);
  if (request < 0) return;
  const int64_t begin = p.key_starts[request], key = row - begin;
  const Tokens own = tokens_of(p, request);
  const int64_t cached = p.key_starts[request + 1] - begin - own.count;
  if (key < cached) {
    read_key<D>(p.cache, p.block_table + request * p.block_table_stride, p.max_pages, key, head, lane,
                {p.keys, p.dtype, warp * D}, {p.values, p.dtype, warp * D});
    return;
  }
  // Half of the lanes copy K, the others V, 16 bytes each at a time.
  const bool of_v = lane >= 16;
  const int64_t token = own.first + key - cached;
  const int64_t at = of_v ? token * p.v_stride_t + head * p.v_stride_h : token * p.k_stride_t + head * p.k_stride_h;
  const auto* from = static_cast<const uint16_t*>(of_v ? p.v : p.k) + at;
  auto* to = static_cast<uint16_t*>(of_v ? p.values : p.keys) + warp * D;
  for (int part = lane % 16; part < D / 8; part += 16) {
    reinterpret_cast<uint4*>(to)[part] = reinterpret_cast<const uint4*>(from)[part];
  }
}

}  // namespace

void prefill_keys(const plan::PrefillKeysParams& params, cudaStream_t stream) {
  launch_kernel(key_starts_kernel, {1, 32, 0}, stream, "where a prompt's keys start", params);
  if (params.rows == 0 || params.batch == 0) return;
  const int64_t dim = params.cache.layout.head_dim;
  const auto kernel = dim == 64    ? prefill_keys_kernel<64>
                      : dim == 128 ? prefill_keys_kernel<128>
                                   : prefill_keys_kernel<256>;
  launch_kernel(kernel, a_warp_each(params.rows * params.cache.layout.n_kv_heads, kReadThreads), stream,
                "a prompt's keys", params);
}

}  // namespace fold::cuda
