#pragma once
#include "cache_write_testing.h"

// A pool of pages with requests in it, and tensors, the same on both sides.
namespace fold::testing {

/// A tensor of the host and its copy on the device.
template <typename T>
struct Both {
  Both(DType type, std::initializer_list<int64_t> dims, std::vector<T> values)
      : host(std::move(values)), device(host), shape(nullptr, type, dims) {}

  TensorView here() {
    TensorView view = shape;
    view.data = host.data();
    return view;
  }
  TensorView there() const { return on_device(shape, device.data()); }
  void expect_same(const char* what) const { fold::testing::expect_same(device.back(), host, what); }

  std::vector<T> host;
  OnDevice<T> device;
  TensorView shape;
};

template <typename T>
Both<T> filled(DType type, std::initializer_list<int64_t> dims, T value) {
  int64_t size = 1;
  for (const int64_t d : dims) size *= d;
  return {type, dims, std::vector<T>(static_cast<size_t>(size), value)};
}

inline Both<float> normal(Random& random, std::initializer_list<int64_t> dims, float size = 1) {
  int64_t count = 1;
  for (const int64_t d : dims) count *= d;
  std::vector<float> values(static_cast<size_t>(count));
  std::normal_distribution<float> distribution;
  for (float& x : values) x = size * distribution(random);
  return {DType::f32, dims, std::move(values)};
}

inline Both<int32_t> integers(const std::vector<int32_t>& values) {
  return {DType::i32, {static_cast<int64_t>(values.size())}, values};
}

/// Requests on scattered pages, the same on both sides, and queries for them.
struct Scene {
  Scene(const CacheLayout& cache_layout, const std::vector<int64_t>& lengths, int64_t room, double hard = 0)
      : layout(cache_layout),
        batch(random, layout, capacity(lengths, room)),
        pools(layout, batch.pool_pages),
        requests(static_cast<int64_t>(lengths.size())) {
    write_both(pools, batch.call(random, layout, lengths, hard));
    for (const int64_t n : batch.lengths) before.push_back(static_cast<int32_t>(n));
  }

  static std::vector<int64_t> capacity(std::vector<int64_t> lengths, int64_t room) {
    for (int64_t& n : lengths) n += room;
    return lengths;
  }

  Both<int32_t> table() const { return {DType::i32, {requests, batch.width}, batch.table}; }

  const CacheLayout layout;
  Random random{5};
  Batch batch;
  BothPools pools;
  int64_t requests;
  std::vector<int32_t> before;
};

constexpr int64_t kGroup = 4;  ///< query heads of a KV head

}  // namespace fold::testing
