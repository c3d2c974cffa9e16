#pragma once
#include <algorithm>
#include <bitset>

#include "cpu/decode_range.h"

namespace fold::cpu {

/// Sets group.z to the sampled reference (docs/numerics.md, section 5).
void sample_reference(Group& group, const DecodeKernels& kernels);

/// fix(sink2 - reference): what a sink adds to sums of weights; sink_log2 = -inf stands for none.
int64_t sink_weight(float sink_log2, float reference);

/// The exact reference: every visible key of the groups is walked twice at the finest level, `splits` ranges a group,
/// in parallel. Replaces z of the rows r of groups[i] with redo[i][r].
using Rows = std::bitset<kMaxRows>;
void exact_references(const std::vector<Group*>& groups, const std::vector<Rows>& redo, int64_t splits,
                      const DecodeKernels& kernels);

/// Calls f(i, tile_begin, tile_end) in parallel for `splits` ranges of every groups[i]'s visible keys within
/// [key_begin, key_end).
template <class F>
void for_ranges(const std::vector<Group*>& groups, int64_t splits, F f) {
  const int64_t items = static_cast<int64_t>(groups.size()) * splits;
#pragma omp parallel for schedule(dynamic)
  for (int64_t item = 0; item < items; ++item) {
    const Group& g = *groups[item / splits];
    const plan::DecodeParams& p = *g.params;
    const int64_t first = std::max(g.first, p.key_begin) / kTile;
    const int64_t last = std::min(g.tiles(), p.key_end / kTile + (p.key_end % kTile != 0 ? 1 : 0));
    const int64_t split = item % splits, tiles = std::max<int64_t>(0, last - first);
    const int64_t begin = first + tiles * split / splits, end = first + tiles * (split + 1) / splits;
    if (begin < end) f(item / splits, begin, end);
  }
}

}  // namespace fold::cpu
