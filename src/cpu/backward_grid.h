#pragma once
#include <array>
#include <cstdint>
#include <mutex>

#include "cpu/buffer.h"
#include "cpu/gemm.h"

namespace fold::cpu {

/// What tests want to know about a run: additions that left the integers' range, and the largest magnitude reached by
/// a sum as a fraction of that range.
struct GridAudit {
  std::mutex mutex;
  int64_t additions = 0, overflows = 0;
  double peak = 0.0;
};

/// dQ of all heads as integers, one power-of-two scale per row (numerics/int_grid.h). Tiles may be added by any thread
/// in any order.
class DqGrid {
 public:
  DqGrid(DType dtype, int64_t rows, int64_t padded_dim, const TileKernels& kernels, GridAudit* audit);

  /// Starts a row at zero. `bound`: of the row's sum, and of the sum of its partials' magnitudes.
  void start_row(int64_t row, double bound);

  /// Adds x (rows, padded_dim) to rows first_row..; tiles that overlap start at the same row.
  void add(int64_t first_row, int64_t rows, const float* x);

  /// x (padded_dim,) = the row's sum * factor.
  void read_row(int64_t row, double factor, float* x) const;

 private:
  void add_audited(int64_t first_row, int64_t rows, const float* x);
  void add_wide(int64_t first_row, int64_t rows, const float* x);

  const int64_t dim_;
  const bool is_64_bit_;
  const int bits_;
  const TileKernels& kernels_;
  GridAudit* audit_;
  Buffer<int32_t> sum32_;     // (rows, padded_dim), or
  Buffer<int64_t> sum64_;     // (rows, padded_dim)
  Buffer<int32_t> shift_;     // (rows,)
  Buffer<float> multiplier_;  // (rows,) 2^shift, for the 32-bit grid
  std::array<std::mutex, 256> locks_;
};

}  // namespace fold::cpu
