#pragma once
#include "cuda/cache/tail_whiten.cuh"

// A fit from its sums (docs/numerics.md, section 9), by a thread block.
namespace fold::cuda::cache {

/// One fit as stored. p, u: (16, D); f: (16,)
struct FitOut {
  int8_t *p, *u;
  float* f;
};

template <int D>
class FitSolver {
  using Shape = SolveShape<D>;
  static constexpr int kPitch = Shape::kPitch, kXPitch = SolveShared<D>::kPitch;
  static constexpr int kShare = D == 256 ? 16 : 8;  ///< lanes that hold a column,
  static constexpr int kRows = D / kShare;          ///< each every kShare-th row of it

 public:
  /// parts: slots of the fit's `count` parts.
  __device__ FitSolver(const FitSlot<D>* parts, const int& count, FitSlot<D>& slot, SolveShared<D>& s)
      : parts_(parts), count_(count), slot_(slot), s_(s) {}

  /// out: returns a FitOut.
  template <typename Out>
  __device__ void run(int e_exponent, const Out& out) {
    Whitener<D>(parts_, count_, matrix(), y(), s_).run();
    store_lower();
    gram();
    iterate();
    project();
    solve_transposed();
    quantise(e_exponent, out());
  }

 private:
  /// L makes room for C, for as long as it is not needed. Row-major.
  __device__ void store_lower() {
    for (int at = thread_; at < D * D; at += kFitThreads) {
      stored_lower()[at] = matrix()[at % D * kPitch + at / D];
    }
    __syncthreads();
  }

  /// matrix() = from (D, D), row-major, in rows of `pitch`; for a head dim that has no room it stays where it is.
  __device__ const double* bring(const double* from, int pitch) {
    if constexpr (Shape::kInShared) {
      for (int at = thread_; at < D * D; at += kFitThreads) matrix()[at / D * pitch + at % D] = from[at];
      __syncthreads();
      return matrix();
    } else {
      return from;
    }
  }

  static constexpr int kTiles = D / 4 * (D / 4 + 1) / 2;  ///< 4 x 4 tiles of C's lower half

  struct Tile {
    int row = 0, column = 0;

    __device__ explicit Tile(int index) {
      int i = 0;
      while ((i + 1) * (i + 2) / 2 <= index) ++i;
      row = 4 * i;
      column = 4 * (index - i * (i + 1) / 2);
    }
  };

  /// An element of C. a, b: columns of Y
  __device__ double gram_element(const double* a, const double* b) const {
    double sum = 0.0;
#pragma unroll 4
    for (int k = 0; k < D; ++k) sum = numerics::add(sum, numerics::mul(a[k * D], b[k * D]));
    return sum;
  }

  __device__ void multiply_tile(const double* y, const Tile& tile, double (&sums)[4][4]) const {
#pragma unroll
    for (int at = 0; at < 16; ++at) sums[at / 4][at % 4] = 0.0;
#pragma unroll(Shape::kInShared ? 1 : 2)
    for (int k = 0; k < D; ++k) {
      const double2* rows = reinterpret_cast<const double2*>(y + k * D + tile.row);
      const double2* columns = reinterpret_cast<const double2*>(y + k * D + tile.column);
      const double left[4] = {rows[0].x, rows[0].y, rows[1].x, rows[1].y};
      const double right[4] = {columns[0].x, columns[0].y, columns[1].x, columns[1].y};
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) sums[m][n] = numerics::add(sums[m][n], numerics::mul(left[m], right[n]));
      }
    }
  }

  __device__ void store_tile(const Tile& tile, const double (&sums)[4][4]) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        matrix()[(tile.row + m) * kPitch + tile.column + n] = sums[m][n];
        matrix()[(tile.column + n) * kPitch + tile.row + m] = sums[m][n];
      }
    }
  }

  /// Step 4. C is symmetric in every bit, so each tile is written twice; where Y is in shared memory, once all tiles
  /// are known.
  __device__ void gram() {
    const double* from = bring(y(), D);
    if constexpr (Shape::kInShared) {
      // A tile a thread, and of those that are left an element a thread.
      static_assert((kTiles - kFitThreads) * 16 <= kFitThreads);
      const Tile own(thread_), left(kFitThreads + thread_ / 16);
      const bool has_own = kTiles >= kFitThreads || thread_ < kTiles, has_left = kFitThreads + thread_ / 16 < kTiles;
      const int row = left.row + thread_ % 16 / 4, column = left.column + thread_ % 4;
      double sum = 0.0, sums[4][4];
      if (has_left) sum = gram_element(from + row, from + column);
      if (has_own) multiply_tile(from, own, sums);
      __syncthreads();
      if (has_own) store_tile(own, sums);
      if (has_left) matrix()[row * kPitch + column] = matrix()[column * kPitch + row] = sum;
    } else {
#pragma unroll 1
      for (int tile = thread_; tile < kTiles; tile += kFitThreads) {
        double sums[4][4];
        multiply_tile(from, Tile(tile), sums);
        store_tile(Tile(tile), sums);
      }
    }
    __syncthreads();
  }

  /// out (D, 16) = M in, summed over columns k ascending; M's element (i, k) at k column_step + i row_step.
  __device__ void multiply(const double* m, int row_step, int column_step, const double* in, double* out) const {
    constexpr int kDirections = D * kRank / kFitThreads;  // of a thread
    const int i = thread_ % D, first = thread_ / D * kDirections;
    double sums[kDirections] = {};
#pragma unroll 4
    for (int k = 0; k < D; ++k) {
      const double factor = m[k * column_step + i * row_step];
#pragma unroll
      for (int r = 0; r < kDirections; ++r) {
        sums[r] = numerics::add(sums[r], numerics::mul(factor, in[k * kXPitch + first + r]));
      }
    }
#pragma unroll
    for (int r = 0; r < kDirections; ++r) out[i * kXPitch + first + r] = sums[r];
    __syncthreads();
  }

  /// Step 5.
  __device__ void iterate() {
    for (int at = thread_; at < D * kRank; at += kFitThreads) {
      s_.x[at / kRank * kXPitch + at % kRank] = numerics::start_sign(at / kRank, at % kRank);
    }
    __syncthreads();
    for (int iteration = 0; iteration < numerics::kFitIterations; ++iteration) {
      multiply(matrix(), 1, kPitch, s_.x, s_.v);
      for (int at = thread_; at < D * kXPitch; at += kFitThreads) s_.x[at] = s_.v[at];
      __syncthreads();
      orthonormalise();
    }
  }

  /// v, as products of columns of x: a column's side by side, and eight columns' use all memory banks.
  static constexpr int kColumnPitch = D + 2;
  static_assert(kRank * kColumnPitch <= D * kXPitch);
  __device__ double& x(int c, int column) { return s_.x[c * kXPitch + column]; }
  __device__ double& product(int column, int c) { return s_.v[column * kColumnPitch + c]; }

  /// The sum of a column's products, from the top.
  __device__ double column_sum(int column) {
    const auto* pairs = reinterpret_cast<const double2*>(&product(column, 0));
    double sum = 0.0;
#pragma unroll 16
    for (int c = 0; c < D / 2; ++c) {
      const double2 pair = pairs[c];
      sum = numerics::add(numerics::add(sum, pair.x), pair.y);
    }
    return sum;
  }

  /// Gram-Schmidt on the columns of x. Its sums are chains of additions, over products that lie ready, by one warp, a
  /// column a lane. Meanwhile the others wait: little else takes time. A thread has every kApart-th column of one row.
  __device__ void orthonormalise() {
    constexpr int kApart = kFitThreads / D;
    const int c = thread_ % D, sub = thread_ / D;
    for (int r = sub; r < kRank; r += kApart) product(r, c) = numerics::mul(x(c, r), x(c, r));
    __syncthreads();
    if (thread_ < kRank) s_.before[thread_] = numerics::sqrt_rn(column_sum(thread_));
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < kRank; ++r) {
      if (thread_ == 0) s_.norm = r == 0 ? s_.before[0] : numerics::sqrt_rn(column_sum(r));
      __syncthreads();
      const double norm = s_.norm;
      const double unit = numerics::is_dependent(norm, s_.before[r]) ? 0.0 : numerics::div(x(c, r), norm);
      for (int s = r + 1 + sub; s < kRank; s += kApart) product(s, c) = numerics::mul(unit, x(c, s));
      __syncthreads();
      if (sub == kApart - 1) x(c, r) = unit;
      if (thread_ > r && thread_ < kRank) s_.dots[thread_] = column_sum(thread_);
      __syncthreads();
      for (int s = r + 1 + sub; s < kRank; s += kApart) {
        const double rest = numerics::sub(x(c, s), numerics::mul(s_.dots[s], unit));
        x(c, s) = rest;
        if (s == r + 1) product(s, c) = numerics::mul(rest, rest);
      }
      __syncthreads();
    }
  }

  /// Step 6, V = Y X.
  __device__ void project() { multiply(bring(y(), kPitch), kPitch, 1, s_.x, s_.v); }

  /// Step 6, P = L^-T V, in place of V.
  __device__ void solve_transposed() {
    const double* lower = bring(stored_lower(), kPitch);
    if (thread_ < kRank * kShare) {
      const int sub = lane_ % kShare, column = thread_ / kShare;
      double v[kRows];
#pragma unroll
      for (int t = 0; t < kRows; ++t) v[t] = s_.v[(kShare * t + sub) * kXPitch + column];
#pragma unroll
      for (int t = kRows - 1; t >= 0; --t) {
#pragma unroll 1
        for (int owner = kShare - 1; owner >= 0; --owner) {
          const int k = kShare * t + owner;
          const double* left = lower + k * kPitch + sub;
          const double solved =
              __shfl_sync(kWarp, numerics::quotient(v[t], s_.diagonal[k], s_.inverse[k]), owner, kShare);
          if (sub == owner) v[t] = solved;
          if (sub < owner) v[t] = numerics::sub(v[t], numerics::mul(left[kShare * t], solved));
#pragma unroll
          for (int i = 0; i < t; ++i) {
            v[i] = numerics::sub(v[i], numerics::mul(left[kShare * i], solved));
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kRows; ++t) s_.v[(kShare * t + sub) * kXPitch + column] = v[t];
    }
    __syncthreads();
  }

  /// The largest magnitude of a column of x (D, 16) over 127, NaN if an element is not finite, by a warp.
  __device__ double column_scale(const double* x, int column) const {
    double largest = 0.0;
    bool finite = true;
#pragma unroll 1
    for (int c = lane_; c < D; c += 32) {
      const double magnitude = fabs(x[c * kXPitch + column]);
      finite = finite && magnitude <= 0x1.fffffffffffffp+1023;
      largest = fmax(largest, magnitude);
    }
    for (int step = 16; step > 0; step /= 2) largest = fmax(largest, __shfl_xor_sync(kWarp, largest, step));
    return __all_sync(kWarp, finite) ? numerics::div(largest, 127.0) : __longlong_as_double(0x7FF8000000000000ll);
  }

  /// Step 7: a direction a warp.
  __device__ void quantise(int e_exponent, const FitOut& out) {
    static_assert(kFitWarps == kRank);
    const int r = warp_;
    const double su = column_scale(s_.x, r), sp = column_scale(s_.v, r);
    const float scale = numerics::direction_scale(su, sp, e_exponent);
    const bool usable = numerics::is_finite(scale);
    for (int c = lane_; c < D; c += 32) {
      const double along = numerics::rne(numerics::div(s_.x[c * kXPitch + r], su));
      const double in = numerics::rne(numerics::div(s_.v[c * kXPitch + r], sp));
      out.u[r * D + c] = usable ? static_cast<int8_t>(along) : int8_t{0};
      out.p[r * D + c] = usable ? static_cast<int8_t>(in) : int8_t{0};
    }
    if (lane_ == 0) out.f[r] = usable ? scale : 0.0f;
  }

  /// L, then C, then L again.
  __device__ double* matrix() const {
    if constexpr (Shape::kInShared) return s_.matrix;
    return slot_.c;
  }
  __device__ double* stored_lower() const { return reinterpret_cast<double*>(slot_.b); }
  __device__ double* y() const { return reinterpret_cast<double*>(slot_.a); }

  const FitSlot<D>* const parts_;  // (count_,)
  const int& count_;
  FitSlot<D>& slot_;
  SolveShared<D>& s_;
  const int thread_ = thread_here(), warp_ = thread_ / 32, lane_ = thread_ % 32;
};

}  // namespace fold::cuda::cache
