#include "attention_testing.h"

// Errors against fp64 are at most a factor times those of an ordinary implementation at the inputs' precision.
namespace fold::testing {
namespace {

constexpr double kForwardFactor = 1.1, kGradientFactor = 1.05;

struct Case {
  const char* name;
  Shape shape;
  bool causal = false, sinks = false;
  int64_t left = -1, right = -1;
  double scale = 0.0;  // 0: the default
};

const Case kCases[] = {
    {"causal", {1, 200, 200, 2, 2, 64}, true},
    {"gqa", {1, 130, 130, 6, 2, 64}, true},
    {"mqa_cross", {2, 97, 193, 4, 1, 32}},
    {"fewer_queries", {1, 37, 311, 2, 1, 80}, true},
    {"more_queries", {1, 150, 70, 2, 2, 40}, true},
    {"window", {1, 260, 300, 2, 1, 72}, true, false, 50},
    {"window_both_sides", {1, 200, 260, 2, 2, 48}, false, false, 33, 20},
    {"sinks", {2, 150, 150, 4, 2, 64}, true, true},
    {"sinks_window", {1, 250, 250, 8, 1, 64}, true, true, 128},
    {"wide_head", {1, 100, 200, 1, 1, 256}, true},
    {"odd_head", {1, 120, 120, 2, 1, 37}, true},
    {"one_channel", {4, 100, 100, 8, 4, 1}, true},
    {"one_query", {4, 1, 400, 4, 2, 128}, true},
    {"scale", {1, 100, 100, 2, 2, 64}, true, false, -1, -1, 0.5},
    {"negative_scale", {1, 100, 100, 2, 2, 64}, true, false, -1, -1, -0.2},
};

class Accuracy : public ::testing::TestWithParam<std::tuple<Case, DType>> {};

TEST_P(Accuracy, WithinAFactorOfAnOrdinaryImplementation) {
  const Case& c = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  Problem p(dtype, c.shape);
  p.options.causal = c.causal;
  p.options.window_left = c.left;
  p.options.window_right = c.right;
  if (c.scale != 0.0) p.options.softmax_scale = c.scale;
  if (c.sinks) p.use_sinks();
  const Expected want = reference(p), plain = ordinary(p);
  EachIsa().run([&] {
    p.run();
    EXPECT_LE(relative_error(p.out, want.out), kForwardFactor * relative_error(plain.out, want.out));
    // log-sum-exp is an fp32 number: half an ulp of the largest, and the error of an fp32 dot product.
    EXPECT_LE(relative_error(p.lse, want.lse), 0x1p-22);
    EXPECT_LE(relative_error(p.dq, want.dq), kGradientFactor * relative_error(plain.dq, want.dq));
    EXPECT_LE(relative_error(p.dk, want.dk), kGradientFactor * relative_error(plain.dk, want.dk));
    EXPECT_LE(relative_error(p.dv, want.dv), kGradientFactor * relative_error(plain.dv, want.dv));
  });
}

std::string case_name(const ::testing::TestParamInfo<Accuracy::ParamType>& param) {
  const auto& [c, dtype] = param.param;
  return std::string(c.name) + (dtype == DType::bf16 ? "_bf16" : dtype == DType::f16 ? "_f16" : "_f32");
}

INSTANTIATE_TEST_SUITE_P(Cases, Accuracy,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::Values(DType::bf16, DType::f16, DType::f32)),
                         case_name);

// One number per head, so many heads for the ratio of two errors to mean something.
TEST(Attention, SinkGradient) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    Problem p(dtype, {2, 40, 40, 256, 32, 16});
    p.options.causal = true;
    p.use_sinks();
    const Expected want = reference(p), plain = ordinary(p);
    EachIsa().run([&] {
      p.run();
      EXPECT_LE(relative_error(p.dsinks, want.dsinks), kGradientFactor * relative_error(plain.dsinks, want.dsinks));
    });
  }
}

TEST(Attention, GradientsInFp32AreTheOnesThatAreRounded) {
  Problem p(DType::bf16, {1, 120, 120, 4, 2, 64});
  p.options.causal = true;
  p.run();
  const Tensor dq = p.dq, dk = p.dk, dv = p.dv;
  for (Tensor* x : {&p.dq, &p.dk, &p.dv}) *x = Tensor(DType::f32, x->shape);
  p.backward();
  for (const auto& [narrow, wide] : {std::pair{&dq, &p.dq}, std::pair{&dk, &p.dk}, std::pair{&dv, &p.dv}}) {
    Tensor rounded(DType::bf16, wide->shape);
    for (int64_t i = 0; i < wide->numel(); ++i) rounded.set(i, wide->at(i));
    EXPECT_TRUE(same_bytes(*narrow, rounded));
  }
}

TEST(Attention, LogSumExpMayBeLeftOut) {
  Problem p(DType::bf16, {1, 50, 50, 2, 2, 64});
  p.forward();
  const Tensor out = p.out;
  p.out.fill(7.0);
  attention_forward(p.q.view(), p.k.view(), p.v.view(), p.out.view(), {}, p.options);
  EXPECT_TRUE(same_bytes(p.out, out));
}

// One key holds all the mass among 4096: the error does not grow with the length.
TEST(Attention, OneRelevantKeyAmongMany) {
  for (const int64_t length : {64, 4096}) {
    Problem p(DType::f32, {1, 8, length, 1, 1, 16});
    for (int64_t d = 0; d < 16; ++d) {
      for (int64_t i = 0; i < 8; ++i) p.q.set(i * 16 + d, 4.0);
      for (int64_t j = 0; j < length; ++j) p.k.set(j * 16 + d, j == length / 3 ? 4.0 : -4.0);
    }
    const Expected want = reference(p);
    p.forward();
    EXPECT_LE(relative_error(p.out, want.out), 0x1p-22) << length;
  }
}

}  // namespace
}  // namespace fold::testing
