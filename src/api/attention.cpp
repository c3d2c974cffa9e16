#include "fold/attention.h"

#include "api/attention_checks.h"
#include "cpu/backward.h"
#include "cpu/forward.h"

namespace fold {

void attention_forward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                       const TensorView& lse, const AttentionOptions& options) {
  cpu::attention_forward(api::forward_params(q, k, v, out, lse, options));
}

void attention_backward(const AttentionBackwardTensors& tensors, const AttentionOptions& options) {
  cpu::attention_backward(api::backward_params(tensors, options));
}

}  // namespace fold
