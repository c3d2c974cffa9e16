#pragma once
#include "cpu/cache_kernels.h"
#include "numerics/block.h"
#include "numerics/tail.h"

// The integer sums behind a fit (docs/numerics.md, section 9), for the instruction set that the including source is
// compiled for.
//
// Both sums share their left operand: A = sum_j (64 u_j - usum) u_j^T, because sum_j usum u_j^T = usum usum^T.
// Range: over the 64 keys of a block sum_j |64 u_j - usum| <= 64 * 480 (half of the codes 0, half 15), and
// |y| <= 127 * 256 + 128, so the products of a chunk's two blocks add up to less than 2 * 30720 * 32640 < 2^31.
namespace fold::cpu {
namespace {

inline uint32_t word(int low, int high) {
  return static_cast<uint32_t>(low & 0xFFFF) | static_cast<uint32_t>(high) << 16;
}

/// Words of two rows of D channels. panels: (D / kPanel, kPairs, kPanel)
template <int D>
inline void store_words(const int* low, const int* high, int pair, uint32_t* panels) {
  for (int base = 0; base < D; base += kPanel) {
    uint32_t* out = panels + (base / kPanel * kPairs + pair) * kPanel;
    for (int i = 0; i < kPanel; ++i) out[i] = word(low[base + i], high[base + i]);
  }
}

template <int D>
void pack_block_of(const uint8_t* k_h, const numerics::PlaneRow& v, const uint16_t* v_scale, int e_exponent, int half,
                   const FitBuffers& buffers) {
  using numerics::kTile;
  int u[2][D], y[2][D], usum[D] = {};
  for (int j = 0; j < kTile; ++j) {
    numerics::codes(k_h + j * (D / 2), D, u[0]);
    for (int i = 0; i < D; ++i) usum[i] += u[0][i];
  }
  const float inverse = numerics::pow2(-e_exponent);
  for (int j = 0; j < kTile; j += 2) {
    const int pair = (half * kTile + j) / 2;
    for (int n = 0; n < 2; ++n) {
      numerics::codes(k_h + (j + n) * (D / 2), D, u[n]);
      numerics::readings(numerics::plane_row(v, j + n, D), D, y[n]);
      const float unit = numerics::fit_weight(numerics::from_bf16(v_scale[numerics::scale_slot(j + n)]), inverse);
      for (int i = 0; i < D; ++i) {
        y[n][i] = static_cast<int>(numerics::rne(numerics::mul(static_cast<float>(y[n][i]), unit)));
      }
    }
    store_words<D>(y[0], y[1], pair, buffers.right);
    store_words<D>(u[0], u[1], pair, buffers.right + D * kPairs);
    for (int n = 0; n < 2; ++n) {
      for (int i = 0; i < D; ++i) u[n][i] = kTile * u[n][i] - usum[i];
    }
    store_words<D>(u[0], u[1], pair, buffers.centred);
  }
}

/// sums (kRows, kPanel), row stride 2 D, += centred^T right for kRows channels and one panel.
template <typename Ops, int D>
inline void add_tile(const uint32_t* centred, const uint32_t* right, int64_t* sums) {
  using V = typename Ops::V;
  constexpr int kRows = Ops::kRows, kVectors = Ops::kVectors, kColumns = kVectors * Ops::kLanes;
  for (int j = 0; j < kPanel; j += kColumns) {
    V acc[kRows][kVectors];
    for (int i = 0; i < kRows; ++i) {
      for (int n = 0; n < kVectors; ++n) acc[i][n] = Ops::zero();
    }
    for (int pair = 0; pair < kPairs; ++pair) {
      V column[kVectors];
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) column[n] = Ops::load(right + pair * kPanel + j + n * Ops::kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const V row = Ops::broadcast(centred[pair * kPanel + i]);
#pragma GCC unroll 8
        for (int n = 0; n < kVectors; ++n) acc[i][n] = Ops::multiply_add(acc[i][n], row, column[n]);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      alignas(64) int32_t lanes[kColumns];
      for (int n = 0; n < kVectors; ++n) Ops::store(lanes + n * Ops::kLanes, acc[i][n]);
      for (int n = 0; n < kColumns; ++n) sums[i * 2 * D + j + n] += lanes[n];
    }
  }
}

template <typename Ops, int D>
void add_chunk_of(const FitBuffers& buffers) {
  for (int panel = 0; panel < 2 * D / kPanel; ++panel) {
    const int first = panel * kPanel < D ? 0 : panel * kPanel - D;  // of A only what lies on or below the diagonal
    for (int i = first; i < D; i += Ops::kRows) {
      add_tile<Ops, D>(buffers.centred + i / kPanel * kPairs * kPanel + i % kPanel,
                       buffers.right + panel * kPairs * kPanel, buffers.sums + i * 2 * D + panel * kPanel);
    }
  }
}

}  // namespace
}  // namespace fold::cpu
