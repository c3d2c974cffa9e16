#pragma once
#include <memory>
#include <random>

#include "device_memory.h"
#include "fold/kv_cache.h"
#include "fold/launch.h"
#include "numerics/ieee.h"

// Caches that own their pages, one on the CPU and one on the device, and rows for both.
namespace fold::testing {

constexpr int64_t kHeads = 8, kKvHeads = 2;

/// (rows, heads, D), normal, the same on both sides.
class SharedRows {
 public:
  SharedRows(unsigned seed, int64_t rows, int64_t heads, int64_t head_dim, DType dtype = DType::bf16)
      : rows_(rows), heads_(heads), d_(head_dim), dtype_(dtype), host_(values(seed)), device_(host_) {}

  /// Rows first .. first + count - 1, (count, heads, D).
  TensorView view(Device device, int64_t first, int64_t count) {
    return placed(TensorView(nullptr, dtype_, {count, heads_, d_}), device, first);
  }

  /// The same as (batch, count / batch, heads, D).
  TensorView tokens(Device device, int64_t first, int64_t count, int64_t batch) {
    return placed(TensorView(nullptr, dtype_, {batch, count / batch, heads_, d_}), device, first);
  }

 private:
  std::vector<uint8_t> values(unsigned seed) const {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<uint8_t> bytes;
    for (int64_t i = 0; i < rows_ * heads_ * d_; ++i) {
      const float x = normal(random);
      const uint16_t half = dtype_ == DType::f16 ? numerics::to_f16(x) : numerics::to_bf16(x);
      const auto* from =
          dtype_ == DType::f32 ? reinterpret_cast<const uint8_t*>(&x) : reinterpret_cast<const uint8_t*>(&half);
      bytes.insert(bytes.end(), from, from + dtype_size(dtype_));
    }
    return bytes;
  }

  TensorView placed(TensorView view, Device device, int64_t first) {
    view.data = (device == Device::cpu ? host_.data() : device_.data()) + first * heads_ * d_ * dtype_size(dtype_);
    view.device = device;
    return view;
  }

  int64_t rows_, heads_, d_;
  DType dtype_;
  std::vector<uint8_t> host_;
  OnDevice<uint8_t> device_;
};

/// A result on one side, filled with what must not stay.
template <typename T>
class Result {
 public:
  Result(Device device, DType dtype, std::initializer_list<int64_t> shape) : view_(nullptr, dtype, shape) {
    host_.resize(static_cast<size_t>(view_.numel()) * dtype_size(dtype) / sizeof(T), T(77));
    view_.data = host_.data();
    if (device == Device::cpu) return;
    device_ = std::make_unique<OnDevice<T>>(host_);
    view_ = on_device(view_, device_->data());
  }
  const TensorView& view() const { return view_; }
  std::vector<T> values() const { return device_ ? device_->back() : host_; }
  void spoil() { device_->set(host_); }  ///< on the device

 private:
  TensorView view_;
  std::vector<T> host_;
  std::unique_ptr<OnDevice<T>> device_;
};

inline TensorView numbers(const std::vector<int32_t>& values) {
  return {const_cast<int32_t*>(values.data()), DType::i32, {static_cast<int64_t>(values.size())}};
}

inline KVCacheOptions cache_options(int64_t head_dim, Device device) {
  KVCacheOptions options;
  options.layout = {.n_kv_heads = kKvHeads, .head_dim = head_dim, .page_size = 64};
  options.n_heads = kHeads;
  options.batch = 3;
  options.max_len = 1500;
  options.depth = 12;
  options.sinks = {0.5f, -1, 2, 0, 1, 3, -4, 0.25f};
  options.device = device;
  return options;
}

/// Lengths, page ids and bytes of every request's pages.
inline std::vector<uint8_t> contents(const KVCache& cache) {
  std::vector<uint8_t> all;
  const TensorView pages = cache.storage().storage;
  const int64_t bytes = pages.shape[1];
  check(cudaDeviceSynchronize());
  const auto add = [&all](const void* from, int64_t count, bool device) {
    all.resize(all.size() + static_cast<size_t>(count));
    void* to = all.data() + all.size() - count;
    if (device) {
      check(cudaMemcpy(to, from, static_cast<size_t>(count), cudaMemcpyDeviceToHost));
    } else {
      std::memcpy(to, from, static_cast<size_t>(count));
    }
  };
  for (const int64_t id : cache.table().requests()) {
    const int64_t length = cache.table().length(id);
    add(&length, sizeof(length), false);
    for (const int32_t page : cache.table().pages(id)) {
      add(&page, sizeof(page), false);
      add(pages.as<uint8_t>() + page * bytes, bytes, pages.device == Device::cuda);
    }
  }
  return all;
}

}  // namespace fold::testing
