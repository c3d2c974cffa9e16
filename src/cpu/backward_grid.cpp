#include "cpu/backward_grid.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "numerics/int_grid.h"
#include "plan/attention_plan.h"

namespace fold::cpu {

DqGrid::DqGrid(DType dtype, int64_t rows, int64_t padded_dim, const TileKernels& kernels, GridAudit* audit)
    : dim_(padded_dim),
      is_64_bit_(plan::dq_grid_bits(dtype) > 30),
      bits_(plan::dq_grid_bits(dtype)),
      kernels_(kernels),
      audit_(audit),
      shift_(rows),
      multiplier_(rows) {
  if (is_64_bit_) {
    sum64_ = Buffer<int64_t>(rows * padded_dim);
  } else {
    sum32_ = Buffer<int32_t>(rows * padded_dim);
  }
}

void DqGrid::start_row(int64_t row, double bound) {
  shift_[row] = numerics::grid_shift(bound, bits_);
  multiplier_[row] = static_cast<float>(std::ldexp(1.0, shift_[row]));
  if (is_64_bit_) {
    std::memset(&sum64_[row * dim_], 0, static_cast<size_t>(dim_) * sizeof(int64_t));
  } else {
    std::memset(&sum32_[row * dim_], 0, static_cast<size_t>(dim_) * sizeof(int32_t));
  }
}

void DqGrid::add(int64_t first_row, int64_t rows, const float* x) {
  const std::lock_guard lock(locks_[static_cast<size_t>(first_row / plan::kQueryTile) % locks_.size()]);
  if (audit_) add_audited(first_row, rows, x);
  if (is_64_bit_) {
    add_wide(first_row, rows, x);
  } else {
    kernels_.add_to_grid({.x = x,
                          .ld = dim_,
                          .rows = rows,
                          .cols = dim_,
                          .multiplier = &multiplier_[first_row],
                          .grid = &sum32_[first_row * dim_],
                          .grid_ld = dim_});
  }
}

void DqGrid::add_wide(int64_t first_row, int64_t rows, const float* x) {
  for (int64_t r = 0; r < rows; ++r) {
    const double multiplier = std::ldexp(1.0, shift_[first_row + r]);
    int64_t* sum = &sum64_[(first_row + r) * dim_];
    for (int64_t d = 0; d < dim_; ++d) sum[d] += std::llrint(x[r * dim_ + d] * multiplier);
  }
}

void DqGrid::add_audited(int64_t first_row, int64_t rows, const float* x) {
  const double range = std::ldexp(1.0, is_64_bit_ ? 63 : 31);
  int64_t overflows = 0;
  double peak = 0.0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t d = 0; d < dim_; ++d) {
      const int64_t at = (first_row + r) * dim_ + d;
      const double part = std::nearbyint(std::ldexp(static_cast<double>(x[r * dim_ + d]), shift_[first_row + r]));
      const double sum = part + (is_64_bit_ ? static_cast<double>(sum64_[at]) : sum32_[at]);
      overflows += !(std::fabs(part) < range && std::fabs(sum) < range);
      peak = std::fmax(peak, std::fabs(sum) / range);
    }
  }
  const std::lock_guard lock(audit_->mutex);
  audit_->additions += rows * dim_;
  audit_->overflows += overflows;
  audit_->peak = std::fmax(audit_->peak, peak);
}

void DqGrid::read_row(int64_t row, double factor, float* x) const {
  const double unit = std::ldexp(factor, -shift_[row]);
  for (int64_t d = 0; d < dim_; ++d) {
    const int64_t at = row * dim_ + d;
    x[d] = static_cast<float>((is_64_bit_ ? static_cast<double>(sum64_[at]) : sum32_[at]) * unit);
  }
}

}  // namespace fold::cpu
