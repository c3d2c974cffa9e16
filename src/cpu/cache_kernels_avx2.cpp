#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu/cache_rows.h"

namespace fold::cpu {
namespace {

struct Avx2 {
  static constexpr int kBytes = 32, kLanes = 8, kRows = 4, kVectors = 2;
  using V = __m256i;

  static V zero() { return _mm256_setzero_si256(); }
  static V load(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const V*>(p)); }
  static void store(int32_t* p, V x) { _mm256_storeu_si256(reinterpret_cast<V*>(p), x); }
  static V broadcast(uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }
  static V multiply_add(V acc, V a, V b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
};

}  // namespace

CacheKernels cache_kernels_avx2() { return kCacheKernels<Avx2>; }

}  // namespace fold::cpu
#endif
