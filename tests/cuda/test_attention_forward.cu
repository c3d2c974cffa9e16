#include <limits>

#include "attention_device.h"

// The forward on the device: accuracy against fp64 and P5 (poison).
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
      {"wide", {2, 97, 393, 4, 1, 256}},
      {"wide_window", {1, 350, 350, 2, 1, 256}, true, true, 100},
  };
  for (const int64_t length : {1, 2, 63, 64, 65, 79, 80, 81, 127, 128, 129, 191, 193, 251, 509}) {
    all.push_back({"length", {1, length, length, 1, 1, length % 2 == 0 ? 64 : 128}, length % 4 != 1});
    all.push_back({"length_wide", {1, length, length, 1, 1, 256}, length % 4 != 1});
  }
  return all;
}

/// Runs the problem on the device: out within a factor of an ordinary implementation's error, lse as fp32 holds it.
void expect_accurate(Problem& p) {
  forward_on_device(p);
  const Expected want = reference(p), plain = ordinary(p);
  EXPECT_LE(relative_error(p.out, want.out), kFactor * relative_error(plain.out, want.out));
  // An fp32 number: half an ulp of the largest, and the errors of an fp32 dot product and of ex2.approx. That of the
  // product grows with its steps, 16 channels each.
  EXPECT_LE(relative_error(p.lse, want.lse), std::ldexp(1.0, p.shape.dim > 128 ? -20 : -21));
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
                         ::testing::Combine(::testing::Values(64, 96, 128, 256),
                                            ::testing::Values(DType::bf16, DType::f16)));

// Of four rows in five no logit is positive, or only those of one tile are; every fifth has both signs. Logits differ
// within tiles, and rise from one to the next in the order in which tiles are met, up to the positive one.
TEST_F(DeviceTest, ForwardNegativeLogits) {
  constexpr int64_t kRows = 260, kKeys = 700;
  for (const int64_t dim : {64, 128, 256}) {
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

/// What is masked, with all channels of a key of every head set to a value.
void set_key(Tensor& x, int64_t j, double value) {
  const int64_t row = x.shape[2] * x.shape[3];
  for (int64_t i = 0; i < row; ++i) x.set(j * row + i, value);
}

class ForwardMasking : public DeviceTest, public ::testing::WithParamInterface<std::tuple<int64_t, DType>> {};

TEST_P(ForwardMasking, PoisonReachesExactlyTheRowsThatSeeIt) {
  const auto& [dim, dtype] = GetParam();
  for (const double poison : {kNan, kInf, -kInf, 60000.0}) {
    for (const int64_t key : {0, 57, 79, 127, 128, 240, 250, 299}) {
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
                         ::testing::Combine(::testing::Values(64, 96, 128, 256),
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
