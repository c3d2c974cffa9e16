#pragma once
#include <cstdint>

namespace fold::plan {

/// How a decode step's work is cut. Sums are integers, so no choice here changes a bit of the result.
struct DecodePlan {
  int64_t wave;    ///< row groups in flight at once: bounds the workspace
  int64_t splits;  ///< ranges a row group of `tiles` tiles is cut into
};

constexpr int64_t kMinSplitTiles = 8;  ///< a range of fewer 64-key tiles costs more to merge than it saves

/// groups: token and KV-head pairs of the call; tiles: 64-key tiles of the longest request; splits: the caller's wish,
/// 0 for none.
DecodePlan plan_decode(int64_t groups, int64_t tiles, int64_t threads, int64_t splits);

}  // namespace fold::plan
