// The grid of dQ: no addition leaves int32's range, and the count notices when one does. This program has kernels of
// its own, built to count.
#define FOLD_COUNT_GRID_OVERFLOWS
#include "backward_testing.h"
#include "cuda/attention/backward.cu"

namespace fold::testing {
namespace {

class BackwardGrid : public DeviceTest {};

Problem problem(int64_t dim, int64_t length) {
  Problem p(DType::bf16, {1, length, length, 2, 1, dim});
  p.options.causal = true;
  use_grad_dtype(p, DType::f32);
  return p;
}

/// Overflows while the gradients of a problem are computed.
unsigned long long overflows(Problem& p) {
  set_forward(p, reference(p));
  cuda::take_grid_overflows();
  backward_on_device(p);
  return cuda::take_grid_overflows();
}

TEST_F(BackwardGrid, AdversarialInputsStayInRange) {
  for (const int64_t dim : {64, 96, 128}) {
    for (const int64_t length : {1, 130, 300}) {
      SCOPED_TRACE("D " + std::to_string(dim) + ", length " + std::to_string(length));
      Problem plain = problem(dim, length);
      EXPECT_EQ(overflows(plain), 0u) << "random";

      Problem huge_row = problem(dim, length);
      const int64_t row = length / 2;
      for (int64_t i = row * 2 * dim; i < (row + 1) * 2 * dim; ++i) huge_row.dout.set(i, huge_row.dout.at(i) * 0x1p40);
      EXPECT_EQ(overflows(huge_row), 0u) << "one huge row of dout";
      // The other rows keep their resolution.
      for (int64_t i = 0; i < row * 2 * dim; ++i) ASSERT_EQ(huge_row.dq.at(i), plain.dq.at(i)) << i;

      Problem huge_value = problem(dim, length);
      for (int64_t i = row * dim; i < (row + 1) * dim; ++i) huge_value.v.set(i, huge_value.v.at(i) * 0x1p30);
      EXPECT_EQ(overflows(huge_value), 0u) << "one huge V";

      // dQ reaches its bound: all of a row's dS has the sign of K, and |dP - Delta| is as large as it can be.
      Problem aligned = problem(dim, length);
      aligned.k.fill(2.0), aligned.q.fill(0.0), aligned.dout.fill(1.0);
      for (int64_t i = 0; i < aligned.v.numel(); ++i) aligned.v.set(i, i / dim % 2 == 0 ? 1.0 : -1.0);
      EXPECT_EQ(overflows(aligned), 0u) << "all-equal keys";
      aligned.out.fill(-1.0);
      cuda::take_grid_overflows();
      backward_on_device(aligned);
      EXPECT_EQ(cuda::take_grid_overflows(), 0u) << "an out that makes Delta as large as dP";

      Problem single = problem(dim, length);
      single.options.window_left = 0;
      EXPECT_EQ(overflows(single), 0u) << "one visible key a row";
    }
  }
}

TEST_F(BackwardGrid, FalseLogSumExpIsCounted) {
  Problem p = problem(128, 300);
  p.k.fill(1.0), p.q.fill(0.0), p.dout.fill(1.0), p.v.fill(1.0), p.out.fill(-1.0);
  const Expected e = reference(p);
  for (int64_t i = 0; i < p.lse.numel(); ++i) p.lse.set(i, e.lse[static_cast<size_t>(i)] - 10.0);
  cuda::take_grid_overflows();
  backward_on_device(p);
  EXPECT_GT(cuda::take_grid_overflows(), 0u);
}

}  // namespace
}  // namespace fold::testing
