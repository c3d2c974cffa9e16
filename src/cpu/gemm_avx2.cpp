#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu/gemm_tiles.h"

namespace fold::cpu {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int kLanes = 8, kRows = 6, kVectors = 2;

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F set1_word(const Word* p) { return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(*p))); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static float sum(F x) {
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
  }
  static float max_lane(F x) {
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
  }
  static float first_lane(F x) { return _mm256_cvtss_f32(x); }

  static F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F times_pow2(F p, F n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
  }
  static F keep(F x, float other, int32_t column, int32_t first, int32_t last) {
    const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(column));
    const __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                        _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(last - 1)));
    return _mm256_blendv_ps(x, set1(other), _mm256_castsi256_ps(out));
  }

  static void add_rounded(int32_t* at, F x) {
    auto* p = reinterpret_cast<__m256i*>(at);
    _mm256_storeu_si256(p, _mm256_add_epi32(_mm256_loadu_si256(p), _mm256_cvtps_epi32(x)));
  }

  static F load_bf16(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static void store_bf16(uint16_t* p, F x) {
    alignas(32) float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < kLanes; ++i) p[i] = numerics::to_bf16(lanes[i]);
  }
  static void store_f16(uint16_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
};

}  // namespace

const TileKernels& avx2_kernels() {
  static constexpr TileKernels table = Tiles<Avx2, FloatWords<Avx2>>::kernels();
  return table;
}

}  // namespace fold::cpu
#endif
