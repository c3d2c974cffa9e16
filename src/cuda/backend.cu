#include "cuda/attention/backward.h"
#include "cuda/attention/forward.h"
#include "cuda/cache/cache_read.h"
#include "cuda/cache/cache_write.h"
#include "cuda/cache/prefill_keys.h"
#include "cuda/decode/decode.h"
#include "cuda/device.h"
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

const char* run_cache_write(const plan::CacheWriteParams& params, const plan::CacheWriteBounds& bounds,
                            const plan::LaunchParams& launch) {
  return guarded(launch.device,
                 [&] { cache_write(params, bounds, launch.workspace, static_cast<cudaStream_t>(launch.stream)); });
}

const char* run_step_write(const plan::StepParams& params, const plan::LaunchParams& launch) {
  return guarded(launch.device,
                 [&] { step_write(params, launch.workspace, static_cast<cudaStream_t>(launch.stream)); });
}

int64_t decode_bytes(const plan::DecodeParams& params, const plan::DecodeBounds&) { return decode_workspace(params); }

const char* run_decode(const plan::DecodeParams& params, const plan::DecodeBounds& bounds,
                       const plan::LaunchParams& launch) {
  return guarded(launch.device,
                 [&] { decode(params, bounds, launch.workspace, static_cast<cudaStream_t>(launch.stream)); });
}

/// An entry of the table for an operation without a workspace.
template <auto Operation, typename Params>
const char* run_without_workspace(const Params& params, const plan::LaunchParams& launch) {
  return guarded(launch.device, [&] { Operation(params, static_cast<cudaStream_t>(launch.stream)); });
}

const char* run_attention_forward(const plan::ForwardParams& params, const plan::LaunchParams& launch) {
  return guarded(launch.device,
                 [&] { attention_forward(params, launch.workspace, static_cast<cudaStream_t>(launch.stream)); });
}

const char* run_attention_backward(const plan::BackwardParams& params, const plan::LaunchParams& launch) {
  return guarded(launch.device,
                 [&] { attention_backward(params, launch.workspace, static_cast<cudaStream_t>(launch.stream)); });
}

cudaStream_t stream_of(const plan::LaunchParams& launch) { return static_cast<cudaStream_t>(launch.stream); }

const char* run_allocate(int64_t bytes, void** memory, const plan::LaunchParams& launch) {
  return guarded(launch.device, [&] { *memory = allocate(bytes, stream_of(launch)); });
}

const char* run_release(void* memory, const plan::LaunchParams& launch) {
  return guarded(launch.device, [&] { release(memory, stream_of(launch)); });
}

const char* run_clear(void* memory, int64_t bytes, const plan::LaunchParams& launch) {
  return guarded(launch.device, [&] { clear(memory, bytes, stream_of(launch)); });
}

const char* run_copy(void* to, const void* from, int64_t bytes, const plan::LaunchParams& launch) {
  return guarded(launch.device, [&] { copy(to, from, bytes, stream_of(launch)); });
}

const char* run_wait(const plan::LaunchParams& launch) {
  return guarded(launch.device, [&] { wait(stream_of(launch)); });
}

const char* run_set_words(int32_t* words, const plan::WordChange* changes, int64_t count,
                          const plan::LaunchParams& launch) {
  return guarded(launch.device, [&] { set_words(words, changes, count, stream_of(launch)); });
}

constexpr plan::Backend kBackend = {
    .version = plan::kBackendVersion,
    .unavailable = unavailable,
    .cache_write_workspace = cache_write_workspace,
    .cache_write = run_cache_write,
    .step_write_workspace = step_write_workspace,
    .step_write = run_step_write,
    .decode_workspace = decode_bytes,
    .decode = run_decode,
    .add_partials = run_without_workspace<add_partials, plan::AddPartialsParams>,
    .finish = run_without_workspace<finish, plan::FinishParams>,
    .cache_read = run_without_workspace<cache_read, plan::CacheReadParams>,
    .prefill_keys = run_without_workspace<prefill_keys, plan::PrefillKeysParams>,
    .attention_forward_workspace = attention_forward_workspace,
    .attention_forward = run_attention_forward,
    .attention_backward_workspace = attention_backward_workspace,
    .attention_backward = run_attention_backward,
    .allocate = run_allocate,
    .release = run_release,
    .clear = run_clear,
    .copy = run_copy,
    .wait = run_wait,
    .set_words = run_set_words,
};

}  // namespace
}  // namespace fold::cuda

extern "C" __attribute__((visibility("default"))) const fold::plan::Backend* fold_cuda_backend() {
  return &fold::cuda::kBackend;
}
