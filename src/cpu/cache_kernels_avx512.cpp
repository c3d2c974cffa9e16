#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu/cache_rows.h"

namespace fold::cpu {
namespace {

struct Avx512 {
  static constexpr int kBytes = 64, kLanes = 16, kRows = 4, kVectors = 4;
  using V = __m512i;

  static V zero() { return _mm512_setzero_si512(); }
  static V load(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static void store(int32_t* p, V x) { _mm512_storeu_si512(p, x); }
  static V broadcast(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
  static V multiply_add(V acc, V a, V b) { return _mm512_dpwssd_epi32(acc, a, b); }
};

}  // namespace

CacheKernels cache_kernels_avx512() { return kCacheKernels<Avx512>; }

}  // namespace fold::cpu
#endif
