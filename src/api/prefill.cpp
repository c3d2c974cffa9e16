#include <vector>

#include "api/cache_checks.h"
#include "api/checks.h"
#include "cpu/cache_read.h"
#include "fold/attention.h"
#include "fold/cache_ops.h"

namespace fold {
namespace {

using api::fail_value;
using api::require_size;
using api::require_tensor;

/// (n, HK, D) of one dtype, contiguous.
struct Rows {
  Rows(int64_t n, const CacheLayout& layout, DType type)
      : bytes(n * layout.n_kv_heads * layout.head_dim * dtype_size(type)),
        view(bytes.data(), type, {n, layout.n_kv_heads, layout.head_dim}) {}
  std::vector<uint8_t> bytes;
  TensorView view;
};

/// Copies rows first .. last-1 of `from` (strides free) to `to`, from row `at`.
void copy_rows(const TensorView& from, int64_t first, int64_t last, const TensorView& to, int64_t at) {
  const int64_t size = dtype_size(from.dtype), heads = from.shape[1], row_bytes = from.shape[2] * size;
  for (int64_t t = first; t < last; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const char* source = from.as<char>() + (t * from.strides[0] + h * from.strides[1]) * size;
      std::copy(source, source + row_bytes, to.as<char>() + ((at + t - first) * heads + h) * row_bytes);
    }
  }
}

void check_chunk(const CacheStorage& cache, const PrefillArgs& args) {
  require_tensor("q", args.q, 3, api::kFloatTypes);
  for (const auto& [name, rows] : {std::pair("k", args.k), std::pair("v", args.v)}) {
    require_tensor(name, rows, 3, {args.q.dtype});
    require_size(name, rows, 0, args.q.shape[0], "tokens of q");
    require_size(name, rows, 1, cache.layout.n_kv_heads, "the cache's n_kv_heads");
    require_size(name, rows, 2, cache.layout.head_dim, "the cache's head_dim");
    api::require_last_contiguous(name, rows);
  }
  require_tensor("seqlens", args.seqlens, 1, {DType::i32});
  api::require_contiguous("seqlens", args.seqlens);
  const int64_t batch = args.seqlens.shape[0];
  require_tensor("block_table", args.block_table, 2, {DType::i32});
  require_size("block_table", args.block_table, 0, batch, "requests of seqlens");
  api::require_last_contiguous("block_table", args.block_table);
  require_tensor("cu_seqlens", args.cu_seqlens, 1, {DType::i32});
  require_size("cu_seqlens", args.cu_seqlens, 0, batch + 1, "requests + 1");
  api::require_contiguous("cu_seqlens", args.cu_seqlens);
  const auto* starts = args.cu_seqlens.as<const int32_t>();
  for (int64_t b = 0; b < batch; ++b) {
    if (starts[0] != 0 || starts[b + 1] < starts[b] || starts[b + 1] > args.q.shape[0]) {
      fail_value("cu_seqlens[" + std::to_string(b + 1) + "]", std::to_string(starts[b + 1]),
                 "from 0, not decreasing, at most the tokens, " + std::to_string(args.q.shape[0]));
    }
  }
}

}  // namespace

void prefill_attention(const CacheStorage& cache, const PrefillArgs& args, const TensorView& out,
                       const TensorView& lse) {
  const plan::CacheView view = api::cache_view(cache);
  check_chunk(cache, args);
  const int64_t batch = args.seqlens.shape[0];
  const auto* lengths = args.seqlens.as<const int32_t>();
  const auto* starts = args.cu_seqlens.as<const int32_t>();
  const auto table = [&](int64_t b) { return args.block_table.as<const int32_t>() + b * args.block_table.strides[0]; };
  std::vector<int32_t> key_starts{0};
  int64_t keys = 0;
  for (int64_t b = 0; b < batch; ++b) {
    if (lengths[b] < 0) fail_value("seqlens[" + std::to_string(b) + "]", std::to_string(lengths[b]), "at least 0");
    api::require_pages(view, b, table(b), args.block_table.shape[1], lengths[b]);
    keys += lengths[b] + (starts[b + 1] - starts[b]);
    if (keys > INT32_MAX) fail_value("keys of the chunk's requests", std::to_string(keys), "below 2^31");
    key_starts.push_back(static_cast<int32_t>(keys));
  }
  AttentionOptions options;
  options.causal = true;
  options.window_left = args.window_left;
  options.sinks = args.sinks;
  options.cu_seqlens_q = args.cu_seqlens;
  options.cu_seqlens_k = TensorView(key_starts.data(), DType::i32, {batch + 1});
  if (args.softmax_scale != 0) options.softmax_scale = args.softmax_scale;
  if (keys == starts[batch]) return attention_forward(args.q, args.k, args.v, out, lse, options);

  Rows k(keys, cache.layout, args.q.dtype), v(keys, cache.layout, args.q.dtype);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t row = cache.layout.n_kv_heads * cache.layout.head_dim;
    const auto rows = [&](Rows& to) {
      return cpu::RowsOut{to.bytes.data() + key_starts[b] * row * dtype_size(args.q.dtype), args.q.dtype, row,
                          cache.layout.head_dim};
    };
    cpu::cache_read(view, table(b), lengths[b], rows(k), rows(v));
    copy_rows(args.k, starts[b], starts[b + 1], k.view, key_starts[b] + lengths[b]);
    copy_rows(args.v, starts[b], starts[b + 1], v.view, key_starts[b] + lengths[b]);
  }
  attention_forward(args.q, k.view, v.view, out, lse, options);
}

}  // namespace fold
