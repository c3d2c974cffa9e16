#if defined(__x86_64__)
// g++ 12 takes the deliberately undefined operands inside its own AVX-512 header for mistakes (GCC bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "cpu/gemm_tiles.h"

namespace fold::cpu {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int kLanes = 16, kRows = 6, kVectors = 4;

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F set1_word(const Word* p) { return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*p))); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static float sum(F x) { return _mm512_reduce_add_ps(x); }
  static float max_lane(F x) { return _mm512_reduce_max_ps(x); }
  static float first_lane(F x) { return _mm512_cvtss_f32(x); }

  static F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F times_pow2(F p, F n) { return _mm512_scalef_ps(p, n); }
  static F keep(F x, float other, int32_t column, int32_t first, int32_t last) {
    const __m512i lane = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                          _mm512_set1_epi32(column));
    const __mmask16 in = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first)) &
                         _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(last));
    return _mm512_mask_blend_ps(in, set1(other), x);
  }

  static void add_rounded(int32_t* at, F x) {
    _mm512_storeu_si512(at, _mm512_add_epi32(_mm512_loadu_si512(at), _mm512_cvtps_epi32(x)));
  }

  static __m512i widen(const uint16_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_bf16(const uint16_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(widen(p), 16)); }
  static F load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_bf16(uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
  }
  static void store_f16(uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
};

/// Words of two bf16, multiplied and added in pairs by vdpbf16ps.
struct Bf16Words {
  using F = __m512;
  static constexpr int kPack = 2;

  static F multiply_add(F a, F b, F acc) {
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
  }

  static void load_row(const void* src, DType, int64_t n, Word* dst) {
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    const auto* p = static_cast<const uint16_t*>(src);
    for (int64_t i = 0; i < n; i += 32) {
      const __mmask32 in = n - i >= 32 ? ~0u : (1u << (n - i)) - 1u;
      const __m512i x = _mm512_maskz_loadu_epi16(in, p + i);
      const __mmask32 finite = _mm512_cmpneq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
      // The tile's rows are padded to 16 channels, so a last half vector is stored as one.
      const __mmask32 room = n - i > 16 ? ~0u : 0xFFFFu;
      _mm512_mask_storeu_epi16(dst + i / 2, room, _mm512_maskz_mov_epi16(finite, x));
    }
  }

  static __m512i interleave(__m512i both) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, both);
  }

  static void pairs(const Word* tile, int64_t rows, int64_t padded_dim, Word* out) {
    for (int64_t r = 0; r < rows; r += 2) {
      const auto* even = reinterpret_cast<const __m256i*>(tile + r * padded_dim / 2);
      const auto* odd = reinterpret_cast<const __m256i*>(tile + (r + 1) * padded_dim / 2);
      for (int64_t d = 0; d < padded_dim; d += 16) {
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(even + d / 16)),
                                                _mm256_loadu_si256(odd + d / 16), 1);
        _mm512_storeu_si512(out + r / 2 * padded_dim + d, interleave(both));
      }
    }
  }

  static void store_row(Word* row, int64_t column, F x) {
    Avx512::store_bf16(reinterpret_cast<uint16_t*>(row) + column, x);
  }
  static void store_pair(Word* at, const F* x) {
    _mm512_storeu_si512(at, interleave((__m512i)_mm512_cvtne2ps_pbh(x[1], x[0])));
  }
};

}  // namespace

const TileKernels& avx512_kernels() {
  static constexpr TileKernels table = Tiles<Avx512, FloatWords<Avx512>>::kernels();
  return table;
}

const TileKernels& avx512_bf16_kernels() {
  static constexpr TileKernels table = Tiles<Avx512, Bf16Words>::kernels();
  return table;
}

}  // namespace fold::cpu
#endif
