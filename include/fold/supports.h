#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "fold/tensor.h"

namespace fold {

/// The operations that have limits of their own. `attention`: attention_forward and attention_backward.
/// `attention_forward`: that alone, and prefill_attention as far as attention is concerned. `cache`: every other
/// operation on a paged cache, decode included.
enum class Operation { attention, attention_forward, cache };

/// What one would like to do; what is left out does not matter.
struct SupportQuery {
  std::optional<int64_t> n_heads, n_kv_heads, head_dim;
  std::optional<DType> dtype;  ///< of q, k and v
  std::optional<Device> device;
  int device_index = 0;
  std::optional<int64_t> page_size, tree_nodes;  ///< of a cache
  std::optional<int> k_bits, v_bits;             ///< of a cache
};

/// Nothing, or why not, in the words of the error that the operation itself would throw: it is asked by running the
/// operation's own checks.
FOLD_API std::optional<std::string> unsupported(Operation operation, const SupportQuery& query);

inline bool supports(Operation operation, const SupportQuery& query) { return !unsupported(operation, query); }

}  // namespace fold
