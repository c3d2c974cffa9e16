#include "cuda/launch_group.h"

// Here every kernel is launched by itself, as where a stream is being captured.
namespace fold::cuda {

LaunchGroup::LaunchGroup(cudaStream_t stream) : stream_(stream) {}
LaunchGroup::~LaunchGroup() = default;
void LaunchGroup::submit() {}

}  // namespace fold::cuda
