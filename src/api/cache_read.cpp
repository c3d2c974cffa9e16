#include "cpu/cache_read.h"

#include <algorithm>

#include "api/cache_checks.h"
#include "api/checks.h"
#include "fold/cache_ops.h"

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

cpu::RowsOut rows_from(const TensorView& rows, int64_t first) {
  const int64_t offset = first * rows.strides[0] * dtype_size(rows.dtype);
  return {rows.as<char>() + offset, rows.dtype, rows.strides[0], rows.strides[1]};
}

}  // namespace

void cache_read(const CacheStorage& cache, const TensorView& block_table, const TensorView& cu_seqlens,
                const TensorView& k, const TensorView& v) {
  const plan::CacheView view = api::cache_view(cache);
  require_tensor("block_table", block_table, 2, {DType::i32});
  api::require_last_contiguous("block_table", block_table);
  const int64_t batch = block_table.shape[0];
  require_tensor("cu_seqlens", cu_seqlens, 1, {DType::i32});
  require_size("cu_seqlens", cu_seqlens, 0, batch + 1, "requests + 1");
  api::require_contiguous("cu_seqlens", cu_seqlens);
  check_rows("k", k, cache.layout);
  check_rows("v", v, cache.layout);
  const auto* starts = cu_seqlens.as<const int32_t>();
  const auto table = [&](int64_t b) { return block_table.as<const int32_t>() + b * block_table.strides[0]; };
  const int64_t rows = std::min(k.shape[0], v.shape[0]);
  for (int64_t b = 0; b < batch; ++b) {
    if (starts[b] < 0 || starts[b + 1] < starts[b] || starts[b + 1] > rows) {
      api::fail_value("cu_seqlens[" + std::to_string(b + 1) + "]", std::to_string(starts[b + 1]),
                      "not decreasing, 0.." + std::to_string(rows));
    }
    api::require_pages(view, b, table(b), block_table.shape[1], starts[b + 1] - starts[b]);
  }
  for (int64_t b = 0; b < batch; ++b) {
    cpu::cache_read(view, table(b), starts[b + 1] - starts[b], rows_from(k, starts[b]), rows_from(v, starts[b]));
  }
}

}  // namespace fold
