#include <limits>

#include "attention_testing.h"

// P5: what a row does not see cannot influence it, NaN included; rows and sequences without anything to see.
namespace fold::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

/// Sets all channels of key j of every head.
void set_key(Tensor& x, int64_t j, double value) {
  const int64_t row = x.shape[2] * x.shape[3];
  for (int64_t i = 0; i < row; ++i) x.set(j * row + i, value);
}

class Masking : public ::testing::TestWithParam<DType> {};

TEST_P(Masking, RowsThatDoNotSeeAKeyKeepEveryByte) {
  // Masked values that are not finite, or so large that they would spoil a bound or a scale that they shared in.
  for (const double poison : {kNan, kInf, -kInf, 60000.0}) {
    for (const int64_t key : {0, 57, 100, 191, 192, 299}) {
      Problem p(GetParam(), {1, 300, 300, 4, 2, 32});
      p.options.causal = true;
      p.options.window_left = 70;
      EachIsa().run([&] {
        p.run();
        Problem q = p;
        set_key(q.k, key, poison);
        set_key(q.v, key, poison);
        q.run();
        const int64_t row = p.shape.heads * p.shape.dim, size = dtype_size(p.q.dtype);
        for (int64_t i = 0; i < p.shape.q_len; ++i) {
          if (p.sees(i, key)) continue;
          const auto at = static_cast<size_t>(i * row * size), bytes = static_cast<size_t>(row * size);
          EXPECT_EQ(std::memcmp(&q.out.bytes[at], &p.out.bytes[at], bytes), 0) << "out of row " << i;
          EXPECT_EQ(std::memcmp(&q.dq.bytes[at], &p.dq.bytes[at], bytes), 0) << "dq of row " << i;
          for (int64_t h = 0; h < p.shape.heads; ++h) {
            EXPECT_EQ(q.lse.at(h * 300 + i), p.lse.at(h * 300 + i)) << "lse of row " << i;
          }
        }
        // Keys all of whose rows do not see the poisoned one.
        const int64_t kv_row = p.shape.kv_heads * p.shape.dim;
        for (int64_t j = 0; j < p.shape.k_len; ++j) {
          bool shares = false;
          for (int64_t i = 0; i < p.shape.q_len; ++i) shares = shares || (p.sees(i, j) && p.sees(i, key));
          if (shares) continue;
          const auto at = static_cast<size_t>(j * kv_row * size), bytes = static_cast<size_t>(kv_row * size);
          EXPECT_EQ(std::memcmp(&q.dk.bytes[at], &p.dk.bytes[at], bytes), 0) << "dk of key " << j;
          EXPECT_EQ(std::memcmp(&q.dv.bytes[at], &p.dv.bytes[at], bytes), 0) << "dv of key " << j;
        }
      });
    }
  }
}

TEST_P(Masking, ANanIsSeenByExactlyTheRowsThatSeeItsKey) {
  Problem p(GetParam(), {1, 230, 230, 2, 1, 32});
  p.options.causal = true;
  p.options.window_left = 100;
  constexpr int64_t kKey = 97;
  set_key(p.k, kKey, kNan);
  EachIsa().run([&] {
    p.run();
    for (int64_t i = 0; i < 230; ++i) {
      for (int64_t c = 0; c < 64; ++c) {
        EXPECT_EQ(std::isnan(p.out.at(i * 64 + c)), p.sees(i, kKey)) << "row " << i;
        EXPECT_EQ(std::isnan(p.dq.at(i * 64 + c)), p.sees(i, kKey)) << "row " << i;
      }
    }
    for (int64_t j = 0; j < 230; ++j) {
      bool shares = false;
      for (int64_t i = 0; i < 230; ++i) shares = shares || (p.sees(i, j) && p.sees(i, kKey));
      for (int64_t d = 0; d < 32; ++d) {
        EXPECT_EQ(std::isnan(p.dk.at(j * 32 + d)), shares) << "key " << j;
        EXPECT_EQ(std::isnan(p.dv.at(j * 32 + d)), shares) << "key " << j;
      }
    }
  });
}

TEST_P(Masking, RowsOfDoutAndQWithNanReachOnlyTheirKeys) {
  Problem p(GetParam(), {1, 150, 150, 1, 1, 16});
  p.options.causal = true;
  constexpr int64_t kRow = 70;
  set_key(p.dout, kRow, kNan);
  p.run();
  for (int64_t j = 0; j < 150; ++j) {
    EXPECT_EQ(std::isnan(p.dk.at(j * 16)), p.sees(kRow, j)) << j;
    EXPECT_EQ(std::isnan(p.dv.at(j * 16)), p.sees(kRow, j)) << j;
    EXPECT_EQ(std::isnan(p.dq.at(j * 16)), j == kRow) << j;
  }
}

TEST_P(Masking, RowsWithoutAKey) {
  for (const bool with_sinks : {false, true}) {
    Problem p(GetParam(), {2, 200, 120, 2, 1, 24});
    p.options.causal = true;  // the first 80 rows see nothing
    if (with_sinks) p.use_sinks();
    p.run();
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < 200; ++i) {
        for (int64_t h = 0; h < 2; ++h) {
          const int64_t at = ((b * 200 + i) * 2 + h) * 24;
          EXPECT_EQ(p.lse.at((b * 2 + h) * 200 + i) == -INFINITY, i < 80);
          for (int64_t d = 0; d < 24 && i < 80; ++d) {
            EXPECT_EQ(p.out.at(at + d), 0.0);
            EXPECT_EQ(p.dq.at(at + d), 0.0);
          }
        }
      }
    }
    const Expected want = reference(p);
    EXPECT_LT(relative_error(p.dk, want.dk), 0.01);
    EXPECT_LT(relative_error(p.dv, want.dv), 0.01);
  }
}

TEST_P(Masking, NothingToDo) {
  for (const Shape shape : {Shape{0, 5, 5, 2, 1, 16}, Shape{2, 0, 7, 2, 1, 16}, Shape{2, 7, 0, 2, 1, 16}}) {
    Problem p(GetParam(), shape);
    for (Tensor* x : {&p.out, &p.lse, &p.dq, &p.dk, &p.dv}) x->fill(kNan);
    p.run();
    for (const Tensor* x : {&p.out, &p.dq, &p.dk, &p.dv}) {
      for (const double value : values(*x)) EXPECT_EQ(value, 0.0);
    }
    for (const double value : values(p.lse)) EXPECT_EQ(value, -INFINITY);
  }
}

// Lengths 0, 1, 0, 1 against 0, 3, 0, 5 keys, and rows behind the last sequence that hold NaN.
TEST_P(Masking, PackedSequencesOfLengthZeroAndRowsBehindTheLast) {
  std::vector<int32_t> ends_q = {0, 0, 1, 1, 2}, ends_k = {0, 0, 3, 3, 8};
  Problem p(GetParam(), {1, 5, 11, 9, 3, 64});
  for (Tensor* x : {&p.q, &p.k, &p.v, &p.dout, &p.out, &p.dq, &p.dk, &p.dv, &p.lse}) {
    x->shape.erase(x->shape.begin());
  }
  const auto poison = [](Tensor& x, int64_t from) {
    const int64_t row = x.numel() / x.shape[0];
    for (int64_t i = from * row; i < x.numel(); ++i) x.set(i, kNan);
  };
  poison(p.q, 2);
  poison(p.dout, 2);
  poison(p.k, 8);
  poison(p.v, 8);
  for (Tensor* x : {&p.out, &p.lse, &p.dq, &p.dk, &p.dv}) x->fill(kNan);
  p.options.cu_seqlens_q = TensorView(ends_q.data(), DType::i32, {5});
  p.options.cu_seqlens_k = TensorView(ends_k.data(), DType::i32, {5});
  p.run();
  for (const Tensor* x : {&p.out, &p.dq}) {
    for (int64_t i = 0; i < x->numel(); ++i) EXPECT_EQ(x->at(i) == 0.0, i >= 2 * 9 * 64) << i;
  }
  for (int64_t i = 0; i < p.dk.numel(); ++i) {
    EXPECT_TRUE(std::isfinite(p.dk.at(i)) && std::isfinite(p.dv.at(i)));
    EXPECT_EQ(p.dv.at(i) == 0.0, i >= 8 * 3 * 64) << i;
  }
  for (int64_t i = 0; i < p.lse.numel(); ++i) EXPECT_EQ(p.lse.at(i) == -INFINITY, i % 5 >= 2);
}

TEST_P(Masking, AKeyWithoutQueriesHasGradientZero) {
  Problem p(GetParam(), {1, 40, 100, 2, 2, 32});
  p.options.causal = true;
  p.options.window_left = 9;
  for (Tensor* x : {&p.dk, &p.dv}) x->fill(kNan);
  p.run();
  for (int64_t j = 0; j < 100; ++j) {
    bool seen = false;
    for (int64_t i = 0; i < 40; ++i) seen = seen || p.sees(i, j);
    for (int64_t c = 0; c < 64; ++c) {
      EXPECT_EQ(p.dv.at(j * 64 + c) != 0.0, seen) << j;
      if (!seen) {
        EXPECT_EQ(p.dk.at(j * 64 + c), 0.0) << j;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Masking, ::testing::Values(DType::bf16, DType::f16, DType::f32));

}  // namespace
}  // namespace fold::testing
