#pragma once
#include "cpu/cache_kernels.h"
#include "cpu/convert.h"
#include "numerics/block.h"

// Rows and block summaries for the instruction set that the including source is compiled for: the loops of
// src/numerics with the head dim known to the compiler.
namespace fold::cpu {
namespace {

template <int D>
uint16_t write_row_of(const void* data, DType dtype, int64_t offset, const RowOut& out) {
  alignas(64) float x[D];
  alignas(64) int8_t a[D], b[D];
  load_row(data, dtype, offset, D, x);
  numerics::rotate(x, D);
  const uint16_t scale = numerics::split_row(x, D, a, b);
  for (int i = 0; i < D / 2; ++i) out.h[i] = numerics::pack_h(a[2 * i], a[2 * i + 1]);
  if (out.l != nullptr) {
    for (int i = 0; i < D / 2; ++i) out.l[i] = numerics::pack_l(a[2 * i], a[2 * i + 1]);
  }
  if (out.b != nullptr) {
    for (int i = 0; i < D; ++i) out.b[i] = b[i];
  }
  return scale;
}

/// Calls f with the head dim as a constant.
template <typename F>
inline auto with_head_dim(int head_dim, F f) {
  if (head_dim == 64) return f(std::integral_constant<int, 64>{});
  if (head_dim == 128) return f(std::integral_constant<int, 128>{});
  return f(std::integral_constant<int, 256>{});
}

uint16_t write_row(const void* data, DType dtype, int64_t offset, int head_dim, const RowOut& out) {
  return with_head_dim(head_dim, [&](auto d) { return write_row_of<d()>(data, dtype, offset, out); });
}

void block_ubar(const uint8_t* k_h, int head_dim, uint8_t* ubar) {
  with_head_dim(head_dim, [&](auto d) { numerics::block_ubar(k_h, d(), ubar); });
}

uint16_t block_mean(const numerics::PlaneRow& v, const uint16_t* v_scale, int head_dim, int8_t* mean) {
  return with_head_dim(head_dim, [&](auto d) { return numerics::block_mean(v, v_scale, d(), mean); });
}

constexpr CacheKernels kCacheKernels = {write_row, block_ubar, block_mean};

}  // namespace
}  // namespace fold::cpu
