#include "cpu/cache_rows.h"

namespace fold::cpu {
namespace {

struct Generic {
  static constexpr int kBytes = 16, kLanes = 4, kRows = 2, kVectors = 2;
  typedef int32_t V __attribute__((vector_size(16), aligned(4), may_alias));

  static V zero() { return V{}; }
  static V load(const uint32_t* p) { return *reinterpret_cast<const V*>(p); }
  static void store(int32_t* p, V x) { *reinterpret_cast<V*>(p) = x; }
  static V broadcast(uint32_t word) { return V{} + static_cast<int32_t>(word); }
  static V multiply_add(V acc, V a, V b) { return acc + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16); }
};

}  // namespace

CacheKernels cache_kernels_portable() { return kCacheKernels<Generic>; }

}  // namespace fold::cpu
