#if defined(__x86_64__)
#include "cpu/cache_rows.h"

namespace fold::cpu {

CacheKernels cache_kernels_avx2() { return kCacheKernels; }

}  // namespace fold::cpu
#endif
