#include "fold/supports.h"

#include "api/attention_checks.h"
#include "api/backend.h"
#include "api/cache_checks.h"
#include "api/checks.h"

namespace fold {
namespace {

void check(Operation operation, const SupportQuery& query) {
  TensorView probe(nullptr, query.dtype.value_or(DType::bf16), {0});
  probe.device = query.device.value_or(Device::cpu);
  probe.device_index = query.device_index;
  const Device device = probe.device;
  if (device == Device::cuda) api::cuda_backend(api::take_place({{"q", &probe}}));
  api::require_tensor("q", probe, 1, operation == Operation::cache ? api::kFloatTypes : api::attention_types(device));
  const int64_t kv_heads = query.n_kv_heads.value_or(query.n_heads.value_or(1));
  const int64_t heads = query.n_heads.value_or(kv_heads);
  if (operation != Operation::cache) {
    api::require_attention_shape(heads, kv_heads, query.head_dim.value_or(64), device,
                                 operation == Operation::attention);
    return;
  }
  CacheLayout layout{.n_kv_heads = kv_heads, .head_dim = query.head_dim.value_or(64)};
  layout.page_size = query.page_size.value_or(layout.page_size);
  layout.k_bits = query.k_bits.value_or(layout.k_bits);
  layout.v_bits = query.v_bits.value_or(layout.v_bits);
  check_layout(layout);
  api::require_heads(heads, kv_heads);
  api::require_tree_nodes(query.tree_nodes.value_or(1));
}

}  // namespace

std::optional<std::string> unsupported(Operation operation, const SupportQuery& query) {
  try {
    check(operation, query);
  } catch (const Error& e) {
    return e.what();
  }
  return std::nullopt;
}

}  // namespace fold
