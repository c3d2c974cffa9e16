#pragma once
#include "cuda/decode/rows.cuh"
#include "numerics/partial_row.h"
#include "plan/decode_params.h"

// Public partial sums. A warp has one row: one token and query head.
namespace fold::cuda::partials {

constexpr int kThreads = 128;

__device__ inline int64_t row_of_warp() {
  return (static_cast<int64_t>(blockIdx.x) * kThreads + static_cast<int64_t>(threadIdx.x)) / 32;
}

__device__ inline bool same_or_both_nan(float a, float b) { return a == b || (a != a && b != b); }

__device__ inline int64_t wrapped_sum(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

__global__ void __launch_bounds__(kThreads) add_kernel(const __grid_constant__ plan::AddPartialsParams p) {
  const int64_t row = row_of_warp();
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (row >= p.rows) return;
  bool same = true;
  if (lane < 3) same = same_or_both_nan(p.grid[3 * row + lane], p.other_grid[3 * row + lane]);
  same = __all_sync(kWarp, same);
  if (lane < 3) {
    int64_t& sum = p.denominator[3 * row + lane];
    sum = same ? wrapped_sum(sum, p.other_denominator[3 * row + lane]) : 0;
    if (!same) p.grid[3 * row + lane] = numerics::quiet_nan();
  }
  for (int64_t c = lane; c < p.head_dim; c += 32) {
    int64_t& sum = p.numerator[row * p.head_dim + c];
    sum = same ? wrapped_sum(sum, p.other_numerator[row * p.head_dim + c]) : 0;
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ plan::FinishParams p) {
  constexpr int N = D / 32;
  const int64_t row = row_of_warp();
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (row >= p.batch * p.tokens * p.heads) return;
  const int64_t b = row / (p.tokens * p.heads), t = row / p.heads % p.tokens, h = row % p.heads;
  const float z = p.grid[3 * row];
  const numerics::PartialRow partial = numerics::partial_row(p.grid + 3 * row, p.denominator + 3 * row);
  const float sink_logit = p.sinks == nullptr ? -INFINITY : numerics::mul(p.sinks[h], numerics::kLog2E);
  const float sink = numerics::sub(sink_logit, z);
  const bool sums = !partial.empty && partial.done && sink == sink;
  const double total = numerics::with_sink(partial.mass.den, sink);
  float out[N] = {};
  if (sums) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      out[i] = numerics::finish_channel(p.numerator[row * D + lane * N + i], total, partial.e_exponent);
    }
  }
  rotate_row<D>(out, lane);
  const float otherwise = partial.empty ? 0.0f : numerics::quiet_nan();
  const int64_t at = b * p.out_stride_b + t * p.out_stride_t + h * p.out_stride_h + lane * N;
#pragma unroll
  for (int i = 0; i < N; ++i) store_element(sums ? out[i] : otherwise, p.out, p.out_dtype, at + i);
  if (lane != 0) return;
  if (p.valid != nullptr) p.valid[row] = partial.done;
  if (p.lse == nullptr) return;
  p.lse[(b * p.heads + h) * p.tokens + t] = sums            ? numerics::finish_lse(z, total, sink)
                                            : partial.empty ? -INFINITY
                                                            : numerics::quiet_nan();
}

}  // namespace fold::cuda::partials
