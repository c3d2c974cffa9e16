#include <stdexcept>

#include "cuda/attention/backward.h"
#include "cuda/attention/forward.h"

// Attention over whole sequences runs on instructions that are not emulated.
namespace fold::cuda {

int64_t attention_forward_workspace(const plan::ForwardParams&) { return 0; }
int64_t attention_backward_workspace(const plan::BackwardParams&) { return 0; }
void attention_forward(const plan::ForwardParams&, void*, cudaStream_t) {
  throw std::runtime_error("attention_forward is not emulated");
}
void attention_backward(const plan::BackwardParams&, void*, cudaStream_t) {
  throw std::runtime_error("attention_backward is not emulated");
}

}  // namespace fold::cuda
