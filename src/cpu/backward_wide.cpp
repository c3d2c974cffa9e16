#include "cpu/backward_wide.h"

#include <algorithm>
#include <cmath>

#include "cpu/attention_rows.h"

namespace fold::cpu {
namespace {

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

/// One query row against its keys.
class WideScorer {
 public:
  WideScorer(const plan::BackwardParams& params, const plan::Sequence& s, int64_t query_head, int64_t row)
      : p(params.forward), sequence(s), head(query_head) {
    to_double(row_address(p.q, p.dtype, s, s.q_begin, row, head), p.dtype, p.head_dim, q);
    to_double(row_address(params.dout, p.dtype, s, s.q_begin, row, head), p.dtype, p.head_dim, dout);
  }

  /// Loads key and value j.
  void load(int64_t j) {
    const int64_t kv_head = head / (p.heads / p.kv_heads);
    to_double(row_address(p.k, p.dtype, sequence, sequence.k_begin, j, kv_head), p.dtype, p.head_dim, k);
    to_double(row_address(p.v, p.dtype, sequence, sequence.k_begin, j, kv_head), p.dtype, p.head_dim, v);
  }
  double probability(const WideReference& reference) const {
    return std::exp(dot(q, k, p.head_dim) * p.softmax_scale - reference.max - reference.log_sum);
  }
  double dprobability() const { return dot(dout, v, p.head_dim); }

  const plan::ForwardParams& p;
  const plan::Sequence& sequence;
  const int64_t head;
  double q[256], dout[256], k[256], v[256];
};

}  // namespace

WideRow wide_backward_row(const plan::BackwardParams& p, const plan::Sequence& s, int64_t head, int64_t row) {
  const plan::ForwardParams& f = p.forward;
  const plan::KeyRange keys = visible_keys(f, s, row);
  WideScorer x(p, s, head, row);
  double out[256], dq[256] = {};
  WideRow wide;
  wide.reference = wide_softmax(f, s, head, keys, x.q, out);
  wide.delta = dot(x.dout, out, f.head_dim);
  const bool no_softmax = std::isnan(wide.reference.max);  // then every weight, and all of dq, is NaN
  if (no_softmax) std::fill_n(dq, f.head_dim, wide.delta);
  for (int64_t j = keys.first; j < keys.last && !no_softmax; ++j) {
    x.load(j);
    const double ds = x.probability(wide.reference) * (x.dprobability() - wide.delta);
    for (int64_t d = 0; d < f.head_dim; ++d) dq[d] += ds * x.k[d];
  }
  void* dst = row_address(p.dq, p.grad_dtype, s, s.q_begin, row, head);
  for (int64_t d = 0; d < f.head_dim; ++d) store_element(dst, p.grad_dtype, d, dq[d] * f.softmax_scale);
  return wide;
}

void add_wide_row(const plan::BackwardParams& p, const plan::Sequence& s, int64_t head, int64_t row,
                  const WideRow& wide, plan::KeyRange keys, int64_t ld, float* dk, float* dv) {
  if (std::isnan(wide.reference.max)) {
    for (int64_t j = 0; j < keys.last - keys.first; ++j) {
      std::fill_n(dk + j * ld, p.forward.head_dim, NAN);
      std::fill_n(dv + j * ld, p.forward.head_dim, NAN);
    }
    return;
  }
  WideScorer x(p, s, head, row);
  for (int64_t j = keys.first; j < keys.last; ++j) {
    x.load(j);
    const double probability = x.probability(wide.reference);
    const double ds = probability * (x.dprobability() - wide.delta);
    float *dk_row = dk + (j - keys.first) * ld, *dv_row = dv + (j - keys.first) * ld;
    for (int64_t d = 0; d < p.forward.head_dim; ++d) {
      dk_row[d] = static_cast<float>(dk_row[d] + ds * x.q[d]);
      dv_row[d] = static_cast<float>(dv_row[d] + probability * x.dout[d]);
    }
  }
}

}  // namespace fold::cpu
