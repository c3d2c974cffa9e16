#include <limits>

#include "attention_device.h"

// The forward on the device, P2: a sequence's bits wherever it lies, packed, in batches, with strides.
namespace fold::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Elements [first, first + count) of x along its first dimension.
Tensor rows_of(const Tensor& x, int64_t first, int64_t count, std::vector<int64_t> shape) {
  Tensor part(x.dtype, std::move(shape));
  const int64_t row = x.numel() / x.shape[0] * dtype_size(x.dtype);
  std::memcpy(part.bytes.data(), x.bytes.data() + first * row, static_cast<size_t>(count * row));
  return part;
}

/// Sequences of these lengths (queries, keys), packed; `behind` more rows and keys hold NaN.
struct Packed {
  Packed(DType dtype, const std::vector<std::pair<int64_t, int64_t>>& lengths, int64_t heads, int64_t kv_heads,
         int64_t dim, int64_t behind)
      : ends_q(1, 0), ends_k(1, 0), all(dtype, {1, 1, 1, heads, kv_heads, dim}) {
    for (const auto& [queries, keys] : lengths) {
      ends_q.push_back(ends_q.back() + static_cast<int32_t>(queries));
      ends_k.push_back(ends_k.back() + static_cast<int32_t>(keys));
    }
    all = Problem(dtype, {1, ends_q.back() + behind, ends_k.back() + behind, heads, kv_heads, dim}, 5);
    for (Tensor* x : {&all.q, &all.k, &all.v, &all.out, &all.lse}) x->shape.erase(x->shape.begin());
    for (Tensor* x : {&all.q, &all.k, &all.v}) {
      const int64_t row = x->numel() / x->shape[0];
      for (int64_t i = (x == &all.q ? ends_q : ends_k).back() * row; i < x->numel(); ++i) x->set(i, kNan);
    }
    const auto size = static_cast<int64_t>(ends_q.size());
    all.options.cu_seqlens_q = TensorView(ends_q.data(), DType::i32, {size});
    all.options.cu_seqlens_k = TensorView(ends_k.data(), DType::i32, {size});
  }

  /// Sequence b as a dense problem of its own.
  Problem alone(size_t b) const {
    const int64_t queries = ends_q[b + 1] - ends_q[b], keys = ends_k[b + 1] - ends_k[b];
    Shape shape = all.shape;
    shape.q_len = queries;
    shape.k_len = keys;
    Problem one(all.q.dtype, shape);
    one.options = all.options;
    one.options.cu_seqlens_q = one.options.cu_seqlens_k = {};
    one.q = rows_of(all.q, ends_q[b], queries, one.q.shape);
    one.k = rows_of(all.k, ends_k[b], keys, one.k.shape);
    one.v = rows_of(all.v, ends_k[b], keys, one.v.shape);
    return one;
  }

  std::vector<int32_t> ends_q, ends_k;
  Problem all;
};

class ForwardPacked : public DeviceTest, public ::testing::WithParamInterface<std::tuple<int64_t, bool>> {};

// Neighbours of every length, whose rows share boxes with the sequence's, and NaN behind the last and in every second
// sequence.
TEST_P(ForwardPacked, TheBitsOfASequenceAlone) {
  const auto& [dim, causal] = GetParam();
  const std::vector<std::pair<int64_t, int64_t>> lengths = {{0, 0},     {1, 1},     {7, 0},   {0, 7},
                                                            {133, 201}, {5, 300},   {97, 97}, {400, 413},
                                                            {63, 64},   {257, 257}, {64, 1},  {130, 130}};
  Packed packed(DType::bf16, lengths, 6, 3, dim, 10);
  packed.all.options.causal = causal;
  if (causal) packed.all.options.window_left = 150;
  packed.all.use_sinks();
  for (size_t b = 1; b < lengths.size(); b += 2) {
    for (Tensor* x : {&packed.all.k, &packed.all.v}) {
      const int64_t row = x->numel() / x->shape[0];
      for (int64_t i = packed.ends_k[b] * row; i < packed.ends_k[b + 1] * row; ++i) x->set(i, kNan);
    }
  }
  forward_on_device(packed.all);
  const int64_t total = packed.all.q.shape[0], heads = 6;
  for (size_t b = 0; b < lengths.size(); ++b) {
    Problem one = packed.alone(b);
    forward_on_device(one);
    EXPECT_TRUE(same_bytes(rows_of(packed.all.out, packed.ends_q[b], lengths[b].first, one.out.shape), one.out)) << b;
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < lengths[b].first; ++i) {
        EXPECT_TRUE(
            same_bits(packed.all.lse.at(h * total + packed.ends_q[b] + i), one.lse.at(h * lengths[b].first + i)))
            << "sequence " << b << ", row " << i;
      }
    }
  }
  for (int64_t i = packed.ends_q.back(); i < total; ++i) {
    for (int64_t c = 0; c < heads * dim; ++c) EXPECT_EQ(packed.all.out.at(i * heads * dim + c), 0.0);
    for (int64_t h = 0; h < heads; ++h) EXPECT_EQ(packed.all.lse.at(h * total + i), -INFINITY);
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, ForwardPacked,
                         ::testing::Combine(::testing::Values(64, 96, 128, 256), ::testing::Bool()));

// Lengths on the device cannot be checked: those that make no sense are cut to the tensors' rows. Sequences overlap
// here, so that there are more row tiles than rows explain.
TEST_F(DeviceTest, ForwardLengthsThatMakeNoSenseStayInside) {
  Packed packed(DType::bf16, std::vector<std::pair<int64_t, int64_t>>(9, {40, 40}), 2, 1, 64, 0);
  Device device;
  const std::vector<int32_t> ends = {-5, 360, 0, 1 << 30, -(1 << 30), 360, 1, 360, 0, 400};
  const int32_t count = static_cast<int32_t>(ends.size());
  AttentionOptions options;
  options.cu_seqlens_q = options.cu_seqlens_k =
      device.put(TensorView(const_cast<int32_t*>(ends.data()), DType::i32, {count}));
  const TensorView q = device.put(packed.all.q.view()), k = device.put(packed.all.k.view());
  const TensorView v = device.put(packed.all.v.view());
  // Canaries around out, and behind the workspace.
  Tensor framed(DType::bf16, {360 + 2 * 256, 2, 64}), lse(DType::f32, {2, 360});
  TensorView out = device.result(framed);
  out.data = out.as<char>() + 256 * 2 * 64 * 2;
  out.shape[0] = 360;
  const TensorView sums = device.result(lse);
  const int64_t bytes = attention_forward_workspace(q, k, v, out, sums, options);
  Tensor memory(DType::u8, {bytes + 4096});
  Launch launch;
  launch.workspace = device.result(memory);
  launch.workspace.shape[0] = bytes;
  attention_forward(q, k, v, out, sums, options, launch);
  device.fetch();
  const auto untouched = [](const Tensor& x, size_t begin, size_t end) {
    return std::all_of(x.bytes.begin() + begin, x.bytes.begin() + end,
                       [](char c) { return c == static_cast<char>(0xff); });
  };
  const size_t frame = 256 * 2 * 64 * 2;
  EXPECT_TRUE(untouched(framed, 0, frame));
  EXPECT_TRUE(untouched(framed, framed.bytes.size() - frame, framed.bytes.size()));
  EXPECT_TRUE(untouched(memory, static_cast<size_t>(bytes), memory.bytes.size()));
}

TEST_F(DeviceTest, ForwardBitsOfABatch) {
  Problem all(DType::bf16, {40, 200, 270, 8, 2, 128}, 3);
  all.options.causal = true;
  forward_on_device(all);
  const Problem first = all;
  for (int repeat = 0; repeat < 5; ++repeat) {
    forward_on_device(all);
    ASSERT_TRUE(same_bytes(all.out, first.out) && same_bytes(all.lse, first.lse));
  }
  for (const int64_t b : {0, 17, 39}) {
    Problem one(DType::bf16, {1, 200, 270, 8, 2, 128});
    one.options = all.options;
    one.q = rows_of(all.q, b, 1, one.q.shape);
    one.k = rows_of(all.k, b, 1, one.k.shape);
    one.v = rows_of(all.v, b, 1, one.v.shape);
    forward_on_device(one);
    EXPECT_TRUE(same_bytes(rows_of(all.out, b, 1, one.out.shape), one.out)) << b;
    EXPECT_TRUE(same_bytes(rows_of(all.lse, b, 1, one.lse.shape), one.lse)) << b;
  }
}

// One K and V for all sequences, by strides of 0; and a tensor that holds q, k and v side by side.
TEST_F(DeviceTest, ForwardStrides) {
  constexpr int64_t kBatch = 3, kRows = 150, kHeads = 2, kDim = 64;
  Problem p(DType::bf16, {kBatch, kRows, kRows, kHeads, kHeads, kDim});
  for (Tensor* x : {&p.k, &p.v}) {
    const size_t size = x->bytes.size() / kBatch;
    for (size_t b = 1; b < kBatch; ++b) std::memcpy(&x->bytes[b * size], &x->bytes[0], size);
  }
  p.options.causal = true;
  forward_on_device(p);
  Tensor joined(DType::bf16, {kBatch, kRows, 3, kHeads, kDim}), out(DType::bf16, p.out.shape),
      lse(DType::f32, p.lse.shape);
  constexpr int64_t kRow = kHeads * kDim;
  for (int64_t row = 0; row < kBatch * kRows; ++row) {
    for (int64_t c = 0; c < kRow; ++c) {
      for (int which = 0; which < 3; ++which) {
        joined.set((row * 3 + which) * kRow + c, (which == 0 ? p.q : which == 1 ? p.k : p.v).at(row * kRow + c));
      }
    }
  }
  Device device;
  const TensorView all = device.put(joined.view());
  const auto part = [&](int64_t which, int64_t batch_stride) {
    TensorView x = p.q.view();
    x.data = all.as<char>() + which * kRow * 2;
    x.device = fold::Device::cuda;
    x.strides = {batch_stride, 3 * kRow, kDim, 1};
    return x;
  };
  const TensorView q = part(0, kRows * 3 * kRow), k = part(1, 0), v = part(2, 0);
  const TensorView result = device.result(out), sums = device.result(lse);
  attention_forward(q, k, v, result, sums, p.options,
                    device.launch(attention_forward_workspace(q, k, v, result, sums, p.options)));
  device.fetch();
  EXPECT_TRUE(same_bytes(out, p.out));
  EXPECT_TRUE(same_bytes(lse, p.lse));
}

}  // namespace
}  // namespace fold::testing
