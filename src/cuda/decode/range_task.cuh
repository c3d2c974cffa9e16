#pragma once
#include "cuda/decode/group_state.cuh"

namespace fold::cuda {

/// What a CTA knows about the work it does.
struct RangeTask {
  GroupState g;
  Visible visible;
  uint64_t active;
  int batch, kv_head, rows, fit_mark, typical, outliers;
  int row_begin, row_end;  // whose values are summed here
  TileRange tiles;
  // StreamSummer: tiles that a warp takes at once, and where the group begins. `tiles` begins with a chunk for each
  // warp and ends with the group.
  int chunk, first_tile;
};

/// Adds a CTA's sums of row r to the group's.
__device__ inline void add_row_sums(const RangeTask& task, int r, const RowSums& of_range) {
  if ((task.active >> r & 1) == 0) return;
  RowSums& sums = task.g.sums[r];
  atomicAdd(&sums.den, of_range.den);
  atomicAdd(&sums.mass, of_range.mass);
  atomicAdd(&sums.dropped, of_range.dropped);
  atomicAdd(&sums.values_read, of_range.values_read);
  atomicMax(&sums.peak, of_range.peak);
}

}  // namespace fold::cuda
