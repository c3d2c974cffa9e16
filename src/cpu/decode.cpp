#include "cpu/decode.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>

#include "cpu/convert.h"
#include "cpu/decode_reference.h"
#include "cpu/parallel.h"
#include "numerics/partial_row.h"
#include "numerics/reference.h"
#include "plan/decode_plan.h"

namespace fold::cpu {
namespace {

using plan::DecodeParams;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

bool row_is_nan(const Group& g, int r) { return g.poisoned[r] || !numerics::is_finite(g.z[r]); }

/// Of a head, in log2 units; -inf without one.
float sink_of(const float* sinks, int64_t head) {
  return sinks == nullptr ? -kInf : numerics::mul(sinks[head], numerics::kLog2E);
}

/// Section 8: a row's fp32 output (D,) and natural-log LSE from its sums. NaN if they do not hold. sink: relative to z.
float finish_row(const int64_t* num, const numerics::RowMass& mass, float sink, float z, int e_exponent,
                 int64_t head_dim, float* out) {
  if (!numerics::sums_hold(mass) || std::isnan(sink)) {
    std::fill_n(out, head_dim, kNan);
    return kNan;
  }
  const double total = numerics::with_sink(mass.den, sink);
  for (int64_t c = 0; c < head_dim; ++c) out[c] = numerics::finish_channel(num[c], total, e_exponent);
  numerics::rotate(out, static_cast<int>(head_dim));
  return numerics::finish_lse(z, total, sink);
}

void merge(Group& g, const RangeSums& sums) {
  for (size_t i = 0; i < g.num.size(); ++i) {
    g.num[i] = static_cast<int64_t>(static_cast<uint64_t>(g.num[i]) + static_cast<uint64_t>(sums.num[i]));
  }
  for (int r = 0; r < g.rows; ++r) {
    g.den[r] += sums.den[r];
    g.mass[r] += sums.mass[r];
    g.dropped[r] += sums.dropped[r];
    g.values_read[r] += sums.values_read;
    g.peak[r] = std::max(g.peak[r], sums.peak[r]);
  }
  g.bytes += sums.bytes;
}

/// Keys that a token sees among [begin, end).
int64_t visible_within(const Group& g, int64_t begin, int64_t end) {
  int64_t keys = 0;
  for (int64_t tile = std::max(g.first, begin) / kTile; tile < g.tiles() && tile * kTile < end; ++tile)
    keys += std::popcount(g.visible_mask(tile));
  return keys;
}

/// Adds up the groups' visible keys within [key_begin, key_end), `splits` ranges a group, in parallel.
void sum_groups(const std::vector<Group*>& groups, int64_t splits, const DecodeKernels& kernels) {
  std::vector<std::mutex> locks(groups.size());
  const int64_t items = static_cast<int64_t>(groups.size()) * splits;
  parallel_for(items, [&](int64_t item) {
    Group& g = *groups[item / splits];
    const DecodeParams& p = *g.params;
    const int64_t first = std::max(g.first, p.key_begin) / kTile;
    const int64_t last = std::min(g.tiles(), p.key_end / kTile + (p.key_end % kTile != 0 ? 1 : 0));
    const int64_t split = item % splits, tiles = std::max<int64_t>(0, last - first);
    const int64_t begin = first + tiles * split / splits, end = first + tiles * (split + 1) / splits;
    if (begin >= end) return;
    RangeSums sums;
    kernels.sum_range(g, begin, end, sums);
    const std::lock_guard<std::mutex> lock(locks[item / splits]);
    merge(g, sums);
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

numerics::RowMass mass_of(const Group& g, int r) { return {g.den[r], g.mass[r], g.visible(), g.peak[r]}; }

/// Section 8: whether a row has to run again, and if so from which reference and E.
bool correct_row(Group& g, int r) {
  if (row_is_nan(g, r)) return false;
  const numerics::RowMass row = mass_of(g, r);
  if (!numerics::reference_holds(row.den, g.spread[r])) {
    g.z[r] = numerics::corrected_z(g.z[r], row);
  } else {
    const int bits = numerics::finer_bits(row, g.spread[r], g.e_exponent[r], g.shrunk[r]);
    if (bits == 0) return false;
    g.e_exponent[r] -= bits;
    g.shrunk[r] += bits;
  }
  g.recomputed[r] = true;
  return numerics::is_finite(g.z[r]);
}

/// Rows that are not done run again, as groups of their own.
void run_again(const std::vector<Group*>& groups, const DecodeParams& p, const DecodeKernels& kernels) {
  struct Part {
    Group* home;
    std::vector<int> rows;
    Group group;
  };
  for (int run = 1; run < numerics::kMaxRuns; ++run) {
    std::vector<Part> parts;
    for (Group* g : groups) {
      std::vector<int> rows;
      for (int r = 0; r < g->rows; ++r) {
        if (correct_row(*g, r)) rows.push_back(r);
      }
      if (!rows.empty()) parts.push_back({g, rows, select(*g, rows)});
    }
    if (parts.empty()) return;
    std::vector<Group*> again;
    for (Part& part : parts) again.push_back(&part.group);
    sum_groups(again, plan_for(p, static_cast<int64_t>(again.size())).splits, kernels);
    for (const Part& part : parts) put_back(part.group, part.rows, *part.home);
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
      p.denominator[3 * at] = sums ? g.den[r] : 0;
      p.denominator[3 * at + 1] = sums ? g.mass[r] : 0;
      p.denominator[3 * at + 2] = sums ? visible_within(g, p.key_begin, p.key_end) : 0;
      p.grid[3 * at] = nan ? kNan : seen ? g.z[r] : -kInf;
      p.grid[3 * at + 1] = nan ? kNan : seen ? std::ldexp(1.0f, g.e_exponent[r]) : 0.0f;
      p.grid[3 * at + 2] = nan ? kNan : seen ? g.spread[r] : 0.0f;
      continue;
    }
    const numerics::RowMass mass = seen && !nan ? mass_of(g, r) : numerics::RowMass{};
    const float sink = numerics::sub(sink_of(p.sinks, head), g.z[r]);
    float row[numerics::kMaxHeadDim] = {};
    const float lse = seen ? finish_row(&g.num[static_cast<size_t>(r) * g.head_dim], mass, sink, g.z[r],
                                        g.e_exponent[r], g.head_dim, row)
                           : -kInf;
    store_row(row, g.head_dim, p.out, p.out_dtype,
              g.batch * p.out_stride_b + g.token * p.out_stride_t + head * p.out_stride_h);
    if (p.lse != nullptr) p.lse[(g.batch * p.heads + head) * p.tokens + g.token] = lse;
    const double visible = seen ? static_cast<double>(g.visible()) : 1.0;
    if (p.kept_fraction != nullptr)
      p.kept_fraction[at] = seen ? static_cast<float>(static_cast<double>(g.values_read[r]) / visible) : 0;
    if (p.dropped_mass != nullptr) {
      const double dropped = static_cast<double>(g.dropped[r]) / numerics::with_sink(mass.den, sink);
      p.dropped_mass[at] = std::isnan(lse) ? kNan : seen ? static_cast<float>(dropped) : 0;
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
    parallel_for(size, [&](int64_t i) {
      const int64_t index = start + i;
      Group& g = groups[i];
      seen[i] =
          prepare_group(g, p, kernels, index / (p.tokens * kv_heads), index / kv_heads % p.tokens, index % kv_heads);
      if (seen[i]) sample_reference(g, kernels);
    });
    std::vector<Group*> live;
    for (int64_t i = 0; i < size; ++i) {
      if (seen[i]) live.push_back(&groups[i]);
    }
    sum_groups(live, plan.splits, kernels);
    if (p.numerator == nullptr) run_again(live, p, kernels);
    parallel_for(size, [&](int64_t i) { write_group(groups[i], seen[i] != 0); });
  }
}

void finish(const plan::FinishParams& p) {
  parallel_for(p.batch * p.tokens * p.heads, [&](int64_t i) {
    const int64_t b = i / (p.tokens * p.heads), t = i / p.heads % p.tokens, h = i % p.heads;
    const numerics::PartialRow partial = numerics::partial_row(p.grid + 3 * i, p.denominator + 3 * i);
    float row[numerics::kMaxHeadDim] = {};
    float lse = -kInf;
    if (!partial.empty) {
      const float z = p.grid[3 * i], sink = numerics::sub(sink_of(p.sinks, h), z);
      lse = finish_row(p.numerator + i * p.head_dim, partial.mass, sink, z, partial.e_exponent, p.head_dim, row);
    }
    store_row(row, p.head_dim, p.out, p.out_dtype, b * p.out_stride_b + t * p.out_stride_t + h * p.out_stride_h);
    if (p.lse != nullptr) p.lse[(b * p.heads + h) * p.tokens + t] = lse;
    if (p.valid != nullptr) p.valid[i] = partial.done;
  });
}

}  // namespace fold::cpu
