#include "cuda/launch.h"
#include "cuda/partials/partials.cuh"
#include "cuda/partials/partials.h"

namespace fold::cuda {

using namespace partials;

void add_partials(const plan::AddPartialsParams& params, cudaStream_t stream) {
  if (params.rows == 0) return;
  launch_kernel(add_kernel, a_warp_each(params.rows, kThreads), stream, "the sum of partials", params);
}

void finish(const plan::FinishParams& params, cudaStream_t stream) {
  const int64_t rows = params.batch * params.tokens * params.heads;
  if (rows == 0) return;
  const auto kernel = params.head_dim == 64    ? finish_kernel<64>
                      : params.head_dim == 128 ? finish_kernel<128>
                                               : finish_kernel<256>;
  launch_kernel(kernel, a_warp_each(rows, kThreads), stream, "the finish of partials", params);
}

}  // namespace fold::cuda
