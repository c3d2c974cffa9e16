#pragma once
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>

#include "cache_testing.h"
#include "device_memory.h"
#include "fold/launch.h"

// One cache write on both backends, and hard data for it. Pools are compared whole: bytes that are not written start
// alike and must stay so.
namespace fold::testing {

using Random = std::mt19937;

inline int64_t below(Random& random, int64_t end) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(end));
}

/// A row of d channels that is hard to store: kind 0 is a plain one.
inline std::vector<float> hard_row(Random& random, int kind, int64_t d) {
  std::normal_distribution<float> normal;
  std::vector<float> row(static_cast<size_t>(d));
  for (float& x : row) x = normal(random);
  const auto rotated = [&] { numerics::rotate(row.data(), static_cast<int>(d)); };  // so that it is stored as it was
  switch (kind) {
    case 1:
      std::fill(row.begin(), row.end(), 0.0f);
      break;
    case 2:  // subnormal in fp32
      for (float& x : row) x *= 1e-40f;
      break;
    case 3:  // below the least scale
      for (float& x : row) x *= 1e-32f;
      break;
    case 4:  // rotates to infinity
      for (float& x : row) x = x < 0 ? -3e38f : 3e38f;
      break;
    case 5:  // the largest scales: remainders times 256 overflow
      for (float& x : row) x = 3.3e38f * std::tanh(x);
      row[0] = 3.3e38f;
      for (float& x : row) x = std::ldexp(x, -4);
      rotated();
      for (float& x : row) x = std::ldexp(x, 4);
      break;
    case 6:
      row[static_cast<size_t>(below(random, d))] = NAN;
      break;
    case 7:
      row[static_cast<size_t>(below(random, d))] = below(random, 2) == 0 ? INFINITY : -INFINITY;
      break;
    case 8:  // ties in a and in b
      for (float& x : row) x = static_cast<float>(below(random, 2 * 127 * 512) - 127 * 512) / 512.0f;
      row[0] = 127.0f;
      rotated();
      break;
    case 9:  // ties in a, b = -128
      for (float& x : row) x = static_cast<float>(below(random, 254) - 127) + 0.5f;
      row[0] = 127.0f;
      rotated();
      break;
    case 10:  // one channel
      for (float& x : row) x = 0;
      row[static_cast<size_t>(below(random, d))] = 1e20f * normal(random);
      break;
    case 11:  // 40 powers of two
      for (float& x : row) x *= std::ldexp(1.0f, static_cast<int>(below(random, 40)) - 20);
      break;
    default:
      break;
  }
  return row;
}
constexpr int kRowKinds = 12;

/// K or V of some tokens: (tokens, heads, d) by strides.
struct Rows {
  std::vector<uint8_t> bytes;
  DType dtype = DType::f32;
  int64_t first = 0, stride_t = 0, stride_h = 0;  // elements
};

/// hard: the share of rows that are not plain. pad: elements between tokens; first: elements before the first row.
inline Rows make_rows(Random& random, int64_t tokens, int64_t heads, int64_t d, DType dtype, double hard,
                      int64_t first = 0, int64_t pad = 0) {
  Rows rows{{}, dtype, first, heads * d + pad, d};
  const int64_t elements = first + std::max<int64_t>(tokens, 1) * rows.stride_t;
  rows.bytes.resize(static_cast<size_t>(elements * dtype_size(dtype)), 0x7F);
  std::bernoulli_distribution is_hard(hard);
  for (int64_t row = 0; row < tokens * heads; ++row) {
    const int kind = is_hard(random) ? static_cast<int>(below(random, kRowKinds)) : 0;
    const std::vector<float> x = hard_row(random, kind, d);
    for (int64_t i = 0; i < d; ++i) {
      const int64_t at = first + row / heads * rows.stride_t + row % heads * rows.stride_h + i;
      const float value = x[static_cast<size_t>(i)];
      const uint16_t half = dtype == DType::f16 ? numerics::to_f16(value) : numerics::to_bf16(value);
      const void* from = dtype == DType::f32 ? static_cast<const void*>(&value) : &half;
      std::memcpy(rows.bytes.data() + at * dtype_size(dtype), from, static_cast<size_t>(dtype_size(dtype)));
    }
  }
  return rows;
}

/// One cache write, in host memory.
struct Call {
  Rows k, v;
  int64_t tokens = 0;  // T_total
  std::vector<int32_t> table, seqlens, cu;
  std::vector<int64_t> slots;  // empty: no slot mapping

  int64_t batch() const { return static_cast<int64_t>(seqlens.size()); }
};

/// The tensors of a call: where its memory is, the host's or copies on the device.
class CallTensors {
 public:
  CallTensors(const Call& call, const CacheLayout& layout) : call_(call), layout_(layout) {}

  /// Copies what the call holds now; call before device().
  void upload() {
    const auto put = [](auto& to, const auto& from) {
      if (to) {
        to->set(from);
      } else {
        to.emplace(from);
      }
    };
    put(k_, call_.k.bytes);
    put(v_, call_.v.bytes);
    put(table_, call_.table);
    put(seqlens_, call_.seqlens);
    put(cu_, call_.cu);
    put(slots_, call_.slots);
  }

  CacheWriteArgs host() const {
    return args({call_.k.bytes.data(), call_.v.bytes.data(), call_.table.data(), call_.seqlens.data(), call_.cu.data(),
                 call_.slots.data()},
                Device::cpu);
  }
  CacheWriteArgs device() const {
    return args({k_->data(), v_->data(), table_->data(), seqlens_->data(), cu_->data(), slots_->data()}, Device::cuda);
  }

 private:
  struct Pointers {
    const void *k, *v, *table, *seqlens, *cu, *slots;
  };

  CacheWriteArgs args(const Pointers& at, Device device) const {
    const auto view = [device](const void* data, DType dtype, std::initializer_list<int64_t> shape) {
      TensorView v(const_cast<void*>(data), dtype, shape);
      v.device = device;
      return v;
    };
    const auto rows = [&](const void* data, const Rows& r) {
      const auto* first = static_cast<const uint8_t*>(data) + r.first * dtype_size(r.dtype);
      TensorView v = view(first, r.dtype, {call_.tokens, layout_.n_kv_heads, layout_.head_dim});
      v.strides = {r.stride_t, r.stride_h, 1};
      return v;
    };
    const int64_t batch = call_.batch(), width = batch == 0 ? 0 : static_cast<int64_t>(call_.table.size()) / batch;
    return {.k = rows(at.k, call_.k),
            .v = rows(at.v, call_.v),
            .block_table = view(at.table, DType::i32, {batch, width}),
            .seqlens = view(at.seqlens, DType::i32, {batch}),
            .cu_seqlens = view(at.cu, DType::i32, {batch + 1}),
            .slot_mapping = call_.slots.empty() ? TensorView() : view(at.slots, DType::i64, {call_.tokens})};
  }

  const Call& call_;
  const CacheLayout layout_;
  std::optional<OnDevice<uint8_t>> k_, v_;
  std::optional<OnDevice<int32_t>> table_, seqlens_, cu_;
  std::optional<OnDevice<int64_t>> slots_;
};

/// The same pool on the host and, between two guards, on the device.
class BothPools {
 public:
  /// gap: bytes between pages; shift: bytes from an aligned address to the first page.
  BothPools(const CacheLayout& layout, int64_t pages, int64_t gap = 0, int64_t shift = 0)
      : layout_(layout),
        sections_(page_sections(layout)),
        pages_(pages),
        stride_(sections_.bytes + gap),
        start_(kGuard + shift),
        filled_(random_bytes(start_ + pages * stride_ + kGuard)),
        host_(filled_),
        device_(filled_) {}

  CacheStorage host() { return storage(host_.data(), Device::cpu); }
  CacheStorage device() const { return storage(device_.data(), Device::cuda); }
  const CacheLayout& layout() const { return layout_; }
  const PageSections& sections() const { return sections_; }

  /// On the host, bytes of a page become what they were at first.
  void restore(int64_t page, int64_t begin, int64_t end) {
    const int64_t at = start_ + page * stride_;
    std::copy(filled_.begin() + at + begin, filled_.begin() + at + end, host_.begin() + at + begin);
  }

  /// The host's pages become the device's.
  void adopt_pages() {
    const std::vector<uint8_t> got = device_.back();
    std::copy(got.begin() + start_, got.begin() + start_ + pages_ * stride_, host_.begin() + start_);
  }

  /// The device's pages become the host's.
  void give_pages() { device_.set(host_); }

  /// Every byte, those around the pages included.
  void expect_same(const std::string& what) const {
    const std::vector<uint8_t> got = device_.back();
    if (got == host_) return;
    const auto differ = std::mismatch(got.begin(), got.end(), host_.begin());
    const int64_t at = differ.first - got.begin() - start_, page = at / stride_, byte = at % stride_;
    FAIL() << what << ": byte " << byte << " of page " << page << " (" << section(byte) << ") is " << +*differ.first
           << ", not " << +*differ.second << "; "
           << std::inner_product(got.begin(), got.end(), host_.begin(), int64_t{0}, std::plus<>(),
                                 std::not_equal_to<>())
           << " bytes differ";
  }

 private:
  static constexpr int64_t kGuard = 4096;

  static std::vector<uint8_t> random_bytes(int64_t count) {
    Random random(99);
    std::vector<uint8_t> bytes(static_cast<size_t>(count));
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
    return bytes;
  }

  CacheStorage storage(uint8_t* base, Device device) const {
    TensorView view(base + start_, DType::u8, {pages_, sections_.bytes});
    view.strides[0] = stride_;
    view.device = device;
    return {layout_, view};
  }

  std::string section(int64_t byte) const {
    const std::pair<const char*, int64_t> starts[] = {{"K.h", sections_.k_h},
                                                      {"K.l", sections_.k_l},
                                                      {"K.b", sections_.k_b},
                                                      {"K scales", sections_.k_scale},
                                                      {"V.h", sections_.v_h},
                                                      {"V.l", sections_.v_l},
                                                      {"V.b", sections_.v_b},
                                                      {"V scales", sections_.v_scale},
                                                      {"bound", sections_.bound},
                                                      {"mean scale", sections_.mean_scale},
                                                      {"mean", sections_.mean},
                                                      {"ubar", sections_.ubar},
                                                      {"fit P", sections_.fit_in},
                                                      {"fit U", sections_.fit_out},
                                                      {"fit scale", sections_.fit_scale}};
    std::string name = "outside";
    for (const auto& [its_name, start] : starts) {
      if (start >= 0 && byte >= start && byte < sections_.bytes) name = its_name;
    }
    return name;
  }

  const CacheLayout layout_;
  const PageSections sections_;
  const int64_t pages_, stride_, start_;
  const std::vector<uint8_t> filled_;
  std::vector<uint8_t> host_;
  OnDevice<uint8_t> device_;
};

/// Device memory of a launch, filled with what no kernel may count on.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : bytes_(std::vector<uint8_t>(static_cast<size_t>(bytes), 0xCD)) {
    view_ = on_device(TensorView(nullptr, DType::u8, {bytes}), bytes_.data());
  }
  const TensorView& view() const { return view_; }

 private:
  OnDevice<uint8_t> bytes_;
  TensorView view_;
};

inline void write_on_device(const CacheStorage& storage, const CacheWriteArgs& args) {
  const Workspace workspace(cache_write_workspace(storage, args));
  cache_write(storage, args, {.stream = nullptr, .workspace = workspace.view()});
  check(cudaDeviceSynchronize());
}

/// The call on both backends.
inline void write_both(BothPools& pools, const Call& call) {
  CallTensors tensors(call, pools.layout());
  tensors.upload();
  cache_write(pools.host(), tensors.host());
  write_on_device(pools.device(), tensors.device());
}

/// Requests whose pages lie scattered over a pool.
struct Batch {
  Batch(Random& random, const CacheLayout& layout, const std::vector<int64_t>& capacity) {
    int64_t pages = 0;
    for (const int64_t keys : capacity) {
      needed.push_back((keys + layout.page_size - 1) / layout.page_size);
      pages += needed.back();
    }
    width = *std::max_element(needed.begin(), needed.end()) + 1;
    std::vector<int32_t> ids(static_cast<size_t>(pages + 2));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    auto next = ids.begin();
    for (const int64_t n : needed) {
      for (int64_t i = 0; i < width; ++i) table.push_back(i < n ? *next++ : kNoPage);
    }
    pool_pages = pages + 2;
    lengths.resize(capacity.size(), 0);
  }

  static constexpr int32_t kNoPage = 2147480000;

  /// A call that brings counts[b] tokens to each request; what is not given stays plain.
  Call call(Random& random, const CacheLayout& layout, const std::vector<int64_t>& counts, double hard,
            DType k_dtype = DType::f32, DType v_dtype = DType::f32) {
    Call c;
    c.table = table;
    c.cu.push_back(0);
    for (size_t b = 0; b < counts.size(); ++b) {
      c.seqlens.push_back(static_cast<int32_t>(lengths[b]));
      c.cu.push_back(c.cu.back() + static_cast<int32_t>(counts[b]));
      lengths[b] += counts[b];
    }
    c.tokens = c.cu.back();
    c.k = make_rows(random, c.tokens, layout.n_kv_heads, layout.head_dim, k_dtype, hard);
    c.v = make_rows(random, c.tokens, layout.n_kv_heads, layout.head_dim, v_dtype, hard);
    return c;
  }

  /// Where block_table puts a position.
  int64_t slot(const CacheLayout& layout, int64_t request, int64_t position) const {
    return table[static_cast<size_t>(request * width + position / layout.page_size)] * layout.page_size +
           position % layout.page_size;
  }

  std::vector<int64_t> needed, lengths;
  std::vector<int32_t> table;
  int64_t width = 0, pool_pages = 0;
};

/// Puts padding tokens, which hold NaN, among a call's and behind them, and the slots that say so.
inline Call with_padding(Random& random, const CacheLayout& layout, const Batch& batch, const Call& plain,
                         int64_t behind) {
  Call c = plain;
  std::vector<int64_t> source;  // of each token, -1 for padding
  c.cu = {0};
  c.slots.clear();
  for (int64_t b = 0; b < plain.batch(); ++b) {
    int64_t position = plain.seqlens[b];
    for (int32_t t = plain.cu[b]; t < plain.cu[b + 1]; ++t, ++position) {
      for (int64_t n = below(random, 3); n > 1; --n) source.push_back(-1), c.slots.push_back(-1);
      source.push_back(t);
      c.slots.push_back(batch.slot(layout, b, position));
    }
    c.cu.push_back(static_cast<int32_t>(source.size()));
  }
  for (int64_t i = 0; i < behind; ++i) source.push_back(-1), c.slots.push_back(-1);
  c.tokens = static_cast<int64_t>(source.size());
  for (const auto& [from, to] : {std::pair(&plain.k, &c.k), std::pair(&plain.v, &c.v)}) {
    const size_t row = static_cast<size_t>(from->stride_t * dtype_size(from->dtype));
    to->bytes.assign(row * source.size() + 1, 0xFF);
    for (size_t i = 0; i < source.size(); ++i) {
      if (source[i] >= 0) std::memcpy(&to->bytes[i * row], &from->bytes[static_cast<size_t>(source[i]) * row], row);
    }
  }
  return c;
}

}  // namespace fold::testing
