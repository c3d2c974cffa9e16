#include "cpu/decode_kernels.h"
#include "cpu/decode_ops_generic.h"

namespace fold::cpu {

DecodeKernels decode_kernels_portable() { return kernels_of<GenericOps>(); }

}  // namespace fold::cpu
