#include "cuda/attention/backward.h"
#include "cuda/attention/forward.h"
#include "cuda/cache/cache_read.h"
#include "cuda/cache/cache_write.h"
#include "cuda/cache/prefill_keys.h"
#include "cuda/decode/decode.h"
#include "cuda/device.h"
#include "cuda/launch_group.h"
#include "cuda/memory/memory.h"
#include "cuda/partials/partials.h"
#include "plan/backend.h"

// The library's only export: the table of what it can do.
namespace fold::cuda {
namespace {

/// What the thread's last refused call said.
thread_local std::string refusal;

/// Makes a device the current one for as long as it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) : before_(current_device()) {
    if (device != before_) require_success(cudaSetDevice(device), "the tensors' device");
    changed_ = device != before_;
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_;
  bool changed_ = false;
};

/// Runs f on a device; null, or why it could not. No exception leaves the library.
template <typename F>
const char* guarded(int device, const F& f) {
  try {
    const CurrentDevice current(device);
    f();
    return nullptr;
  } catch (const std::exception& e) {
    refusal = e.what();
    return refusal.c_str();
  }
}

const char* unavailable(int device) { return Devices::all().problem(device); }

int64_t decode_bytes(const plan::DecodeParams& params, const plan::DecodeBounds&) { return decode_workspace(params); }

/// The write's part is in front.
int64_t decode_step_bytes(const plan::StepParams& write, const plan::DecodeParams& params) {
  return step_write_workspace(write) + decode_workspace(params);
}

void decode_after_write(const plan::StepParams& write, const plan::DecodeParams& params, void* workspace,
                        cudaStream_t stream) {
  step_write(write, workspace, stream);
  auto* const behind = static_cast<uint8_t*>(workspace) + step_write_workspace(write);
  decode(params, {write.max_pages}, &write, behind, stream);
}

void decode_alone(const plan::DecodeParams& params, const plan::DecodeBounds& bounds, void* workspace,
                  cudaStream_t stream) {
  decode(params, bounds, nullptr, workspace, stream);
}

cudaStream_t stream_of(const plan::LaunchParams& launch) { return static_cast<cudaStream_t>(launch.stream); }

// Entries of the table, by what an operation takes before its stream.

template <auto Operation, typename... Args>
const char* run(Args... args, const plan::LaunchParams& launch) {
  return guarded(launch.device, [&] { Operation(args..., stream_of(launch)); });
}

template <auto Operation, typename... Args>
const char* run_with_workspace(Args... args, const plan::LaunchParams& launch) {
  return guarded(launch.device, [&] { Operation(args..., launch.workspace, stream_of(launch)); });
}

/// Its kernels are submitted together.
template <auto Operation, typename... Args>
const char* run_as_group(Args... args, const plan::LaunchParams& launch) {
  return guarded(launch.device, [&] {
    LaunchGroup group(stream_of(launch));
    Operation(args..., launch.workspace, stream_of(launch));
    group.submit();
  });
}

const char* run_allocate(int64_t bytes, void** memory, const plan::LaunchParams& launch) {
  return guarded(launch.device, [&] { *memory = allocate(bytes, stream_of(launch)); });
}

constexpr plan::Backend kBackend = {
    .version = plan::kBackendVersion,
    .unavailable = unavailable,
    .cache_write_workspace = cache_write_workspace,
    .cache_write = run_with_workspace<cache_write, const plan::CacheWriteParams&, const plan::CacheWriteBounds&>,
    .decode_workspace = decode_bytes,
    .decode = run_as_group<decode_alone, const plan::DecodeParams&, const plan::DecodeBounds&>,
    .decode_step_workspace = decode_step_bytes,
    .decode_step = run_as_group<decode_after_write, const plan::StepParams&, const plan::DecodeParams&>,
    .add_partials = run<add_partials, const plan::AddPartialsParams&>,
    .finish = run<finish, const plan::FinishParams&>,
    .cache_read = run<cache_read, const plan::CacheReadParams&>,
    .prefill_keys = run<prefill_keys, const plan::PrefillKeysParams&>,
    .attention_forward_workspace = attention_forward_workspace,
    .attention_forward = run_with_workspace<attention_forward, const plan::ForwardParams&>,
    .attention_backward_workspace = attention_backward_workspace,
    .attention_backward = run_with_workspace<attention_backward, const plan::BackwardParams&>,
    .allocate = run_allocate,
    .release = run<release, void*>,
    .clear = run<clear, void*, int64_t>,
    .copy = run<copy, void*, const void*, int64_t>,
    .wait = run<wait>,
    .set_words = run<set_words, int32_t*, const plan::WordChange*, int64_t>,
};

}  // namespace
}  // namespace fold::cuda

extern "C" __attribute__((visibility("default"))) const fold::plan::Backend* fold_cuda_backend() {
  return &fold::cuda::kBackend;
}
