#pragma once
#include "cpu/cache_kernels.h"
#include "numerics/tail.h"

// A fit's linear algebra (docs/numerics.md, section 9), for the instruction set that the including source is compiled
// for. The order in which an element receives its terms is part of the format; elements are independent of each other,
// so the loops run over vectors of them. Matrices are row-major.
namespace fold::cpu {
namespace {

using numerics::kRank;

template <int kBytes>
struct Doubles {
  typedef double V __attribute__((vector_size(kBytes), aligned(8), may_alias));
  static constexpr int kLanes = kBytes / 8;
};

/// out[i] = start[i] +- coefficient[0] rows[0][i] +- coefficient[1] rows[1][i] ..., `count` terms one by one, i <
/// kWidth. start null: from 0. out may be start.
template <int kBytes, int kWidth, bool kSubtract>
inline void combine(double* out, const double* start, const double* coefficient, ptrdiff_t coefficient_step,
                    const double* rows, ptrdiff_t row_step, int count) {
  using V = typename Doubles<kBytes>::V;
  constexpr int kVectors = kWidth / Doubles<kBytes>::kLanes;
  V acc[kVectors];
#pragma GCC unroll 16
  for (int n = 0; n < kVectors; ++n) acc[n] = start == nullptr ? V{} : reinterpret_cast<const V*>(start)[n];
  for (int k = 0; k < count; ++k, coefficient += coefficient_step, rows += row_step) {
    const double c = *coefficient;
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) {
      const V term = c * reinterpret_cast<const V*>(rows)[n];
      acc[n] = kSubtract ? acc[n] - term : acc[n] + term;
    }
  }
#pragma GCC unroll 16
  for (int n = 0; n < kVectors; ++n) reinterpret_cast<V*>(out)[n] = acc[n];
}

/// Steps 1 and 2. buffers.a becomes the transpose of L, zero below its diagonal.
template <int kBytes, int D>
void factor(const FitBuffers& buffers) {
  constexpr int kWidth = 32;
  const int64_t* sums = buffers.sums + D;
  double* a = buffers.a;
  int64_t trace = 0;
  for (int i = 0; i < D; ++i) trace += sums[i * 2 * D + i];
  const double ridge = numerics::ridge(trace, D);
  for (int i = 0; i < D; ++i) {
    for (int j = 0; j < D; ++j) a[j * D + i] = j <= i ? static_cast<double>(sums[i * 2 * D + j]) : 0.0;
    a[i * D + i] += ridge;
  }
  for (int j = 0; j < D; ++j) {
    double* row = a + j * D;
    for (int base = j / kWidth * kWidth; base < D; base += kWidth) {
      combine<kBytes, kWidth, true>(row + base, row + base, a + j, D, a + base, D, j);
    }
    const double pivot = __builtin_sqrt(row[j]);
    for (int i = 0; i < j; ++i) row[i] = 0.0;
    row[j] = pivot;
    for (int i = j + 1; i < D; ++i) row[i] /= pivot;
  }
}

/// Steps 3 and 4: y = L^-1 B, c = Y^T Y.
template <int kBytes, int D>
void whiten(const FitBuffers& buffers) {
  constexpr int kWidth = 32;
  const double* a = buffers.a;
  double* y = buffers.y;
  for (int i = 0; i < D; ++i) {
    double* row = y + i * D;
    for (int j = 0; j < D; ++j) row[j] = static_cast<double>(buffers.sums[i * 2 * D + j]);
    for (int base = 0; base < D; base += kWidth) {
      combine<kBytes, kWidth, true>(row + base, row + base, a + i, D, y + base, D, i);
    }
    for (int j = 0; j < D; ++j) row[j] /= a[i * D + i];
  }
  for (int i = 0; i < D; ++i) {
    for (int base = 0; base < D; base += kWidth) {
      combine<kBytes, kWidth, false>(buffers.c + i * D + base, nullptr, y + i, D, y + base, D, D);
    }
  }
}

/// Euclidean norms of the columns of x (D, 16).
template <int D>
void column_norms(const double* x, double* norms) {
  for (int r = 0; r < kRank; ++r) norms[r] = 0.0;
  for (int i = 0; i < D; ++i) {
    for (int r = 0; r < kRank; ++r) norms[r] += x[i * kRank + r] * x[i * kRank + r];
  }
  for (int r = 0; r < kRank; ++r) norms[r] = __builtin_sqrt(norms[r]);
}

/// Gram-Schmidt on the columns of x (D, 16), in order.
template <int D>
void orthonormalise(double* x) {
  double before[kRank], dots[kRank];
  column_norms<D>(x, before);
  for (int r = 0; r < kRank; ++r) {
    double square = 0.0;
    for (int i = 0; i < D; ++i) square += x[i * kRank + r] * x[i * kRank + r];
    const double norm = __builtin_sqrt(square);
    const bool dependent = numerics::is_dependent(norm, before[r]);
    for (int i = 0; i < D; ++i) x[i * kRank + r] = dependent ? 0.0 : x[i * kRank + r] / norm;
    for (int s = 0; s < kRank; ++s) dots[s] = 0.0;
    for (int i = 0; i < D; ++i) {
      for (int s = r + 1; s < kRank; ++s) dots[s] += x[i * kRank + r] * x[i * kRank + s];
    }
    for (int i = 0; i < D; ++i) {
      for (int s = r + 1; s < kRank; ++s) x[i * kRank + s] -= dots[s] * x[i * kRank + r];
    }
  }
}

/// Steps 5 and 6: x = U, v = P.
template <int kBytes, int D>
void directions(const FitBuffers& buffers) {
  const double* a = buffers.a;
  double *x = buffers.x, *v = buffers.v;
  for (int i = 0; i < D; ++i) {
    for (int r = 0; r < kRank; ++r) x[i * kRank + r] = numerics::start_sign(i, r);
  }
  for (int iteration = 0; iteration < numerics::kFitIterations; ++iteration) {
    for (int i = 0; i < D; ++i) {  // into v, then back
      combine<kBytes, kRank, false>(v + i * kRank, nullptr, buffers.c + i * D, 1, x, kRank, D);
    }
    for (int i = 0; i < D * kRank; ++i) x[i] = v[i];
    orthonormalise<D>(x);
  }
  for (int i = 0; i < D; ++i) {
    combine<kBytes, kRank, false>(v + i * kRank, nullptr, buffers.y + i * D, 1, x, kRank, D);
  }
  for (int i = D - 1; i >= 0; --i) {
    double* row = v + i * kRank;
    combine<kBytes, kRank, true>(row, row, a + i * D + D - 1, -1, v + (D - 1) * kRank, -kRank, D - 1 - i);
    for (int r = 0; r < kRank; ++r) row[r] /= a[i * D + i];
  }
}

/// The largest magnitude of column r of x (D, 16), NaN if one is not finite.
template <int D>
double column_max(const double* x, int r) {
  double largest = 0.0;
  for (int i = 0; i < D; ++i) {
    const double magnitude = __builtin_fabs(x[i * kRank + r]);
    if (!(magnitude <= 0x1.fffffffffffffp+1023)) return __builtin_nan("");
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

/// Step 7.
template <int D>
void quantise(int e_exponent, const FitBuffers& buffers, const FitOut& out) {
  for (int r = 0; r < kRank; ++r) {
    const double su = column_max<D>(buffers.x, r) / 127.0, sp = column_max<D>(buffers.v, r) / 127.0;
    const float f = numerics::direction_scale(su, sp, e_exponent);
    const bool usable = numerics::is_finite(f);
    out.f[r] = usable ? f : 0.0f;
    for (int i = 0; i < D; ++i) {
      out.u[r * D + i] = usable ? static_cast<int8_t>(__builtin_rint(buffers.x[i * kRank + r] / su)) : int8_t{0};
      out.p[r * D + i] = usable ? static_cast<int8_t>(__builtin_rint(buffers.v[i * kRank + r] / sp)) : int8_t{0};
    }
  }
}

template <int kBytes, int D>
void solve_fit_of(int e_exponent, const FitBuffers& buffers, const FitOut& out) {
  factor<kBytes, D>(buffers);
  whiten<kBytes, D>(buffers);
  directions<kBytes, D>(buffers);
  quantise<D>(e_exponent, buffers, out);
}

}  // namespace
}  // namespace fold::cpu
