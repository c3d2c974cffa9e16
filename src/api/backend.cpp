#include "api/backend.h"

#include <dlfcn.h>

#include <filesystem>

#include "api/checks.h"

namespace fold::api {
namespace {

constexpr char kLibrary[] = "libfold_cuda.so";

/// The library's table, or why there is none.
struct Loaded {
  const plan::Backend* backend = nullptr;
  std::string problem;
};

/// Looks beside the library (or program) that holds this code.
Loaded load() {
  Dl_info self{};
  std::error_code error;
  if (dladdr(reinterpret_cast<const void*>(&load), &self) == 0) return {nullptr, "this library's place is unknown"};
  const std::filesystem::path here = std::filesystem::canonical(self.dli_fname, error);
  const std::filesystem::path path = here.parent_path() / kLibrary;
  if (error || !std::filesystem::exists(path, error)) {
    return {nullptr, std::string(kLibrary) + " is not beside " + here.filename().string()};
  }
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {nullptr, dlerror()};
  const auto symbol = reinterpret_cast<plan::BackendSymbol>(dlsym(library, plan::kBackendSymbol));
  if (symbol == nullptr) return {nullptr, dlerror()};
  const plan::Backend* backend = symbol();
  if (backend->version != plan::kBackendVersion) {
    return {nullptr, path.string() + " has version " + std::to_string(backend->version) + " of the interface, not " +
                         std::to_string(plan::kBackendVersion)};
  }
  return {backend, ""};
}

std::string device_name(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

}  // namespace

std::string place_text(const Place& place) {
  return device_name(place.device) + (place.device == Device::cpu ? "" : ":" + std::to_string(place.index));
}

Place take_place(std::initializer_list<NamedTensor> tensors) {
  const TensorView& first = *tensors.begin()->tensor;
  const Place place = {first.device, first.device_index};
  for (const auto& [name, tensor] : tensors) {
    const Place its = {tensor->device, tensor->device_index};
    if (tensor->defined() && !(its == place)) {
      const bool same_kind = its.device == place.device;
      fail_type(std::string(name) + ".device", same_kind ? place_text(its) : device_name(its.device),
                "supported: " + place_text(place));
    }
    tensor->device = Device::cpu;
  }
  return place;
}

const plan::Backend& cuda_backend(const Place& place) {
  static const Loaded loaded = load();
  const char* problem = loaded.backend == nullptr ? loaded.problem.c_str() : loaded.backend->unavailable(place.index);
  if (problem != nullptr) fail_type("device", place_text(place), std::string("supported: cpu (") + problem + ")");
  return *loaded.backend;
}

plan::LaunchParams checked_launch(const Launch& launch, const Place& place, int64_t workspace_bytes) {
  plan::LaunchParams params{.device = place.index, .stream = launch.stream, .workspace = nullptr};
  if (workspace_bytes == 0) return params;
  TensorView workspace = launch.workspace;
  const Place its = {workspace.device, workspace.device_index};
  if (workspace.defined() && !(its == place)) {
    fail_type("workspace.device", place_text(its), "supported: " + place_text(place));
  }
  workspace.device = Device::cpu;
  require_tensor("workspace", workspace, 1, {DType::u8});
  require_contiguous("workspace", workspace);
  if (workspace.shape[0] < workspace_bytes) {
    fail_value("workspace.shape", shape_text(workspace), "at least " + std::to_string(workspace_bytes) + " bytes");
  }
  if (reinterpret_cast<uintptr_t>(workspace.data) % 256 != 0) {
    fail_value("workspace address", std::to_string(reinterpret_cast<uintptr_t>(workspace.data)), "a multiple of 256");
  }
  params.workspace = workspace.data;
  return params;
}

void require_launched(const std::string& operation, const Place& place, const char* refusal) {
  if (refusal != nullptr) fail_value(operation + " on " + place_text(place), refusal, "expected: a launch");
}

}  // namespace fold::api
