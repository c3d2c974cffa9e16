#include "fold/attention.h"

#include "api/attention_checks.h"
#include "api/checks.h"
#include "cpu/backward.h"
#include "cpu/forward.h"
#include "fold/launch.h"

namespace fold {
namespace {

/// The tensors of a forward, which lie in one place.
struct Forward {
  TensorView q, k, v, out, lse;
  AttentionOptions options;
  api::Place place;

  Forward(const TensorView& q_given, const TensorView& k_given, const TensorView& v_given, const TensorView& out_given,
          const TensorView& lse_given, const AttentionOptions& options_given)
      : q(q_given), k(k_given), v(v_given), out(out_given), lse(lse_given), options(options_given) {
    place = api::take_place({{"q", &q},
                             {"k", &k},
                             {"v", &v},
                             {"out", &out},
                             {"lse", &lse},
                             {"sinks", &options.sinks},
                             {"cu_seqlens_q", &options.cu_seqlens_q},
                             {"cu_seqlens_k", &options.cu_seqlens_k}});
  }

  plan::ForwardParams params() const { return api::forward_params(q, k, v, out, lse, options, place); }
};

struct Backward {
  AttentionBackwardTensors tensors;
  AttentionOptions options;
  api::Place place;

  Backward(const AttentionBackwardTensors& tensors_given, const AttentionOptions& options_given)
      : tensors(tensors_given), options(options_given) {
    place = api::take_place({{"q", &tensors.q},
                             {"k", &tensors.k},
                             {"v", &tensors.v},
                             {"out", &tensors.out},
                             {"lse", &tensors.lse},
                             {"dout", &tensors.dout},
                             {"dq", &tensors.dq},
                             {"dk", &tensors.dk},
                             {"dv", &tensors.dv},
                             {"dsinks", &tensors.dsinks},
                             {"sinks", &options.sinks},
                             {"cu_seqlens_q", &options.cu_seqlens_q},
                             {"cu_seqlens_k", &options.cu_seqlens_k}});
  }

  plan::BackwardParams params() const { return api::backward_params(tensors, options, place); }
};

std::string shapes(const char* operation, const TensorView& q, const TensorView& k) {
  return std::string(operation) + ", q " + api::shape_text(q) + ", k " + api::shape_text(k);
}

}  // namespace

int64_t attention_forward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                    const TensorView& out, const TensorView& lse, const AttentionOptions& options) {
  const Forward call(q, k, v, out, lse, options);
  if (call.place.device == Device::cpu) return 0;
  return api::cuda_backend(call.place).attention_forward_workspace(call.params());
}

void attention_forward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                       const TensorView& lse, const AttentionOptions& options, const Launch& launch) {
  const Forward call(q, k, v, out, lse, options);
  if (call.place.device == Device::cpu) return cpu::attention_forward(call.params());
  const plan::Backend& backend = api::cuda_backend(call.place);
  const plan::ForwardParams params = call.params();
  const plan::LaunchParams where = api::checked_launch(launch, call.place, backend.attention_forward_workspace(params));
  api::require_launched(shapes("attention_forward", q, k), call.place, backend.attention_forward(params, where));
}

void attention_forward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                       const TensorView& lse, const AttentionOptions& options) {
  attention_forward(q, k, v, out, lse, options, {});
}

int64_t attention_backward_workspace(const AttentionBackwardTensors& tensors, const AttentionOptions& options) {
  const Backward call(tensors, options);
  if (call.place.device == Device::cpu) return 0;
  return api::cuda_backend(call.place).attention_backward_workspace(call.params());
}

void attention_backward(const AttentionBackwardTensors& tensors, const AttentionOptions& options,
                        const Launch& launch) {
  const Backward call(tensors, options);
  if (call.place.device == Device::cpu) return cpu::attention_backward(call.params());
  const plan::Backend& backend = api::cuda_backend(call.place);
  const plan::BackwardParams params = call.params();
  const plan::LaunchParams where =
      api::checked_launch(launch, call.place, backend.attention_backward_workspace(params));
  api::require_launched(shapes("attention_backward", tensors.q, tensors.k), call.place,
                        backend.attention_backward(params, where));
}

void attention_backward(const AttentionBackwardTensors& tensors, const AttentionOptions& options) {
  attention_backward(tensors, options, {});
}

}  // namespace fold
