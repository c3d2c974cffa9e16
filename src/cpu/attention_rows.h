#pragma once
#include <cstdint>
#include <vector>

#include "cpu/gemm.h"
#include "plan/attention_plan.h"

// Addressing of rows, and the magnitudes that decide how a row is computed. A row's class and its grid depend on its
// own data and the keys that it sees, on nothing else.
namespace fold::cpu {

inline char* row_address(const plan::RowsView& x, DType dtype, const plan::Sequence& s, int64_t begin, int64_t row,
                         int64_t head) {
  return static_cast<char*>(x.data) +
         (s.index * x.stride_b + (begin + row) * x.stride_row + head * x.stride_head) * dtype_size(dtype);
}

/// Largest row norms among the keys that each query row sees, per KV head: 0 for none, +inf where one is not finite.
struct VisibleNorms {
  std::vector<float> k, v;  // (HK, total_q)
};

VisibleNorms visible_norms(const plan::ForwardParams& p, const std::vector<plan::Sequence>& all,
                           const TileKernels& kernels);

/// Threads for a loop over so many tasks; at least one.
int threads_for(size_t tasks);

/// Logits are kept in units of log2(e) as fp32 rounds it together with softmax_scale: `scale` turns a dot product into
/// a logit t, `natural` is what one unit of t is in natural log. Converting log-sum-exp with `natural`, not with the
/// exact constant, leaves the rounding of `scale` in differences of logits only.
struct LogitUnit {
  float scale;
  double natural;
};

LogitUnit logit_unit(const plan::ForwardParams& p);

/// Whether a row's softmax may be computed in fp32 tiles. `sink` is -inf where there is none.
bool softmax_fits(float scale2, float q_norm, float k_norm, float v_norm, float sink);

/// n elements of a row to fp64.
void to_double(const void* src, DType dtype, int64_t n, double* dst);

/// x rounded to dtype at index i.
void store_element(void* dst, DType dtype, int64_t i, double x);

/// Zeroes one row.
void clear_row(void* dst, DType dtype, int64_t n);

}  // namespace fold::cpu
