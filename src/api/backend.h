#pragma once
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "fold/launch.h"
#include "plan/backend.h"

// Which backend a call goes to: the device of its tensors says so.
namespace fold::api {

struct NamedTensor {
  const char* name;
  TensorView* tensor;  // may be undefined
};

/// Where the tensors of a call lie.
struct Place {
  Device device = Device::cpu;
  int index = 0;

  bool operator==(const Place& other) const {
    return device == other.device && (device == Device::cpu || index == other.index);
  }
};

/// "cpu" or "cuda:0".
std::string place_text(const Place& place);

/// The place of the first tensor, which all others must share. Afterwards the views count as the host's, so that the
/// checks of shapes, types and strides, which touch no memory, serve every device.
Place take_place(std::initializer_list<NamedTensor> tensors);

/// The backend of a CUDA device. Throws fold::Error if its library or a usable device is missing.
const plan::Backend& cuda_backend(const Place& place);

/// Checks the workspace of a launch at that place.
plan::LaunchParams checked_launch(const Launch& launch, const Place& place, int64_t workspace_bytes);

/// Bytes of a part of a workspace, so that the part behind it is aligned as the workspace is.
constexpr int64_t whole_part(int64_t bytes) { return (bytes + 255) / 256 * 256; }

/// Throws fold::Error if a launch was refused. operation: its name and shapes; refusal: null, or the reason.
void require_launched(const std::string& operation, const Place& place, const char* refusal);

/// The same for calls that are short: operation() is asked for where it is needed.
template <std::invocable F>
void require_launched(const F& operation, const Place& place, const char* refusal) {
  if (refusal != nullptr) require_launched(operation(), place, refusal);
}

}  // namespace fold::api
