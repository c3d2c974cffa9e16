#include "cpu/cache_rows.h"

namespace fold::cpu {

CacheKernels cache_kernels_portable() { return kCacheKernels; }

}  // namespace fold::cpu
