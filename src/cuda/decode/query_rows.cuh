#pragma once
#include "cuda/decode/group_state.cuh"
#include "cuda/decode/key_lanes.cuh"

// What a group's rows bring to the products and decisions about keys, as warps that hold sixteen keys want it.
namespace fold::cuda {

struct alignas(16) QueryRow {
  float unit_0, neg_z, margin, k_l, k_b, v_h, v_l, v_b;
  int first_sum;  // of twice the product of codes that is D0, beside kRoundMagic
  float e_q, unit_1, margin_16, per_e;
  int sum_128, sum_255;
};

__device__ inline QueryRow query_row(const RowState& state) {
  return {.unit_0 = unit_of_level(state.e_q, 0),
          .neg_z = -state.z,
          .margin = state.margin,
          .k_l = state.gates.k_l,
          .k_b = state.gates.k_b,
          .v_h = state.gates.v_h,
          .v_l = state.gates.v_l,
          .v_b = state.gates.v_b,
          .first_sum = kRoundMagic - 241 * state.sum_a,
          .e_q = state.e_q,
          .unit_1 = unit_of_level(state.e_q, 1),
          .margin_16 = numerics::mul(state.margin, 0x1p-4f),
          .per_e = numerics::pow2(-state.e_exponent),
          .sum_128 = 128 * state.sum,
          .sum_255 = 255 * state.sum_a};
}

/// The lane's words of a query row's fragment. Fragment 0, level 0: of even channels, then of odd ones; even words in
/// even columns. Then D / 64 of level 1, pairs of even and odd channels, and as many of level 2.
template <int D>
__device__ uint4 fragment_of(const GroupState& g, int row, int fragment, int lane) {
  constexpr int kPairs = D / 64;
  const int c = lane % 4;
  const bool odd_column = lane / 4 % 2 != 0;
  const bool whole = fragment > kPairs;
  const int pair = fragment == 0 ? 0 : (fragment - 1) % kPairs;
  const int8_t* const plane = whole ? (odd_column ? g.b : g.a) : fragment > 0 && odd_column ? g.b_split : g.a_split;
  const auto* const words = reinterpret_cast<const uint32_t*>(plane + row * D);
  const int at = c * (D / 32) + 2 * pair;
  if (whole) return {words[2 * at], words[2 * at + 1], words[2 * at + 2], words[2 * at + 3]};
  if (fragment > 0) return {words[at], words[D / 8 + at], words[at + 1], words[D / 8 + at + 1]};
  const int first = at + odd_column, second = D == 128 ? first + 2 : first;
  return {words[first], words[second], words[D / 8 + first], words[D / 8 + second]};
}

}  // namespace fold::cuda
