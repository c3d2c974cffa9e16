#include "plan/decode_plan.h"

#include <algorithm>

namespace fold::plan {

DecodePlan plan_decode(int64_t groups, int64_t tiles, int64_t threads, int64_t splits) {
  const int64_t wave = std::max<int64_t>(1, std::min(groups, 16 * threads));
  const int64_t most = std::max<int64_t>(1, tiles);
  if (splits > 0) return {wave, std::min(splits, most)};
  // Four ranges a thread even out requests of different lengths.
  const int64_t wanted = (4 * threads + wave - 1) / wave;
  return {wave, std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, tiles / kMinSplitTiles))};
}

}  // namespace fold::plan
