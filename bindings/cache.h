#pragma once
#include "fold/kv_cache.h"
#include "tensor.h"

namespace fold::binding {

using Ints = tvm::ffi::Array<int64_t>;

/// (n_kv_heads, head_dim, page_size, k_bits, v_bits, tail)
inline CacheLayout layout_of(const Ints& layout) {
  if (layout.size() != 6) throw Error(Error::Kind::value, "layout", std::to_string(layout.size()), "6 numbers");
  return {.n_kv_heads = layout[0],
          .head_dim = layout[1],
          .page_size = layout[2],
          .k_bits = static_cast<int>(layout[3]),
          .v_bits = static_cast<int>(layout[4]),
          .tail = layout[5] != 0};
}

inline CacheStorage storage_of(const Ints& layout, const Tensor& storage) {
  return {layout_of(layout), view(storage, "storage")};
}

}  // namespace fold::binding
