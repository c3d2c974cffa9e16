#include "cpu/forward_wide.h"

#include <algorithm>
#include <cmath>

#include "cpu/attention_rows.h"

namespace fold::cpu {

WideReference wide_softmax(const plan::ForwardParams& p, const plan::Sequence& s, int64_t head, plan::KeyRange keys,
                           const double* q, double* out) {
  const int64_t dim = p.head_dim, kv_head = head / (p.heads / p.kv_heads);
  double row[256];
  const auto logit = [&](int64_t key) {
    to_double(row_address(p.k, p.dtype, s, s.k_begin, key, kv_head), p.dtype, dim, row);
    double sum = 0.0;
    for (int64_t d = 0; d < dim; ++d) sum += q[d] * row[d];
    return sum * p.softmax_scale;
  };
  double max = p.sinks ? p.sinks[head] : -INFINITY;
  for (int64_t j = keys.first; j < keys.last; ++j) {
    const double t = logit(j);
    if (!(t <= max)) max = t;
    if (std::isnan(max)) {
      std::fill_n(out, dim, max);  // as every weight is NaN
      return {max, max};
    }
  }
  double sum = p.sinks ? std::exp(p.sinks[head] - max) : 0.0;
  for (int64_t d = 0; d < dim; ++d) out[d] = 0.0;
  for (int64_t j = keys.first; j < keys.last; ++j) {
    const double weight = std::exp(logit(j) - max);
    sum += weight;
    to_double(row_address(p.v, p.dtype, s, s.k_begin, j, kv_head), p.dtype, dim, row);
    for (int64_t d = 0; d < dim; ++d) out[d] += weight * row[d];
  }
  for (int64_t d = 0; d < dim; ++d) out[d] /= sum;
  return {max, std::log(sum)};
}

void wide_forward_row(const plan::ForwardParams& p, const plan::Sequence& s, int64_t head, int64_t row) {
  double q[256], out[256];
  to_double(row_address(p.q, p.dtype, s, s.q_begin, row, head), p.dtype, p.head_dim, q);
  const WideReference reference = wide_softmax(p, s, head, visible_keys(p, s, row), q, out);
  void* dst = row_address(p.out, p.dtype, s, s.q_begin, row, head);
  for (int64_t d = 0; d < p.head_dim; ++d) store_element(dst, p.dtype, d, out[d]);
  if (p.lse.data) {
    store_element(row_address(p.lse, DType::f32, s, s.q_begin, row, head), DType::f32, 0,
                  reference.max + reference.log_sum);
  }
}

}  // namespace fold::cpu
