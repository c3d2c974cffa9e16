#include "cpu/decode_reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <mutex>

#include "numerics/reference.h"

namespace fold::cpu {
namespace {

using numerics::kNewest;
using numerics::kSamples;
using numerics::kTrimmed;

/// -inf never stands for a row's largest logit: an all -inf row counts as not finite through its Z.
float larger(float a, float b) { return b > a || std::isnan(b) ? b : a; }

/// Logits of the visible keys of a range at the finest level, 64 keys a call of f(logits (G, 64), count).
template <class F>
void walk_logits(const Group& g, const DecodeKernels& kernels, int64_t tile_begin, int64_t tile_end, F f) {
  const int level = g.params->cache.layout.k_bits == 16 ? 2 : g.params->cache.layout.k_bits == 8 ? 1 : 0;
  std::vector<float> logits(static_cast<size_t>(g.rows) * kTile);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    int64_t keys[kTile];
    int count = 0;
    for (uint64_t mask = g.visible_mask(tile); mask != 0; mask &= mask - 1)
      keys[count++] = tile * kTile + std::countr_zero(mask);
    if (count == 0) continue;
    kernels.score_keys(g, keys, count, level, logits.data());
    f(logits.data(), count);
  }
}

}  // namespace

int64_t sink_weight(float sink_log2, float reference) {
  return std::isinf(sink_log2) && sink_log2 < 0 ? 0 : numerics::fix(numerics::sub(sink_log2, reference));
}

void sample_reference(Group& g, const DecodeKernels& kernels) {
  const int64_t n = g.visible(), rest = n > numerics::kScoredKeys ? n - 1 - kNewest : 0;
  // The samples first, then what is counted once.
  std::vector<int64_t> keys;
  for (int i = 0; rest > 0 && i < kSamples; ++i) keys.push_back(g.physical(g.first + numerics::sample_key(i, rest)));
  const size_t sampled = keys.size();
  if (rest > 0) keys.push_back(g.physical(g.first));
  for (int64_t key = rest > 0 ? g.position - kNewest + 1 : g.first; key <= g.position; ++key)
    keys.push_back(g.physical(key));

  std::vector<float> logits(static_cast<size_t>(g.rows) * keys.size());  // (G, keys)
  std::vector<float> part(static_cast<size_t>(g.rows) * kTile);
  const int level = g.params->cache.layout.k_bits == 4 ? 0 : 1;
  for (size_t i = 0; i < keys.size(); i += kTile) {
    const int count = static_cast<int>(std::min<size_t>(kTile, keys.size() - i));
    kernels.score_keys(g, &keys[i], count, level, part.data());
    for (int r = 0; r < g.rows; ++r)
      std::copy_n(&part[static_cast<size_t>(r) * kTile], count, &logits[r * keys.size() + i]);
  }
  for (int r = 0; r < g.rows; ++r) {
    if (g.poisoned[r]) {
      g.z[r] = numerics::quiet_nan();
      continue;
    }
    float* row = &logits[r * keys.size()];
    float largest = g.sink(r);
    for (size_t i = 0; i < keys.size(); ++i) largest = larger(largest, row[i]);
    int64_t counted = sink_weight(g.sink(r), largest), extrapolated = 0;
    if (sampled > 0) std::partial_sort(row, row + kTrimmed, row + sampled, std::greater<float>());
    for (size_t i = 0; i < keys.size(); ++i) {
      (i >= kTrimmed && i < sampled ? extrapolated : counted) += numerics::fix(numerics::sub(row[i], largest));
    }
    g.z[r] = numerics::add(numerics::reference_z(largest, counted, extrapolated, rest), g.params->reference_shift);
  }
}

void exact_references(const std::vector<Group*>& groups, const std::vector<Rows>& redo, int64_t splits,
                      const DecodeKernels& kernels) {
  struct Sums {
    std::mutex lock;
    float largest[kMaxRows];    // logit
    int64_t counted[kMaxRows];  // sum of fix(logit - largest)
  };
  std::vector<Sums> sums(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    for (int r = 0; r < groups[i]->rows; ++r) sums[i].largest[r] = groups[i]->sink(r);
  }
  for_ranges(groups, splits, [&](int64_t i, int64_t begin, int64_t end) {
    const Group& g = *groups[i];
    float largest[kMaxRows];
    std::fill_n(largest, g.rows, -std::numeric_limits<float>::infinity());
    walk_logits(g, kernels, begin, end, [&](const float* logits, int count) {
      for (int r = 0; r < g.rows; ++r) largest[r] = larger(largest[r], kernels.largest(logits + r * kTile, count));
    });
    const std::lock_guard<std::mutex> guard(sums[i].lock);
    for (int r = 0; r < g.rows; ++r) sums[i].largest[r] = larger(sums[i].largest[r], largest[r]);
  });
  for (size_t i = 0; i < groups.size(); ++i) {
    for (int r = 0; r < groups[i]->rows; ++r) sums[i].counted[r] = sink_weight(groups[i]->sink(r), sums[i].largest[r]);
  }
  for_ranges(groups, splits, [&](int64_t i, int64_t begin, int64_t end) {
    const Group& g = *groups[i];
    int64_t counted[kMaxRows] = {};
    walk_logits(g, kernels, begin, end, [&](const float* logits, int count) {
      for (int r = 0; r < g.rows; ++r) counted[r] += kernels.sum_weights(logits + r * kTile, count, sums[i].largest[r]);
    });
    const std::lock_guard<std::mutex> guard(sums[i].lock);
    for (int r = 0; r < g.rows; ++r) sums[i].counted[r] += counted[r];
  });
  for (size_t i = 0; i < groups.size(); ++i) {
    for (int r = 0; r < groups[i]->rows; ++r) {
      if (redo[i][r]) groups[i]->z[r] = numerics::reference_z(sums[i].largest[r], sums[i].counted[r], 0, 0);
    }
  }
}

}  // namespace fold::cpu
