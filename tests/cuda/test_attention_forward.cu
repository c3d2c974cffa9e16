#include <limits>

#include "attention_device.h"

// The forward on the device: accuracy against fp64, P2 (bits) and P5 (poison).
namespace fold::testing {
namespace {

constexpr double kFactor = 1.1;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Case {
  const char* name;
  Shape shape;
  bool causal = false, sinks = false;
  int64_t left = -1, right = -1;
  double scale = 0.0;  // 0: the default
};

std::vector<Case> cases() {
  std::vector<Case> all = {
      {"causal", {1, 300, 300, 2, 2, 128}, true},
      {"full", {2, 200, 200, 2, 2, 64}},
      {"gqa", {1, 257, 257, 6, 2, 96}, true},
      {"mqa_cross", {2, 97, 393, 4, 1, 64}},
      {"fewer_queries", {1, 37, 611, 2, 1, 128}, true},
      {"more_queries", {1, 350, 170, 2, 2, 96}, true},
      {"window", {1, 460, 500, 2, 1, 128}, true, false, 50},
      {"window_whole_tiles", {1, 900, 900, 1, 1, 64}, true, false, 300},
      {"window_both_sides", {1, 300, 360, 2, 2, 64}, false, false, 133, 20},
      {"sinks", {2, 250, 250, 4, 2, 64}, true, true},
      {"sinks_window", {1, 350, 350, 8, 1, 128}, true, true, 128},
      {"one_query", {4, 1, 400, 4, 2, 128}, true},
      {"scale", {1, 200, 200, 2, 2, 64}, true, false, -1, -1, 0.5},
      {"negative_scale", {1, 200, 200, 2, 2, 64}, true, false, -1, -1, -0.2},
      {"many_items", {9, 140, 140, 24, 8, 64}, true},
  };
  for (const int64_t length : {1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 251, 509}) {
    all.push_back({"length", {1, length, length, 1, 1, length % 2 == 0 ? 64 : 128}, length % 4 != 1});
  }
  return all;
}

/// Runs the problem on the device: out within a factor of an ordinary implementation's error, lse as fp32 holds it.
void expect_accurate(Problem& p) {
  forward_on_device(p);
  const Expected want = reference(p), plain = ordinary(p);
  EXPECT_LE(relative_error(p.out, want.out), kFactor * relative_error(plain.out, want.out));
  // An fp32 number: half an ulp of the largest, and the errors of an fp32 dot product and of ex2.approx.
  EXPECT_LE(relative_error(p.lse, want.lse), 0x1p-21);
}

class ForwardAccuracy : public DeviceTest, public ::testing::WithParamInterface<std::tuple<Case, DType>> {};

TEST_P(ForwardAccuracy, WithinAFactorOfAnOrdinaryImplementation) {
  const Case& c = std::get<0>(GetParam());
  Problem p(std::get<1>(GetParam()), c.shape);
  p.options.causal = c.causal;
  p.options.window_left = c.left;
  p.options.window_right = c.right;
  if (c.scale != 0.0) p.options.softmax_scale = c.scale;
  if (c.sinks) p.use_sinks();
  expect_accurate(p);
}

std::string case_name(const ::testing::TestParamInfo<ForwardAccuracy::ParamType>& param) {
  const auto& [c, dtype] = param.param;
  return std::string(c.name) + "_" + std::to_string(c.shape.q_len) + (dtype == DType::bf16 ? "_bf16" : "_f16");
}

INSTANTIATE_TEST_SUITE_P(Cases, ForwardAccuracy,
                         ::testing::Combine(::testing::ValuesIn(cases()), ::testing::Values(DType::bf16, DType::f16)),
                         case_name);

// Scales far from 1 in each input; logits up to about 2^100 leave one key with all the mass.
TEST_F(DeviceTest, ForwardExtremeScales) {
  for (const int exponent : {-100, -20, 20, 100}) {
    for (int which = 0; which < 3; ++which) {
      Problem p(DType::bf16, {1, 130, 260, 2, 1, 64});
      p.options.causal = true;
      Tensor* const x = which == 0 ? &p.q : which == 1 ? &p.k : &p.v;
      for (int64_t i = 0; i < x->numel(); ++i) x->set(i, std::ldexp(x->at(i), exponent));
      SCOPED_TRACE(::testing::Message() << which << " times 2^" << exponent);
      expect_accurate(p);
    }
  }
}

TEST_F(DeviceTest, ForwardSinksFarFromTheLogits) {
  for (const double sink : {-1000.0, -30.0, 30.0, 1000.0, -kInf}) {
    Problem p(DType::bf16, {1, 100, 100, 2, 1, 64});
    p.options.causal = true;
    p.sinks.fill(sink);
    p.use_sinks();
    SCOPED_TRACE(::testing::Message() << sink);
    expect_accurate(p);
  }
}

// A sink of NaN reaches all of its head's rows, and no other's.
TEST_F(DeviceTest, ForwardSinkOfNan) {
  constexpr int64_t kRows = 100, kHeads = 2, kDim = 64;
  Problem p(DType::bf16, {1, kRows, kRows, kHeads, 1, kDim});
  p.options.causal = true;
  p.sinks.fill(0.0);
  p.sinks.set(1, kNan);
  p.use_sinks();
  forward_on_device(p);
  for (int64_t i = 0; i < kRows * kHeads * kDim; ++i) EXPECT_EQ(std::isnan(p.out.at(i)), i / kDim % kHeads == 1);
  for (int64_t i = 0; i < kHeads * kRows; ++i) EXPECT_EQ(std::isnan(p.lse.at(i)), i / kRows == 1);
}

/// Logits of even rows rise from tile to tile in the order in which tiles are met, those of odd rows fall.
class ForwardRisingLogits : public DeviceTest, public ::testing::WithParamInterface<std::tuple<int64_t, DType>> {};

TEST_P(ForwardRisingLogits, WithinAFactorOfAnOrdinaryImplementation) {
  const auto [dim, dtype] = GetParam();
  constexpr int64_t kKeys = 700;
  for (const double nats_a_tile : {0.5, 4.0, 6.0, 8.0, 40.0, 3000.0}) {
    Problem p(dtype, {1, 260, kKeys, 2, 1, dim});
    p.options.causal = true;
    const double of_query = 8.0, of_key = nats_a_tile * std::sqrt(static_cast<double>(dim)) / of_query;
    for (int64_t i = 0; i < 2 * 260; ++i) p.q.set(i * dim, i / 2 % 2 == 0 ? of_query : -of_query);
    for (int64_t j = 0; j < kKeys; ++j) p.k.set(j * dim, of_key * static_cast<double>((kKeys - j) / 128));
    SCOPED_TRACE(::testing::Message() << nats_a_tile);
    expect_accurate(p);
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, ForwardRisingLogits,
                         ::testing::Combine(::testing::Values(64, 96, 128),
                                            ::testing::Values(DType::bf16, DType::f16)));

// Of four rows in five no logit is positive, or only those of one tile are; every fifth has both signs. Logits differ
// within tiles, and rise from one to the next in the order in which tiles are met, up to the positive one.
TEST_F(DeviceTest, ForwardNegativeLogits) {
  constexpr int64_t kRows = 260, kKeys = 700;
  for (const int64_t dim : {64, 128}) {
    for (const double nats : {5.0, 40.0, 3000.0}) {
      for (const int positive_tile : {-1, 0, 3}) {
        Problem p(DType::bf16, {1, kRows, kKeys, 1, 1, dim});
        const double of_query = 8.0, of_key = nats * std::sqrt(static_cast<double>(dim)) / of_query;
        for (int64_t i = 0; i < kRows; ++i) p.q.set(i * dim, i % 5 == 0 ? 0.0 : of_query);
        for (int64_t j = 0; j < kKeys; ++j) {
          const double sign = j / 128 == positive_tile ? 1.0 : -1.0;
          p.k.set(j * dim, sign * of_key * static_cast<double>(1 + j / 128 + j % 3));
        }
        SCOPED_TRACE(::testing::Message() << dim << ", " << nats << ", positive in tile " << positive_tile);
        expect_accurate(p);
      }
    }
  }
}

// Products of one key that pass fp32's range: its rows are NaN, and no others.
TEST_F(DeviceTest, ForwardLogitsBeyondFp32) {
  for (const int64_t key : {0, 150, 299}) {
    Problem p(DType::bf16, {1, 300, 300, 1, 1, 128});
    p.options.causal = true;
    for (int64_t i = 0; i < 300; ++i) p.q.set(i * 128, 0x1p70);
    for (int64_t j = 0; j < 300; ++j) p.k.set(j * 128, j == key ? 0x1p70 : 0.0);
    forward_on_device(p);
    for (int64_t i = 0; i < 300; ++i) {
      EXPECT_EQ(std::isnan(p.lse.at(i)), i >= key) << key;
      EXPECT_EQ(std::isnan(p.out.at(i * 128)), i >= key) << key;
    }
  }
}

TEST_F(DeviceTest, ForwardScaleZeroIsTheMean) {
  Problem p(DType::bf16, {1, 70, 200, 1, 1, 128});
  p.options.softmax_scale = 0.0;
  expect_accurate(p);
}

/// Elements [first, first + count) of x along its first dimension.
Tensor rows_of(const Tensor& x, int64_t first, int64_t count, std::vector<int64_t> shape) {
  Tensor part(x.dtype, std::move(shape));
  const int64_t row = x.numel() / x.shape[0] * dtype_size(x.dtype);
  std::memcpy(part.bytes.data(), x.bytes.data() + first * row, static_cast<size_t>(count * row));
  return part;
}

/// What is masked, with all channels of a key of every head set to a value.
void set_key(Tensor& x, int64_t j, double value) {
  const int64_t row = x.shape[2] * x.shape[3];
  for (int64_t i = 0; i < row; ++i) x.set(j * row + i, value);
}

class ForwardMasking : public DeviceTest, public ::testing::WithParamInterface<std::tuple<int64_t, DType>> {};

TEST_P(ForwardMasking, PoisonReachesExactlyTheRowsThatSeeIt) {
  const auto& [dim, dtype] = GetParam();
  for (const double poison : {kNan, kInf, -kInf, 60000.0}) {
    for (const int64_t key : {0, 57, 127, 128, 250, 299}) {
      Problem p(dtype, {1, 300, 300, 4, 2, dim});
      p.options.causal = true;
      p.options.window_left = 70;
      forward_on_device(p);
      Problem keys = p, values = p;
      set_key(keys.k, key, poison);
      set_key(values.v, key, poison);
      forward_on_device(keys);
      forward_on_device(values);
      for (int64_t i = 0; i < 300; ++i) {
        for (int64_t c = 0; c < 4 * dim; ++c) {
          const int64_t at = i * 4 * dim + c;
          if (!p.sees(i, key)) {
            ASSERT_EQ(keys.out.at(at), p.out.at(at)) << "row " << i << ", key " << key << " is " << poison;
            ASSERT_EQ(values.out.at(at), p.out.at(at)) << "row " << i << ", key " << key << " is " << poison;
          } else if (poison == kNan || std::isinf(poison)) {
            ASSERT_EQ(std::isnan(poison), std::isnan(values.out.at(at))) << "row " << i << ", key " << key;
            ASSERT_FALSE(std::isfinite(values.out.at(at))) << "row " << i << ", key " << key;
            if (std::isnan(poison)) {
              ASSERT_TRUE(std::isnan(keys.out.at(at))) << "row " << i << ", key " << key;
            }
          }
        }
        for (int64_t h = 0; h < 4; ++h) {
          if (!p.sees(i, key)) {
            ASSERT_EQ(keys.lse.at(h * 300 + i), p.lse.at(h * 300 + i)) << "row " << i;
          }
          ASSERT_EQ(values.lse.at(h * 300 + i), p.lse.at(h * 300 + i)) << "row " << i;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, ForwardMasking,
                         ::testing::Combine(::testing::Values(64, 96, 128),
                                            ::testing::Values(DType::bf16, DType::f16)));

TEST_F(DeviceTest, ForwardRowsWithoutAKey) {
  for (const bool with_sinks : {false, true}) {
    Problem p(DType::bf16, {2, 300, 120, 2, 1, 64});
    p.options.causal = true;  // the first 180 rows see nothing
    if (with_sinks) p.use_sinks();
    forward_on_device(p);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < 300; ++i) {
        for (int64_t h = 0; h < 2; ++h) {
          EXPECT_EQ(p.lse.at((b * 2 + h) * 300 + i) == -INFINITY, i < 180);
          for (int64_t d = 0; d < 64; ++d) EXPECT_EQ(p.out.at(((b * 300 + i) * 2 + h) * 64 + d) == 0.0, i < 180);
        }
      }
    }
  }
}

TEST_F(DeviceTest, ForwardNothingToDo) {
  for (const Shape shape : {Shape{0, 5, 5, 2, 1, 64}, Shape{2, 0, 7, 2, 1, 64}, Shape{2, 7, 0, 2, 1, 64}}) {
    Problem p(DType::bf16, shape);
    forward_on_device(p);
    for (const double value : values(p.out)) EXPECT_EQ(value, 0.0);
    for (const double value : values(p.lse)) EXPECT_EQ(value, -INFINITY);
  }
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

INSTANTIATE_TEST_SUITE_P(Dims, ForwardPacked, ::testing::Combine(::testing::Values(64, 96, 128), ::testing::Bool()));

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

TEST_F(DeviceTest, ForwardWhatCannotBeHonouredIsSaid) {
  const auto refusal = [](Problem p, const char* text, int64_t offset = 0) {
    Device device;
    TensorView q = device.put(p.q.view());
    q.data = q.as<char>() + offset;
    const TensorView k = device.put(p.k.view()), v = device.put(p.v.view()), out = device.result(p.out);
    try {
      attention_forward_workspace(q, k, v, out, {}, p.options);
      ADD_FAILURE() << "no error: " << text;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  };
  refusal(Problem(DType::bf16, {1, 8, 8, 1, 1, 80}), "head_dim=80; supported on cuda: 64, 96, 128");
  refusal(Problem(DType::f32, {1, 8, 8, 1, 1, 64}), "q.dtype=float32; supported: bfloat16, float16");
  refusal(Problem(DType::bf16, {1, 8, 8, 1, 1, 64}), "on cuda:0 a multiple of 16", 2);
}

}  // namespace
}  // namespace fold::testing
