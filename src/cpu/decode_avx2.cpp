#if defined(__x86_64__)
#include "cpu/decode_kernels.h"
#include "cpu/decode_ops_generic.h"

namespace fold::cpu {

DecodeKernels decode_kernels_avx2() { return kernels_of<GenericOps>(); }

}  // namespace fold::cpu
#endif
