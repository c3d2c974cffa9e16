#pragma once
#include <tvm/ffi/extra/c_env_api.h>

#include <optional>

#include "fold/launch.h"
#include "tensor.h"

namespace fold::binding {

/// Where a call on `on`'s device runs: on the framework's current stream, in a workspace of the framework's allocator.
/// On the CPU there is nothing to say.
class Launching {
 public:
  /// Of an operation that needs no workspace.
  explicit Launching(const TensorView& on) {
    if (on.device == Device::cuda) launch_.stream = TVMFFIEnvGetStream(kDLCUDA, on.device_index);
  }

  /// workspace(): bytes; asked for on a GPU alone.
  template <class F>
  Launching(const TensorView& on, const F& workspace) : Launching(on, {}, workspace) {}

  /// given: the caller's workspace or none, taken if it is large enough.
  template <class F>
  Launching(const TensorView& on, const TensorView& given, const F& workspace) : Launching(on) {
    if (on.device != Device::cuda) return;
    const int64_t workspace_bytes = workspace();
    if (given.defined() && given.numel() >= workspace_bytes) {
      launch_.workspace = given;
      return;
    }
    if (workspace_bytes == 0) return;
    allocated_ = workspace_bytes;
    const int64_t shape[] = {workspace_bytes};
    memory_ = tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, tvm::ffi::ShapeView(shape, 1),
                                             DLDataType{kDLUInt, 8, 1}, DLDevice{kDLCUDA, on.device_index});
    launch_.workspace = TensorView(memory_->data_ptr(), DType::u8, {workspace_bytes});
    launch_.workspace.device = on.device;
    launch_.workspace.device_index = on.device_index;
  }

  const Launch& launch() const { return launch_; }
  /// Bytes that had to be.
  int64_t allocated() const { return allocated_; }

 private:
  int64_t allocated_ = 0;
  std::optional<tvm::ffi::Tensor> memory_;
  Launch launch_;
};

}  // namespace fold::binding
