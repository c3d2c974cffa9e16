#include "cpu/decode.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "cpu/convert.h"
#include "cpu/decode_reference.h"
#include "numerics/reference.h"
#include "plan/decode_plan.h"

namespace fold::cpu {
namespace {

using plan::DecodeParams;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

bool row_is_nan(const Group& g, int r) { return g.poisoned[r] || !numerics::is_finite(g.z[r]); }

/// Section 8: a row's fp32 output (D,) and natural-log LSE from its sums. NaN if the reference did not hold.
float finish_row(const int64_t* num, int64_t den, float z, int e_exponent, int64_t head_dim, float* out) {
  if (!numerics::reference_holds(den)) {
    std::fill_n(out, head_dim, kNan);
    return kNan;
  }
  for (int64_t c = 0; c < head_dim; ++c) out[c] = numerics::finish_channel(num[c], den, e_exponent);
  numerics::rotate(out, static_cast<int>(head_dim));
  return numerics::finish_lse(z, den);
}

/// The row's denominator with its sink (docs/numerics.md, section 8).
int64_t total(const Group& g, int r) { return g.den[r] + sink_weight(g.sink(r), g.z[r]); }

void merge(Group& g, const RangeSums& sums) {
  for (size_t i = 0; i < g.num.size(); ++i) {
    g.num[i] = static_cast<int64_t>(static_cast<uint64_t>(g.num[i]) + static_cast<uint64_t>(sums.num[i]));
  }
  for (int r = 0; r < g.rows; ++r) {
    g.den[r] += sums.den[r];
    g.dropped[r] += sums.dropped[r];
  }
  g.values_read += sums.values_read;
  g.bytes += sums.bytes;
}

/// Adds up the groups' visible keys within [key_begin, key_end), `splits` ranges a group, in parallel.
void sum_groups(const std::vector<Group*>& groups, int64_t splits, const DecodeKernels& kernels) {
  std::vector<std::mutex> locks(groups.size());
  for_ranges(groups, splits, [&](int64_t i, int64_t begin, int64_t end) {
    RangeSums sums;
    kernels.sum_range(*groups[i], begin, end, sums);
    const std::lock_guard<std::mutex> lock(locks[i]);
    merge(*groups[i], sums);
  });
}

int64_t most_tiles(const DecodeParams& p) {
  int64_t longest = 0;
  for (int64_t b = 0; b < p.batch; ++b) longest = std::max<int64_t>(longest, p.seqlens[b]);
  return (longest + kTile - 1) / kTile;
}

plan::DecodePlan plan_for(const DecodeParams& p, int64_t groups) {
  return plan::plan_decode(groups, most_tiles(p), omp_get_max_threads(), p.splits);
}

/// Section 8: rows whose reference did not hold run again, the second time with every gate open.
void recompute(const std::vector<Group*>& groups, const DecodeParams& p, const DecodeKernels& kernels) {
  for (int attempt = 0; attempt < 2; ++attempt) {
    std::vector<Group*> again;
    std::vector<Rows> redo;
    for (Group* g : groups) {
      Rows rows;
      for (int r = 0; r < g->rows; ++r) rows[r] = !row_is_nan(*g, r) && !numerics::reference_holds(total(*g, r));
      if (rows.none()) continue;
      again.push_back(g);
      redo.push_back(rows);
    }
    if (again.empty()) return;
    const int64_t splits = plan_for(p, static_cast<int64_t>(again.size())).splits;
    if (attempt == 0) exact_references(again, redo, splits, kernels);
    for (size_t i = 0; i < again.size(); ++i) {
      for (int r = 0; r < again[i]->rows; ++r) {
        again[i]->recomputed[r] |= redo[i][r];
        if (attempt > 0) again[i]->gates[r] = numerics::kOpenGates;
      }
      clear_sums(*again[i]);
    }
    sum_groups(again, splits, kernels);
  }
}

/// Writes the results of one group; `seen` is false where it sees no key.
void write_group(const Group& g, bool seen) {
  const DecodeParams& p = *g.params;
  const int64_t token = g.batch * p.tokens + g.token;
  if (p.bytes_read != nullptr) p.bytes_read[token * (p.heads / g.rows) + g.kv_head] = seen ? g.bytes : 0;
  for (int r = 0; r < g.rows; ++r) {
    const int64_t head = g.kv_head * g.rows + r, at = token * p.heads + head;
    const bool nan = seen && row_is_nan(g, r);
    if (p.numerator != nullptr) {
      const bool sums = seen && !nan;
      for (int c = 0; c < g.head_dim; ++c)
        p.numerator[at * g.head_dim + c] = sums ? g.num[static_cast<size_t>(r) * g.head_dim + c] : 0;
      p.denominator[at] = sums ? g.den[r] : 0;
      p.grid[2 * at] = nan ? kNan : seen ? g.z[r] : -kInf;
      p.grid[2 * at + 1] = nan ? kNan : seen ? std::ldexp(1.0f, g.e_exponent) : 0.0f;
      continue;
    }
    const int64_t den = seen && !nan ? total(g, r) : 0;
    float row[numerics::kMaxHeadDim] = {};
    const float lse =
        seen ? finish_row(&g.num[static_cast<size_t>(r) * g.head_dim], den, g.z[r], g.e_exponent, g.head_dim, row)
             : -kInf;
    const bool holds = seen && numerics::reference_holds(den);
    store_row(row, g.head_dim, p.out, p.out_dtype,
              g.batch * p.out_stride_b + g.token * p.out_stride_t + head * p.out_stride_h);
    if (p.lse != nullptr) p.lse[(g.batch * p.heads + head) * p.tokens + g.token] = lse;
    const double visible = seen ? static_cast<double>(g.visible()) : 1.0;
    if (p.kept_fraction != nullptr)
      p.kept_fraction[at] = seen ? static_cast<float>(static_cast<double>(g.values_read) / visible) : 0;
    if (p.dropped_mass != nullptr) {
      p.dropped_mass[at] = holds  ? static_cast<float>(static_cast<double>(g.dropped[r]) / static_cast<double>(den))
                           : seen ? kNan
                                  : 0;
    }
    if (p.recomputed != nullptr) p.recomputed[at] = seen && g.recomputed[r];
  }
}

}  // namespace

void decode(const DecodeParams& p) {
  const DecodeKernels kernels = decode_kernels();
  const int64_t kv_heads = p.cache.layout.n_kv_heads;
  const int64_t count = p.batch * p.tokens * kv_heads;
  const plan::DecodePlan plan = plan_for(p, count);
  std::vector<Group> groups(static_cast<size_t>(std::min(plan.wave, count)));
  for (int64_t start = 0; start < count; start += plan.wave) {
    const int64_t size = std::min(plan.wave, count - start);
    std::vector<char> seen(static_cast<size_t>(size));
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < size; ++i) {
      const int64_t index = start + i;
      Group& g = groups[i];
      seen[i] = prepare_group(g, p, index / (p.tokens * kv_heads), index / kv_heads % p.tokens, index % kv_heads);
      if (seen[i]) sample_reference(g, kernels);
    }
    std::vector<Group*> live;
    for (int64_t i = 0; i < size; ++i) {
      if (seen[i]) live.push_back(&groups[i]);
    }
    sum_groups(live, plan.splits, kernels);
    if (p.numerator == nullptr) recompute(live, p, kernels);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < size; ++i) write_group(groups[i], seen[i] != 0);
  }
}

void finish(const FinishParams& p) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < p.batch * p.tokens * p.heads; ++i) {
    const int64_t b = i / (p.tokens * p.heads), t = i / p.heads % p.tokens, h = i % p.heads;
    const float z = p.grid[2 * i], e = p.grid[2 * i + 1];
    const bool empty = std::isinf(z) && e == 0;  // a row that sees no key
    float row[numerics::kMaxHeadDim] = {};
    float lse = -kInf;
    int64_t den = 0;
    if (!empty) {
      const float sink = p.sinks != nullptr ? numerics::mul(p.sinks[h], numerics::kLog2E) : -kInf;
      den = std::isfinite(z) ? p.denominator[i] + sink_weight(sink, z) : 0;
      lse = finish_row(p.numerator + i * p.head_dim, den, z, std::isfinite(e) ? std::ilogb(e) : 0, p.head_dim, row);
    }
    store_row(row, p.head_dim, p.out, p.out_dtype, b * p.out_stride_b + t * p.out_stride_t + h * p.out_stride_h);
    if (p.lse != nullptr) p.lse[(b * p.heads + h) * p.tokens + t] = lse;
    if (p.valid != nullptr) p.valid[i] = empty || numerics::reference_holds(den);
  }
}

}  // namespace fold::cpu
