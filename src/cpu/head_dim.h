#pragma once
#include <type_traits>

namespace fold::cpu {
namespace {

/// Calls f with the head dim as a constant. Included by one source per instruction set, so it has internal linkage.
template <typename F>
inline auto with_head_dim(int head_dim, F f) {
  if (head_dim == 64) return f(std::integral_constant<int, 64>{});
  if (head_dim == 128) return f(std::integral_constant<int, 128>{});
  return f(std::integral_constant<int, 256>{});
}

}  // namespace
}  // namespace fold::cpu
