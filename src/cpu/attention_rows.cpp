#include "cpu/attention_rows.h"

#include <omp.h>

#include <cmath>
#include <cstring>
#include <deque>

#include "cpu/buffer.h"
#include "cpu/convert.h"
#include "cpu/parallel.h"
#include "numerics/int_grid.h"

namespace fold::cpu {
namespace {

using plan::KeyRange;
using plan::Sequence;

constexpr double kLog2E = 0x1.71547652b82fep+0;

/// Largest norms[j] over each row's visible keys. Both ends of the range only move forward, so a queue of keys with
/// falling norms yields every maximum in one walk.
void sliding_max(const plan::ForwardParams& p, const Sequence& s, const float* norms, float* out) {
  std::deque<int64_t> falling;
  int64_t next = 0;
  for (int64_t row = 0; row < s.q_len; ++row) {
    const KeyRange keys = visible_keys(p, s, row);
    for (; next < keys.last; ++next) {
      while (!falling.empty() && norms[falling.back()] <= norms[next]) falling.pop_back();
      falling.push_back(next);
    }
    while (!falling.empty() && falling.front() < keys.first) falling.pop_front();
    out[row] = keys.empty() || falling.empty() ? 0.0f : norms[falling.front()];
  }
}

}  // namespace

VisibleNorms visible_norms(const plan::ForwardParams& p, const std::vector<Sequence>& all, const TileKernels& kernels) {
  const int64_t padded = plan::padded_head_dim(p.head_dim);
  Buffer<float> k_norm(p.kv_heads * p.total_k), v_norm(p.kv_heads * p.total_k);
  const std::vector<plan::TileTask> tasks = plan::key_tiles(all, p.kv_heads);
  parallel_for(static_cast<int64_t>(tasks.size()), threads_for(tasks.size()), 4, [&](int64_t t) {
    const Sequence& s = all[static_cast<size_t>(tasks[t].sequence)];
    alignas(64) float row[256];
    const int64_t first = tasks[t].tile * plan::kKeyTile, last = std::min(first + plan::kKeyTile, s.k_len);
    for (int64_t j = first; j < last; ++j) {
      const int64_t at = tasks[t].head * p.total_k + s.k_global + j;
      kernels.to_float(row_address(p.k, p.dtype, s, s.k_begin, j, tasks[t].head), p.dtype, p.head_dim, row);
      k_norm[at] = kernels.norm(row, padded);
      kernels.to_float(row_address(p.v, p.dtype, s, s.k_begin, j, tasks[t].head), p.dtype, p.head_dim, row);
      v_norm[at] = kernels.norm(row, padded);
    }
  });
  VisibleNorms norms;
  norms.k.resize(static_cast<size_t>(p.kv_heads * p.total_q));
  norms.v.resize(norms.k.size());
  const int threads = threads_for(all.size() * static_cast<size_t>(p.kv_heads));
  parallel_for(static_cast<int64_t>(all.size()) * p.kv_heads, threads, [&](int64_t i) {
    const Sequence& s = all[static_cast<size_t>(i / p.kv_heads)];
    const int64_t head = i % p.kv_heads;
    const int64_t from = head * p.total_k + s.k_global, to = head * p.total_q + s.q_global;
    sliding_max(p, s, k_norm.data() + from, norms.k.data() + to);
    sliding_max(p, s, v_norm.data() + from, norms.v.data() + to);
  });
  return norms;
}

int threads_for(size_t tasks) {
  const auto most = static_cast<size_t>(omp_get_max_threads());
  return static_cast<int>(tasks < 1 ? 1 : tasks < most ? tasks : most);
}

LogitUnit logit_unit(const plan::ForwardParams& p) {
  const auto scale = static_cast<float>(p.softmax_scale * kLog2E);
  return {scale, scale != 0.0f ? p.softmax_scale / static_cast<double>(scale) : 1.0 / kLog2E};
}

bool softmax_fits(float scale2, float q_norm, float k_norm, float v_norm, float sink) {
  // Comparisons are written so that a NaN fails them.
  const double logit = std::fabs(scale2) * static_cast<double>(q_norm) * k_norm;
  const bool sink_fits = sink == -INFINITY || std::fabs(sink * kLog2E) <= numerics::kMaxLogit;
  return logit <= numerics::kMaxLogit && sink_fits && numerics::zero_or_safe(v_norm);
}

void to_double(const void* src, DType dtype, int64_t n, double* dst) {
  float row[256];
  load_row(src, dtype, 0, n, row);
  for (int64_t i = 0; i < n; ++i) dst[i] = row[i];
}

void store_element(void* dst, DType dtype, int64_t i, double x) {
  const float rounded = static_cast<float>(x);
  store_row(&rounded, 1, dst, dtype, i);
}

void clear_row(void* dst, DType dtype, int64_t n) { std::memset(dst, 0, static_cast<size_t>(n * dtype_size(dtype))); }

}  // namespace fold::cpu
