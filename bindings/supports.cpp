#include "fold/supports.h"

#include <string>
#include <utility>

#include "api/checks.h"
#include "export.h"

namespace fold::binding {
namespace {

using OptionalInt = tvm::ffi::Optional<int64_t>;
using OptionalString = tvm::ffi::Optional<tvm::ffi::String>;

template <typename T>
std::optional<T> number(const OptionalInt& value) {
  if (!value.has_value()) return std::nullopt;
  return static_cast<T>(value.value());
}

DType dtype_named(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(DType::boolean); ++i) {
    if (name == api::dtype_name(static_cast<DType>(i))) return static_cast<DType>(i);
  }
  api::fail_type("dtype", name, "supported: float32, bfloat16, float16");
}

Device device_named(const std::string& name) {
  if (name == "cpu") return Device::cpu;
  if (name == "cuda") return Device::cuda;
  api::fail_type("device", name, "supported: cpu, cuda");
}

/// None, or why not.
OptionalString why_not(tvm::ffi::String operation, OptionalInt n_heads, OptionalInt n_kv_heads, OptionalInt head_dim,
                       OptionalInt page_size, OptionalInt k_bits, OptionalInt v_bits, OptionalInt tree_nodes,
                       OptionalString dtype, OptionalString device, int64_t device_index) {
  Operation which;
  if (operation == "attention") {
    which = Operation::attention;
  } else if (operation == "attention_forward") {
    which = Operation::attention_forward;
  } else if (operation == "cache") {
    which = Operation::cache;
  } else {
    api::fail_value("op", std::string(operation), "allowed: attention, attention_forward, cache");
  }
  SupportQuery query;
  query.n_heads = number<int64_t>(n_heads);
  query.n_kv_heads = number<int64_t>(n_kv_heads);
  query.head_dim = number<int64_t>(head_dim);
  query.page_size = number<int64_t>(page_size);
  query.k_bits = number<int>(k_bits);
  query.v_bits = number<int>(v_bits);
  query.tree_nodes = number<int64_t>(tree_nodes);
  try {
    if (dtype.has_value()) query.dtype = dtype_named(dtype.value());
    if (device.has_value()) query.device = device_named(device.value());
    query.device_index = static_cast<int>(device_index);
  } catch (const Error& e) {
    return tvm::ffi::String(e.what());
  }
  const std::optional<std::string> reason = unsupported(which, query);
  if (!reason) return std::nullopt;
  return tvm::ffi::String(*reason);
}

}  // namespace
}  // namespace fold::binding

FOLD_EXPORT(unsupported, fold::binding::why_not)
