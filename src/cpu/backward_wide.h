#pragma once
#include "cpu/forward_wide.h"

namespace fold::cpu {

/// A wide row of the backward: its reference and Delta, recomputed in fp64 from q, k, v and dout. (A log-sum-exp of the
/// forward is too coarse in fp32 where logits are huge.)
struct WideRow {
  WideReference reference;
  double delta;
};

/// Writes dQ of one row.
WideRow wide_backward_row(const plan::BackwardParams& p, const plan::Sequence& s, int64_t head, int64_t row);

/// Adds one row's share of dV and of dK / softmax_scale for `keys`. dk, dv: (keys.last - keys.first, ld).
void add_wide_row(const plan::BackwardParams& p, const plan::Sequence& s, int64_t head, int64_t row,
                  const WideRow& wide, plan::KeyRange keys, int64_t ld, float* dk, float* dv);

}  // namespace fold::cpu
