#pragma once
#include <memory>

#include "attention_testing.h"
#include "device_memory.h"
#include "fold/launch.h"

// Problems of attention_testing.h, run on the device through the public API.
namespace fold::testing {

/// Copies of tensors in device memory; results come back with fetch().
class Device {
 public:
  /// A view like `host`, whose elements are copied. Broadcast strides stay.
  TensorView put(const TensorView& host) {
    if (!host.defined()) return host;
    int64_t elements = 1;
    for (int i = 0; i < host.ndim; ++i) {
      if (host.shape[i] == 0) elements = 0;
      if (elements > 0) elements += (host.shape[i] - 1) * host.strides[i];
    }
    if (elements == 0) return on_device(host, nullptr);  // as torch's empty tensors are
    const auto* const bytes = static_cast<const char*>(host.data);
    copies_.push_back(
        std::make_unique<OnDevice<char>>(std::vector<char>(bytes, bytes + elements * dtype_size(host.dtype))));
    return on_device(host, copies_.back()->data());
  }

  /// Where a result goes; every byte is written over before.
  TensorView result(Tensor& host) {
    host.bytes.assign(host.bytes.size(), static_cast<char>(0xff));
    const TensorView view = put(host.view());
    if (view.data == nullptr) return view;
    results_.push_back({&host, copies_.back().get()});
    return view;
  }

  Launch launch(int64_t workspace_bytes) {
    Launch where;
    copies_.push_back(std::make_unique<OnDevice<char>>(std::vector<char>(static_cast<size_t>(workspace_bytes), 0x5a)));
    where.workspace = on_device(TensorView(nullptr, DType::u8, {workspace_bytes}), copies_.back()->data());
    return where;
  }

  AttentionOptions options(AttentionOptions o) {
    for (TensorView* x : {&o.sinks, &o.cu_seqlens_q, &o.cu_seqlens_k}) *x = put(*x);
    return o;
  }

  void fetch() {
    check(cudaDeviceSynchronize());
    for (const auto& [host, copy] : results_) host->bytes = copy->back();
  }

 private:
  std::vector<std::unique_ptr<OnDevice<char>>> copies_;
  std::vector<std::pair<Tensor*, OnDevice<char>*>> results_;
};

/// out and lse of a problem, from the device.
inline void forward_on_device(Problem& p) {
  Device device;
  const TensorView q = device.put(p.q.view()), k = device.put(p.k.view()), v = device.put(p.v.view());
  const TensorView out = device.result(p.out), lse = device.result(p.lse);
  const AttentionOptions options = device.options(p.options);
  attention_forward(q, k, v, out, lse, options, device.launch(attention_forward_workspace(q, k, v, out, lse, options)));
  device.fetch();
}

}  // namespace fold::testing
