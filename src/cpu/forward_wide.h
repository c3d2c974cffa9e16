#pragma once
#include "plan/attention_plan.h"

// Rows whose magnitudes fp32 tiles cannot hold: logits beyond 2^14, values near the ends of fp32, infinities, NaN.
// They are computed one at a time in fp64 with IEEE semantics, from q, k and v alone.
namespace fold::cpu {

/// The reference of a row's softmax, natural log: P_j = exp(s_j - max - log_sum), and the same for the sink.
struct WideReference {
  double max, log_sum;
};

/// Scores one query row against its visible keys. q: (D,). out: (D,), the row's attention output.
WideReference wide_softmax(const plan::ForwardParams& p, const plan::Sequence& s, int64_t head, plan::KeyRange keys,
                           const double* q, double* out);

/// Writes out and lse of one row.
void wide_forward_row(const plan::ForwardParams& p, const plan::Sequence& s, int64_t head, int64_t row);

}  // namespace fold::cpu
