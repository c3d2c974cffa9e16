#include "cpu/decode_ops_generic.h"
#include "cpu/decode_worker.h"

namespace fold::cpu {

DecodeKernels decode_kernels_portable() { return kernels_of<GenericOps>(); }

}  // namespace fold::cpu
