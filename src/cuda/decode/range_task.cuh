#pragma once
#include "cuda/decode/group_state.cuh"

namespace fold::cuda {

/// What a CTA knows about the work it does.
struct RangeTask {
  GroupState g;
  Visible visible;
  uint64_t active;
  int index, batch, token, kv_head, rows, fit_mark, typical, outliers;
  int row_begin, row_end;  // whose values are summed here
  TileRange tiles;
};

}  // namespace fold::cuda
