#include "api/cache_checks.h"

#include <cmath>

#include "api/checks.h"

namespace fold::api {
namespace {

/// k or v: (tokens, HK, D).
void check_rows(const char* name, const TensorView& x, int64_t tokens, const CacheLayout& layout) {
  require_tensor(name, x, 3, kFloatTypes);
  require_size(name, x, 0, tokens, "tokens of k");
  require_size(name, x, 1, layout.n_kv_heads, "the cache's n_kv_heads");
  require_size(name, x, 2, layout.head_dim, "the cache's head_dim");
  require_last_contiguous(name, x);
}

}  // namespace

plan::CacheView cache_view(const CacheStorage& cache) {
  const PageSections sections = page_sections(cache.layout);
  require_tensor("storage", cache.storage, 2, {DType::u8});
  require_size("storage", cache.storage, 1, sections.bytes, "bytes of a page");
  require_last_contiguous("storage", cache.storage);
  const int64_t stride = cache.storage.shape[0] > 1 ? cache.storage.strides[0] : sections.bytes;
  if (std::abs(stride) < sections.bytes) {
    fail_value("storage.stride(0)", std::to_string(stride),
               "pages must not overlap: at least " + std::to_string(sections.bytes));
  }
  if (stride % 4 != 0 || reinterpret_cast<uintptr_t>(cache.storage.data) % 4 != 0) {
    fail_value("storage alignment", "page stride " + std::to_string(stride),
               "pages must start at multiples of 4 bytes");
  }
  return {.pages = cache.storage.as<uint8_t>(),
          .page_stride = stride,
          .num_pages = cache.storage.shape[0],
          .layout = cache.layout,
          .sections = sections};
}

void require_device_pages(const plan::CacheView& cache) {
  if (cache.page_stride % 16 == 0 && reinterpret_cast<uintptr_t>(cache.pages) % 16 == 0) return;
  fail_value("storage alignment", "page stride " + std::to_string(cache.page_stride),
             "on cuda pages must start at multiples of 16 bytes");
}

void set_rows(plan::CacheWriteParams& p, const TensorView& k, const TensorView& v, int64_t tokens) {
  check_rows("k", k, tokens, p.cache.layout);
  check_rows("v", v, tokens, p.cache.layout);
  p.k = k.data;
  p.v = v.data;
  p.k_dtype = k.dtype;
  p.v_dtype = v.dtype;
  p.k_stride_t = k.strides[0];
  p.k_stride_h = k.strides[1];
  p.v_stride_t = v.strides[0];
  p.v_stride_h = v.strides[1];
}

void require_heads(int64_t heads, int64_t kv_heads) {
  constexpr int64_t kMaxRows = 64;  // query heads a KV head may serve
  if (heads % kv_heads != 0 || heads / kv_heads < 1 || heads / kv_heads > kMaxRows) {
    fail_value("n_heads", std::to_string(heads),
               "a multiple of n_kv_heads=" + std::to_string(kv_heads) + ", 1 to 64 times it");
  }
}

float log2_scale(double softmax_scale, int64_t head_dim) {
  const double scale = softmax_scale != 0 ? softmax_scale : 1.0 / std::sqrt(static_cast<double>(head_dim));
  const float result = static_cast<float>(scale * 1.4426950408889634);
  if (!std::isfinite(result)) fail_value("softmax_scale", std::to_string(scale), "a finite number (float32)");
  return result;
}

void require_tree_nodes(int64_t nodes) {
  if (nodes < 0 || nodes > 64) fail_value("tree nodes", std::to_string(nodes), "at most 64");
}

void check_cu_seqlens(const int32_t* cu, int64_t batch, int64_t tokens) {
  const auto at = [](int64_t i) { return "cu_seqlens[" + std::to_string(i) + "]"; };
  if (cu[0] != 0) fail_value(at(0), std::to_string(cu[0]), "must be 0");
  for (int64_t i = 1; i <= batch; ++i) {
    if (cu[i] < cu[i - 1]) {
      fail_value(at(i), std::to_string(cu[i]), "must not be below " + at(i - 1) + "=" + std::to_string(cu[i - 1]));
    }
  }
  if (cu[batch] > tokens) {
    fail_value(at(batch), std::to_string(cu[batch]), "at most the tokens of k, " + std::to_string(tokens));
  }
}

void require_pages(const plan::CacheView& cache, int64_t request, const int32_t* table, int64_t max_pages, int64_t keys,
                   int64_t first_key) {
  const int64_t needed = (keys + cache.layout.page_size - 1) / cache.layout.page_size;
  const std::string where = "[" + std::to_string(request) + "]";
  if (needed > max_pages) {
    fail_value("keys of request " + std::to_string(request), std::to_string(keys),
               "block_table has room for " + std::to_string(max_pages * cache.layout.page_size));
  }
  for (int64_t i = first_key / cache.layout.page_size; i < needed; ++i) {
    if (table[i] < 0 || table[i] >= cache.num_pages) {
      fail_value("block_table" + where + "[" + std::to_string(i) + "]", std::to_string(table[i]),
                 "page ids 0.." + std::to_string(cache.num_pages - 1));
    }
  }
}

}  // namespace fold::api
