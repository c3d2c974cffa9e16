#pragma once
#include "cpu/cache_kernels.h"
#include "cpu/convert.h"
#include "cpu/head_dim.h"
#include "cpu/tail_solve.h"
#include "cpu/tail_sums.h"
#include "numerics/block.h"

// Rows, block summaries and fits for the instruction set that the including source is compiled for: the loops of
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

uint16_t write_row(const void* data, DType dtype, int64_t offset, int head_dim, const RowOut& out) {
  return with_head_dim(head_dim, [&](auto d) { return write_row_of<d()>(data, dtype, offset, out); });
}

void block_ubar(const uint8_t* k_h, int head_dim, uint8_t* ubar) {
  with_head_dim(head_dim, [&](auto d) { numerics::block_ubar(k_h, d(), ubar); });
}

uint16_t block_mean(const numerics::PlaneRow& v, const uint16_t* v_scale, int head_dim, int8_t* mean) {
  return with_head_dim(head_dim, [&](auto d) { return numerics::block_mean(v, v_scale, d(), mean); });
}

void pack_block(const uint8_t* k_h, const numerics::PlaneRow& v, const uint16_t* v_scale, int e_exponent, int head_dim,
                int half, const FitBuffers& buffers) {
  with_head_dim(head_dim, [&](auto d) { pack_block_of<d()>(k_h, v, v_scale, e_exponent, half, buffers); });
}

template <typename Ops>
void add_chunk(int head_dim, const FitBuffers& buffers) {
  with_head_dim(head_dim, [&](auto d) { add_chunk_of<Ops, d()>(buffers); });
}

template <typename Ops>
void solve_fit(int head_dim, int e_exponent, const FitBuffers& buffers, const FitOut& out) {
  with_head_dim(head_dim, [&](auto d) { solve_fit_of<Ops::kBytes, d()>(e_exponent, buffers, out); });
}

/// Ops: 32-bit lanes of kBytes wide vectors.
template <typename Ops>
constexpr CacheKernels kCacheKernels = {write_row, block_ubar, block_mean, pack_block, add_chunk<Ops>, solve_fit<Ops>};

}  // namespace
}  // namespace fold::cpu
