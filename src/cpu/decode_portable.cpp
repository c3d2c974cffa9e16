#include "cpu/decode_ops_generic.h"
#include "cpu/decode_worker.h"

namespace fold::cpu {

DecodeKernels decode_kernels_portable() { return {sum_range<GenericOps>, score_keys<GenericOps>}; }

}  // namespace fold::cpu
