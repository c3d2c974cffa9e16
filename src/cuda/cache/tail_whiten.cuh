#pragma once
#include "cuda/cache/tail_sums.cuh"
#include "numerics/quotient.h"

// The first half of a fit's linear algebra (docs/numerics.md, section 9, steps 1 to 3), by a thread block. The order in
// which an element receives its terms is part of the format; elements are independent of each other, so they are what
// the threads share out. Terms come in panels of 16, so that most elements are loaded once for 16 of them.
namespace fold::cuda::cache {

using numerics::kRank;

template <int D>
struct SolveShape {
  static constexpr bool kInShared = D <= 128;           ///< whether L, and later C, have room in shared memory
  static constexpr int kPitch = kInShared ? D + 1 : D;  ///< odd: rows and columns use all memory banks
};

template <int D>
struct SolveShared {
  static constexpr int kPitch = kRank + 1;          ///< odd, likewise
  alignas(16) double x[D * kPitch], v[D * kPitch];  // (D, 16)
  double diagonal[D], inverse[D];                   // of L, and 1 over it
  double before[kRank], dots[kRank], norm;
  unsigned long long trace;
  alignas(16) double matrix[SolveShape<D>::kInShared ? D * SolveShape<D>::kPitch : 1];
};

/// L and Y of a fit.
template <int D>
class Whitener {
  using Shape = SolveShape<D>;
  static constexpr int kPitch = Shape::kPitch, kXPitch = SolveShared<D>::kPitch;
  static constexpr int kPanel = 16;
  static_assert(kPanel <= kRank, "x has room for a panel");

 public:
  /// parts: slots of the fit's `count` parts. matrix: L afterwards, column-major, element (i, k)
  /// at k kPitch + i, without its diagonal; y: (D, D), row-major, may be A's sums of a part.
  __device__ Whitener(const FitSlot<D>* parts, const int& count, double* matrix, double* y, SolveShared<D>& s)
      : parts_(parts), count_(count), matrix_(matrix), y_(y), s_(s) {}

  __device__ void run() {
    load_matrix();
    factor();
    whiten();
  }

 private:
  /// Elements first, first + step, ... of A or B: the sums over the parts.
  template <int kCount>
  __device__ void load_sums(int64_t (FitSlot<D>::*which)[D * D], int first, int step, int64_t (&sums)[kCount]) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) sums[n] = 0;
#pragma unroll 1
    for (int part = 0; part < count_; ++part) {
      const int64_t* from = (parts_[part].*which) + first;
#pragma unroll
      for (int n = 0; n < kCount; ++n) sums[n] += __ldcg(from + n * step);
    }
  }

  /// Step 1.
  __device__ void load_matrix() {
    constexpr int kLoads = 8;
    if (thread_ == 0) s_.trace = 0;
    __syncthreads();
    unsigned long long trace = 0;
#pragma unroll 1
    for (int first = thread_; first < D * D; first += kLoads * kFitThreads) {
      int64_t sums[kLoads];
      load_sums(&FitSlot<D>::a, first, kFitThreads, sums);
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const int at = first + n * kFitThreads, i = channel_of<D>(at / D), j = channel_of<D>(at % D);
        matrix_[i * kPitch + j] = static_cast<double>(sums[n]);
        if (i == j) trace += static_cast<unsigned long long>(sums[n]);
      }
    }
    if (trace != 0) atomicAdd(&s_.trace, trace);
    __syncthreads();
    const double ridge = numerics::ridge(static_cast<int64_t>(s_.trace), D);
    for (int i = thread_; i < D; i += kFitThreads) {
      double& element = matrix_[i * kPitch + i];
      element = numerics::add(element, ridge);
    }
    __syncthreads();
  }

  /// x (D, 16) = 16 columns of the matrix, from `first` on.
  __device__ void load_panel(int first) {
    for (int at = thread_; at < D * kPanel; at += kFitThreads) {
      s_.x[at % D * kXPitch + at / D] = matrix_[(first + at / D) * kPitch + at % D];
    }
    __syncthreads();
  }

  /// Step 2.
  __device__ void factor() {
#pragma unroll 1
    for (int first = 0; first < D; first += kPanel) {
      load_panel(first);
#pragma unroll 1
      for (int k = 0; k < kPanel; ++k) factor_column(first, k);
      for (int at = thread_; at < D * kPanel; at += kFitThreads) {
        matrix_[(first + at / D) * kPitch + at % D] = s_.x[at % D * kXPitch + at / D];
      }
      subtract_panel(first);
      __syncthreads();
    }
  }

  /// Column first + k of L, and what it takes from the panel's later ones.
  __device__ void factor_column(int first, int k) {
    const int column = first + k;
    const double square = s_.x[column * kXPitch + k];
    if (const int i = column + 1 + thread_; i < D) {
      double& x = s_.x[i * kXPitch + k];
      x = numerics::div(x, numerics::sqrt_rn(square));
    }
    if (thread_ == kFitThreads - 1) {  // has none of the column
      const double pivot = numerics::sqrt_rn(square);
      s_.diagonal[column] = pivot;
      s_.inverse[column] = numerics::div(1.0, pivot);
    }
    __syncthreads();
    constexpr int kStep = kFitThreads / D, kMost = (kPanel + kStep - 1) / kStep;  // columns of a thread
    const int i = thread_ % D;
    const double left = s_.x[i * kXPitch + k];
    double element[kMost];
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      const int j = k + 1 + thread_ / D + n * kStep;
      if (j >= kPanel || i < first + j) continue;
      const double factor = s_.x[(first + j) * kXPitch + k];
      element[n] = numerics::sub(s_.x[i * kXPitch + j], numerics::mul(left, factor));
    }
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      const int j = k + 1 + thread_ / D + n * kStep;
      if (j < kPanel && i >= first + j) s_.x[i * kXPitch + j] = element[n];
    }
    __syncthreads();
  }

  /// A_ij -= L_ik L_jk for the panel's k, ascending, and i >= j behind it: a warp has 4 columns of 64 rows at once.
  __device__ void subtract_panel(int first) {
    constexpr int kAcross = 4, kDown = 2;
#pragma unroll 1
    for (int j = first + kPanel + kAcross * warp_; j < D; j += kAcross * kFitWarps) {
#pragma unroll 1
      for (int top = j; top < D; top += 32 * kDown) {
        double element[kDown][kAcross];
        int row[kDown];
#pragma unroll
        for (int n = 0; n < kDown; ++n) {
          row[n] = min(top + 32 * n + lane_, D - 1);
#pragma unroll
          for (int c = 0; c < kAcross; ++c) element[n][c] = matrix_[(j + c) * kPitch + row[n]];
        }
#pragma unroll 4
        for (int k = 0; k < kPanel; ++k) {
          double left[kDown];
#pragma unroll
          for (int n = 0; n < kDown; ++n) left[n] = s_.x[row[n] * kXPitch + k];
#pragma unroll
          for (int c = 0; c < kAcross; ++c) {
            const double factor = s_.x[(j + c) * kXPitch + k];
#pragma unroll
            for (int n = 0; n < kDown; ++n) {
              element[n][c] = numerics::sub(element[n][c], numerics::mul(left[n], factor));
            }
          }
        }
#pragma unroll
        for (int n = 0; n < kDown; ++n) {
          if (top + 32 * n + lane_ >= D) continue;
#pragma unroll
          for (int c = 0; c < kAcross; ++c) matrix_[(j + c) * kPitch + row[n]] = element[n][c];
        }
      }
    }
  }

  static constexpr int kColumns = D == 256 ? 64 : D;       ///< of Y at once
  static constexpr int kApart = kFitThreads / kColumns;    ///< a thread has every kApart-th row
  static constexpr int kRows = D / kApart, kTogether = 4;  ///< of one column, and takes so many at once

  /// Step 3: columns of Y are independent. v: (16, kColumns), a panel of them in the order of row_of
  __device__ void whiten() {
    const int across = thread_ % kColumns, sub = thread_ / kColumns;
    static_assert(kApart % 4 == 0, "a thread's rows lie evenly in the order of row_of");
#pragma unroll 1
    for (int left = 0; left < D; left += kColumns) {
      double rows[kRows];
#pragma unroll
      for (int r = 0; r < kRows; r += kTogether) {
        int64_t sums[kTogether];
        load_sums(&FitSlot<D>::b, row_of<D>(sub + kApart * r) * D + left + across, kApart / 4 * D, sums);
#pragma unroll
        for (int n = 0; n < kTogether; ++n) rows[r + n] = static_cast<double>(sums[n]);
      }
#pragma unroll 1
      for (int first = 0; first < D; first += kPanel) {
        load_panel(first);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int k = sub + kApart * r - first;
          if (k >= 0 && k < kPanel) s_.v[k * kColumns + across] = rows[r];
        }
        __syncthreads();
        if (thread_ < kColumns) solve_panel(first, channel_of<D>(left + across));
        __syncthreads();
        subtract_solved(first, across, sub, rows);
        __syncthreads();
      }
    }
  }

  /// A column's rows of a panel, as many at once as registers have room for.
  __device__ void solve_panel(int first, int column) {
    constexpr int kAtOnce = 8;
#pragma unroll 1
    for (int top = 0; top < kPanel; top += kAtOnce) {
      const double* left = s_.x + (first + top) * kXPitch;
      double solved[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) solved[i] = s_.v[(top + i) * kColumns + thread_];
#pragma unroll 1
      for (int k = 0; k < top; ++k) {
        const double above = s_.v[k * kColumns + thread_];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          solved[i] = numerics::sub(solved[i], numerics::mul(left[i * kXPitch + k], above));
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int row = first + top + k;
        solved[k] = numerics::quotient(solved[k], s_.diagonal[row], s_.inverse[row]);
#pragma unroll
        for (int i = k + 1; i < kAtOnce; ++i) {
          solved[i] = numerics::sub(solved[i], numerics::mul(left[i * kXPitch + top + k], solved[k]));
        }
        s_.v[(top + k) * kColumns + thread_] = solved[k];
        y_[row * D + column] = solved[k];
      }
    }
  }

  /// B_i -= L_ik Y_k for the panel's k, ascending, and i behind it. (What is taken from rows up to there is not used.)
  __device__ void subtract_solved(int first, int across, int sub, double (&rows)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; r += kTogether) {
      if (kApart * (r + kTogether) <= first + kPanel) continue;
#pragma unroll 2
      for (int k = 0; k < kPanel; ++k) {
        const double solved = s_.v[k * kColumns + across];
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
          const double left = s_.x[(sub + kApart * (r + n)) * kXPitch + k];
          rows[r + n] = numerics::sub(rows[r + n], numerics::mul(left, solved));
        }
      }
    }
  }

  const FitSlot<D>* const parts_;  // (count_,)
  const int& count_;
  double *const matrix_, *const y_;
  SolveShared<D>& s_;
  const int thread_ = thread_here(), warp_ = thread_ / 32, lane_ = thread_ % 32;
};

}  // namespace fold::cuda::cache
