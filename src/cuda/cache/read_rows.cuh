#pragma once
#include "cuda/decode/rows.cuh"
#include "plan/cache_access.h"

// Keys of the cache at their finest reading, rotated back: a row of K and of V a warp.
namespace fold::cuda::cache {

constexpr int kReadThreads = 256;

/// What a warp of a grid does: one row and KV head.
struct RowOfWarp {
  int64_t number, row, head;  // of the warp; number = row * heads + head
  int lane;
};
__device__ inline RowOfWarp row_of_warp(int64_t heads) {
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kReadThreads + threadIdx.x) / 32;
  return {warp, warp / heads, warp % heads, static_cast<int>(threadIdx.x % 32)};
}

/// The request whose rows starts[b] .. starts[b + 1] hold this one, or -1. starts: (batch + 1,), batch > 0
__device__ inline int64_t request_of_row(const int32_t* starts, int64_t batch, int64_t row) {
  int64_t first = 0, count = batch;  // the last request among them that starts at or before the row
  while (count > 1) {
    const int64_t half = count / 2;
    if (starts[first + half] <= row) {
      first += half;
      count -= half;
    } else {
      count = half;
    }
  }
  return starts[first] <= row && row < starts[first + 1] ? first : -1;
}

/// Where a warp's row goes.
struct RowOut {
  void* data;
  DType dtype;
  int64_t at;  // element
};

/// planes: the row's; scale: bf16.
template <int D>
__device__ void read_row(const numerics::PlaneRow& planes, uint16_t scale, int lane, const RowOut& to) {
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
    store_element(x[i] == x[i] ? x[i] : numerics::quiet_nan(), to.data, to.dtype, to.at + lane * N + i);
  }
}

template <typename T>
__device__ const T* element(const T* section, int64_t at) {
  return section == nullptr ? nullptr : section + at;
}

/// Key `key` of one KV head of the request whose row of the block table this is, (max_pages,). Without a page in the
/// pool it reads as NaN.
template <int D>
__device__ void read_key(const plan::CacheView& cache, const int32_t* table, int64_t max_pages, int64_t key,
                         int64_t head, int lane, const RowOut& k, const RowOut& v) {
  const int64_t page_size = cache.layout.page_size, index = key / page_size;
  const int64_t id = index < max_pages ? table[index] : -1;
  if (id < 0 || id >= cache.num_pages) {
    for (int c = lane; c < D; c += 32) {
      store_element(numerics::quiet_nan(), k.data, k.dtype, k.at + c);
      store_element(numerics::quiet_nan(), v.data, v.dtype, v.at + c);
    }
    return;
  }
  const plan::HeadPage page = plan::head_page(cache, id, head);
  const int64_t slot = key % page_size, tile = slot / numerics::kTile * numerics::kTile;
  const int64_t scale = tile + numerics::scale_slot(static_cast<int>(slot - tile)), half = slot * (D / 2);
  read_row<D>({page.k_h + half, element(page.k_l, half), element(page.k_b, slot * D)}, page.k_scale[scale], lane, k);
  read_row<D>({page.v_h + half, element(page.v_l, half), element(page.v_b, slot * D)}, page.v_scale[scale], lane, v);
}

}  // namespace fold::cuda::cache
