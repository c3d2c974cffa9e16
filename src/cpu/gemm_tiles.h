#pragma once
#include <cstring>

#include "cpu/gemm.h"
#include "numerics/exp2.h"

// The tile kernels, written once over a vector type `S` and a word format `W`. Both are types of an unnamed namespace
// in the source file of one instruction set, so every instantiation has internal linkage: code compiled for AVX-512
// can never be merged with code that runs elsewhere. For the same reason nothing here calls the standard library.
namespace fold::cpu {

template <typename S, typename W>
struct Tiles {
  using F = typename S::F;
  static constexpr int64_t kLanes = S::kLanes;

  // ---- element conversion ---------------------------------------------------------------------------------------

  static void to_float(const void* src, DType dtype, int64_t n, float* dst) {
    const int64_t whole = n / kLanes * kLanes;
    if (dtype == DType::f32) {
      std::memcpy(dst, src, static_cast<size_t>(n) * sizeof(float));
    } else {
      const auto* h = static_cast<const uint16_t*>(src);
      for (int64_t i = 0; i < whole; i += kLanes) {
        S::store(dst + i, dtype == DType::bf16 ? S::load_bf16(h + i) : S::load_f16(h + i));
      }
      for (int64_t i = whole; i < n; ++i) {
        dst[i] = dtype == DType::bf16 ? numerics::from_bf16(h[i]) : numerics::from_f16(h[i]);
      }
    }
    for (int64_t i = n; i % 16; ++i) dst[i] = 0.0f;
  }

  static void store(const float* row, float factor, int64_t n, DType dtype, void* dst) {
    if (dtype == DType::f32) {
      auto* out = static_cast<float*>(dst);
      for (int64_t i = 0; i < n; ++i) out[i] = row[i] * factor;
      return;
    }
    auto* out = static_cast<uint16_t*>(dst);
    const F f = S::set1(factor);
    int64_t i = 0;
    if (dtype == DType::bf16) {
      for (; i + kLanes <= n; i += kLanes) S::store_bf16(out + i, S::mul(S::load(row + i), f));
      for (; i < n; ++i) out[i] = numerics::to_bf16(row[i] * factor);
    } else {
      for (; i + kLanes <= n; i += kLanes) S::store_f16(out + i, S::mul(S::load(row + i), f));
      for (; i < n; ++i) out[i] = numerics::to_f16(row[i] * factor);
    }
  }

  static void load_rows(const void* src, DType dtype, int64_t stride, int64_t rows, int64_t padded_rows,
                        int64_t head_dim, Word* tile) {
    const int64_t words = (head_dim + 15) / 16 * 16 / W::kPack;
    const auto* bytes = static_cast<const char*>(src);
    for (int64_t r = 0; r < rows; ++r) {
      W::load_row(bytes + r * stride * (dtype == DType::f32 ? 4 : 2), dtype, head_dim, tile + r * words);
    }
    std::memset(tile + rows * words, 0, static_cast<size_t>((padded_rows - rows) * words) * sizeof(Word));
  }

  // ---- rows -----------------------------------------------------------------------------------------------------

  static float norm(const float* row, int64_t n) {
    // Comparing magnitudes as integers puts NaN above infinity above every number.
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t magnitude = numerics::bits_of(row[i]) & 0x7FFFFFFFu;
      largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= 0x7F800000u) return numerics::float_of(0x7F800000u);
    if (largest == 0) return 0.0f;
    // Scaled by a power of two so that the squares neither overflow nor vanish.
    int e = static_cast<int>(largest >> 23) - 127;
    e = e < -126 ? -126 : e > 126 ? 126 : e;
    const F scale = S::set1(numerics::pow2(-e));
    F sum = S::set1(0.0f);
    for (int64_t i = 0; i < n; i += kLanes) {
      const F x = S::mul(S::load(row + i), scale);
      sum = S::fma(x, x, sum);
    }
    return numerics::sqrt_rn(S::sum(sum)) * numerics::pow2(e);
  }

  static float dot(const float* a, const float* b, int64_t n) {
    F sum = S::set1(0.0f);
    for (int64_t i = 0; i < n; i += kLanes) sum = S::fma(S::load(a + i), S::load(b + i), sum);
    return S::sum(sum);
  }

  // ---- products -------------------------------------------------------------------------------------------------

  template <int kVectors>
  static void micro(const GemmArgs& g, const Word* a, const Word* b, float* c) {
    F acc[S::kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < S::kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = S::set1(0.0f);
    }
    for (int64_t w = 0; w < g.words; ++w) {
      F column[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) column[v] = S::load(reinterpret_cast<const float*>(b) + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < S::kRows; ++r) {
        const F left = S::set1_word(a + r * g.a_row);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[r][v] = W::multiply_add(left, column[v], acc[r][v]);
      }
      a += g.a_word;
      b += g.b_word;
    }
#pragma GCC unroll 16
    for (int r = 0; r < S::kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* at = c + r * g.c_row + v * kLanes;
        S::store(at, g.accumulate ? S::add(S::load(at), acc[r][v]) : acc[r][v]);
      }
    }
  }

  template <int kVectors>
  static void panel(const GemmArgs& g, int64_t column) {
    for (int64_t r = 0; r < g.rows; r += S::kRows) {
      micro<kVectors>(g, g.a + r * g.a_row, g.b + column, g.c + r * g.c_row + column);
    }
  }

  static void gemm(const GemmArgs& g) {
    static_assert(kRowBlock % S::kRows == 0);
    int64_t column = 0;
    for (; column + S::kVectors * kLanes <= g.cols; column += S::kVectors * kLanes) panel<S::kVectors>(g, column);
    const int64_t rest = (g.cols - column) / kLanes;  // below kVectors <= 4
    if (rest == 1) panel<1>(g, column);
    if constexpr (S::kVectors > 2) {
      if (rest == 2) panel<2>(g, column);
      if (rest == 3) panel<3>(g, column);
    }
  }

  // ---- softmax --------------------------------------------------------------------------------------------------

  /// 2^x; 0 for x below -126 and -inf.
  static F exp2(F x) {
    x = S::max(x, S::set1(-127.0f));
    const F n = S::round(x);
    const F f = S::sub(x, n);
    F p = S::fma(S::set1(numerics::kExp2C5), f, S::set1(numerics::kExp2C4));
    p = S::fma(p, f, S::set1(numerics::kExp2C3));
    p = S::fma(p, f, S::set1(numerics::kExp2C2));
    p = S::fma(p, f, S::set1(numerics::kExp2C1));
    p = S::fma(p, f, S::set1(1.0f));
    return S::times_pow2(p, n);
  }

  static void softmax(const SoftmaxArgs& s) {
    const F scale = S::set1(s.scale);
    for (int64_t r = 0; r < s.rows; ++r) {
      Word* weights = s.weights + r * s.weights_ld;
      const int32_t first = s.first[r], last = s.last[r];
      if (first >= last) {
        std::memset(weights, 0, static_cast<size_t>(s.cols / W::kPack) * sizeof(Word));
        continue;
      }
      const float* x = s.scores + r * s.ld;
      const bool all = first == 0 && last >= s.cols;
      F high = S::set1(-__builtin_inff());
      for (int64_t c = 0; c < s.cols; c += kLanes) {
        F t = S::mul(S::load(x + c), scale);
        if (!all) t = S::keep(t, -__builtin_inff(), static_cast<int32_t>(c), first, last);
        high = S::max(high, t);
      }
      const float tile_max = S::max_lane(high);
      if (tile_max > s.max[r]) {
        const F shrink = exp2(S::set1(s.max[r] - tile_max));
        s.max[r] = tile_max;
        s.sum[r] *= S::first_lane(shrink);
        float* out = s.out + r * s.out_ld;
        for (int64_t d = 0; d < s.out_ld; d += kLanes) S::store(out + d, S::mul(S::load(out + d), shrink));
      }
      const F minus_max = S::set1(-s.max[r]);
      F sum = S::set1(0.0f);
      for (int64_t c = 0; c < s.cols; c += kLanes) {
        F p = exp2(S::fma(S::load(x + c), scale, minus_max));
        if (!all) p = S::keep(p, 0.0f, static_cast<int32_t>(c), first, last);
        sum = S::add(sum, p);
        W::store_row(weights, c, p);
      }
      s.sum[r] += S::sum(sum);
    }
  }

  // ---- gradient -------------------------------------------------------------------------------------------------

  static void gradient(const GradientArgs& g) {
    const F scale = S::set1(g.scale);
    for (int64_t r = 0; r < g.rows; r += W::kPack) {
      Word* p_pairs = g.p_pairs + r / W::kPack * g.ld;
      Word* ds_pairs = g.ds_pairs + r / W::kPack * g.ld;
      bool all = true;
      for (int64_t h = r; h < r + W::kPack; ++h) all = all && g.first[h] == 0 && g.last[h] >= g.cols;
      for (int64_t c = 0; c < g.cols; c += kLanes) {
        F p[W::kPack], ds[W::kPack];
#pragma GCC unroll 2
        for (int h = 0; h < W::kPack; ++h) {
          const int64_t row = r + h, at = row * g.ld + c;
          const F t = S::fma(S::load(g.scores + at), scale, S::set1(-g.lse2[row]));
          p[h] = exp2(S::sub(t, S::set1(g.lse2_low[row])));
          ds[h] = S::mul(p[h], S::sub(S::load(g.dp + at), S::set1(g.delta[row])));
          if (!all) {
            p[h] = S::keep(p[h], 0.0f, static_cast<int32_t>(c), g.first[row], g.last[row]);
            ds[h] = S::keep(ds[h], 0.0f, static_cast<int32_t>(c), g.first[row], g.last[row]);
          }
          if constexpr (W::kPack > 1) W::store_row(g.ds_rows + row * (g.ld / W::kPack), c, ds[h]);
        }
        W::store_pair(p_pairs + c, p);
        W::store_pair(ds_pairs + c, ds);
      }
    }
  }

  static void add_to_grid(const GridAddArgs& g) {
    for (int64_t r = 0; r < g.rows; ++r) {
      const F multiplier = S::set1(g.multiplier[r]);
      for (int64_t c = 0; c < g.cols; c += kLanes) {
        S::add_rounded(g.grid + r * g.grid_ld + c, S::mul(S::load(g.x + r * g.ld + c), multiplier));
      }
    }
  }

  static constexpr TileKernels kernels() {
    return {W::kPack, load_rows, W::pairs, gemm, softmax, gradient, add_to_grid, to_float, norm, dot, store};
  }
};

/// Words of one fp32.
template <typename S>
struct FloatWords {
  using F = typename S::F;
  static constexpr int kPack = 1;

  static F multiply_add(F a, F b, F acc) { return S::fma(a, b, acc); }

  static void load_row(const void* src, DType dtype, int64_t n, Word* dst) {
    auto* out = reinterpret_cast<float*>(dst);
    Tiles<S, FloatWords>::to_float(src, dtype, n, out);
    for (int64_t i = 0; i < n; ++i) out[i] = numerics::is_finite(out[i]) ? out[i] : 0.0f;
  }

  static void pairs(const Word* tile, int64_t rows, int64_t padded_dim, Word* out) {
    std::memcpy(out, tile, static_cast<size_t>(rows * padded_dim) * sizeof(Word));
  }

  static void store_row(Word* row, int64_t column, F x) { S::store(reinterpret_cast<float*>(row) + column, x); }
  static void store_pair(Word* at, const F* x) { S::store(reinterpret_cast<float*>(at), x[0]); }
};

}  // namespace fold::cpu
