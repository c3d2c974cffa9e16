#include "cpu/decode_reference.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "numerics/reference.h"

namespace fold::cpu {
namespace {

using numerics::kNewest;
using numerics::kSamples;
using numerics::kTrimmed;

/// A NaN stays, so that it reaches Z.
float larger(float a, float b) { return b > a || std::isnan(b) ? b : a; }

}  // namespace

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
  for (size_t i = 0; i < keys.size(); i += kTile) {
    const int count = static_cast<int>(std::min<size_t>(kTile, keys.size() - i));
    kernels.score_keys(g, &keys[i], count, part.data());
    for (int r = 0; r < g.rows; ++r)
      std::copy_n(&part[static_cast<size_t>(r) * kTile], count, &logits[r * keys.size() + i]);
  }
  std::vector<uint32_t> weights(keys.size());
  for (int r = 0; r < g.rows; ++r) {
    if (g.poisoned[r]) {
      g.z[r] = g.spread[r] = numerics::quiet_nan();
      continue;
    }
    float* row = &logits[r * keys.size()];
    float largest = row[0];
    for (size_t i = 1; i < keys.size(); ++i) largest = larger(largest, row[i]);
    if (sampled > 0) std::partial_sort(row, row + kTrimmed, row + sampled, std::greater<float>());
    kernels.weigh_logits(row, static_cast<int64_t>(keys.size()), largest, weights.data());
    numerics::ScoreSums counted, extrapolated;
    for (size_t i = 0; i < keys.size(); ++i)
      numerics::add_score(i >= kTrimmed && i < sampled ? extrapolated : counted, weights[i]);
    const numerics::Reference declared = numerics::declared_reference(largest, counted, extrapolated, rest);
    g.z[r] = numerics::add(declared.z, g.params->reference_shift);
    if (!numerics::is_finite(g.z[r])) g.z[r] = numerics::quiet_nan();  // which asks for no plane
    g.spread[r] = declared.spread;
    g.gates[r] = numerics::widened(g.gates[r], declared.spread);
  }
}

}  // namespace fold::cpu
