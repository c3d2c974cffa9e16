#include "cpu/cache_read.h"

#include <algorithm>

#include "api/backend.h"
#include "api/cache_checks.h"
#include "api/checks.h"
#include "fold/launch.h"

namespace fold {
namespace {

using api::require_size;
using api::require_tensor;

void check_rows(const char* name, const TensorView& rows, const CacheLayout& layout) {
  require_tensor(name, rows, 3, api::kFloatTypes);
  require_size(name, rows, 1, layout.n_kv_heads, "n_kv_heads");
  require_size(name, rows, 2, layout.head_dim, "head_dim");
  api::require_last_contiguous(name, rows);
  api::require_no_broadcast(name, rows);
}

void read_on_host(const plan::CacheReadParams& p) {
  const auto table = [&](int64_t b) { return p.block_table + b * p.block_table_stride; };
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t first = p.cu_seqlens[b], end = p.cu_seqlens[b + 1];
    if (first < 0 || end < first || end > p.rows) {
      api::fail_value("cu_seqlens[" + std::to_string(b + 1) + "]", std::to_string(end),
                      "not decreasing, 0.." + std::to_string(p.rows));
    }
    api::require_pages(p.cache, b, table(b), p.max_pages, end - first);
  }
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t first = p.cu_seqlens[b];
    const auto rows = [first](void* data, DType dtype, int64_t stride_t, int64_t stride_h) {
      return cpu::RowsOut{static_cast<char*>(data) + first * stride_t * dtype_size(dtype), dtype, stride_t, stride_h};
    };
    cpu::cache_read(p.cache, table(b), p.cu_seqlens[b + 1] - first, rows(p.k, p.k_dtype, p.k_stride_t, p.k_stride_h),
                    rows(p.v, p.v_dtype, p.v_stride_t, p.v_stride_h));
  }
}

}  // namespace

void cache_read(const CacheStorage& cache_given, const TensorView& block_table_given,
                const TensorView& cu_seqlens_given, const TensorView& k_given, const TensorView& v_given,
                const Launch& launch) {
  CacheStorage cache = cache_given;
  TensorView block_table = block_table_given, cu_seqlens = cu_seqlens_given, k = k_given, v = v_given;
  const api::Place place = api::take_place(
      {{"storage", &cache.storage}, {"block_table", &block_table}, {"cu_seqlens", &cu_seqlens}, {"k", &k}, {"v", &v}});
  const plan::CacheView view = api::cache_view(cache);
  require_tensor("block_table", block_table, 2, {DType::i32});
  api::require_last_contiguous("block_table", block_table);
  const int64_t batch = block_table.shape[0];
  require_tensor("cu_seqlens", cu_seqlens, 1, {DType::i32});
  require_size("cu_seqlens", cu_seqlens, 0, batch + 1, "requests + 1");
  api::require_contiguous("cu_seqlens", cu_seqlens);
  check_rows("k", k, cache.layout);
  check_rows("v", v, cache.layout);
  const plan::CacheReadParams params{.cache = view,
                                     .block_table = block_table.as<const int32_t>(),
                                     .block_table_stride = block_table.strides[0],
                                     .max_pages = block_table.shape[1],
                                     .batch = batch,
                                     .cu_seqlens = cu_seqlens.as<const int32_t>(),
                                     .k = k.data,
                                     .v = v.data,
                                     .k_dtype = k.dtype,
                                     .v_dtype = v.dtype,
                                     .k_stride_t = k.strides[0],
                                     .k_stride_h = k.strides[1],
                                     .v_stride_t = v.strides[0],
                                     .v_stride_h = v.strides[1],
                                     .rows = std::min(k.shape[0], v.shape[0])};
  if (place.device == Device::cpu) return read_on_host(params);
  const plan::Backend& backend = api::cuda_backend(place);
  api::require_launched("cache_read, k " + api::shape_text(k) + ", block_table " + api::shape_text(block_table), place,
                        backend.cache_read(params, api::checked_launch(launch, place, 0)));
}

void cache_read(const CacheStorage& cache, const TensorView& block_table, const TensorView& cu_seqlens,
                const TensorView& k, const TensorView& v) {
  cache_read(cache, block_table, cu_seqlens, k, v, {});
}

}  // namespace fold
