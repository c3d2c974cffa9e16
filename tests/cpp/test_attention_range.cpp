#include "api/attention_checks.h"
#include "attention_testing.h"
#include "cpu/backward.h"
#include "numerics/int_grid.h"

// The dQ grid never overflows, and results hold wherever fp64 is finite and representable.
namespace fold::testing {
namespace {

/// The backward with every addition to the grid checked.
void audited_backward(const Problem& p, cpu::GridAudit& audit) {
  cpu::attention_backward(api::backward_params(p.tensors(), p.options), &audit);
}

TEST(IntGrid, ExponentIsTheSmallestPowerOfTwoAbove) {
  for (const int e : {-1000, -80, -1, 0, 1, 7, 80, 1000}) {
    EXPECT_EQ(numerics::log2_ceil(std::ldexp(1.0, e)), e);
    EXPECT_EQ(numerics::log2_ceil(std::ldexp(1.0 + 0x1p-52, e)), e + 1);
    EXPECT_EQ(numerics::log2_ceil(std::ldexp(1.0 - 0x1p-53, e)), e);
  }
  EXPECT_EQ(numerics::grid_shift(0.0, 30), 0);
  EXPECT_EQ(numerics::grid_shift(1.0, 30), 30);
  EXPECT_EQ(numerics::grid_shift(3.0, 30), 28);
}

struct Adversary {
  const char* name;
  void (*arrange)(Problem&);
};

void fill_rows(Tensor& x, int64_t first, int64_t last, double value) {
  const int64_t row = x.shape[2] * x.shape[3];
  for (int64_t i = first * row; i < last * row; ++i) x.set(i, value);
}

const Adversary kAdversaries[] = {
    {"ordinary", [](Problem&) {}},
    {"huge_dout_row", [](Problem& p) { fill_rows(p.dout, 40, 41, 50000.0); }},
    {"huge_value", [](Problem& p) { fill_rows(p.v, 17, 18, -50000.0); }},
    {"huge_key", [](Problem& p) { fill_rows(p.k, 30, 31, 60.0); }},
    {"equal_keys", [](Problem& p) { fill_rows(p.k, 0, p.shape.k_len, 1.0); }},
    {"equal_everything",
     [](Problem& p) {
       for (Tensor* x : {&p.q, &p.k, &p.v, &p.dout}) x->fill(1.0);
     }},
    {"single_visible_key", [](Problem& p) { p.options.window_left = 0; }},
    // The bound is nearly attained: two keys of weight 1/2, opposite values along dout, equal large keys.
    {"aligned",
     [](Problem& p) {
       p.q.fill(0.0);
       p.k.fill(1.0);
       p.dout.fill(1.0);
       p.v.fill(1.0);
       for (int64_t j = 1; j < p.shape.k_len; j += 2) fill_rows(p.v, j, j + 1, -1.0);
       p.options.window_left = 1;
     }},
};

TEST(DqGrid, NeverOverflows) {
  for (const Adversary& adversary : kAdversaries) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      Problem p(dtype, {1, 250, 250, 2, 1, 16});
      p.options.causal = true;
      adversary.arrange(p);
      SCOPED_TRACE(adversary.name);
      EachIsa().run([&] {
        p.forward();
        cpu::GridAudit audit;
        audited_backward(p, audit);
        EXPECT_EQ(audit.overflows, 0);
        EXPECT_LT(audit.peak, 1.0);
        // Every element of a row is added once per key tile in which the row sees something: at least one, at most two.
        EXPECT_GE(audit.additions, p.dq.numel());
        EXPECT_LE(audit.additions, 2 * p.dq.numel());
        const Tensor dq = p.dq;
        p.backward();
        EXPECT_TRUE(same_bytes(p.dq, dq));
      });
    }
  }
}

// The counter does count: a log-sum-exp that is far too low makes weights of 2^20.
TEST(DqGrid, AuditSeesAnOverflow) {
  Problem p(DType::bf16, {1, 64, 64, 1, 1, 16});
  p.forward();
  for (int64_t i = 0; i < p.lse.numel(); ++i) p.lse.set(i, p.lse.at(i) - 14.0);
  cpu::GridAudit audit;
  audited_backward(p, audit);
  EXPECT_GT(audit.overflows, 0);
}

// A huge row must not take resolution from the others: each row has a grid of its own.
TEST(DqGrid, SmallRowsBesideAHugeOne) {
  Problem p(DType::bf16, {1, 120, 120, 1, 1, 32});
  p.options.causal = true;
  fill_rows(p.dout, 119, 120, 0x1p40);
  const Expected want = reference(p), plain = ordinary(p);
  p.run();
  const auto without_last = [](std::vector<double> x) {
    x.resize(119 * 32);
    return x;
  };
  const std::vector<double> reference_rows = without_last(want.dq);
  EXPECT_LE(relative_error(without_last(values(p.dq)), reference_rows),
            1.05 * relative_error(without_last(plain.dq), reference_rows));
}

struct Scales {
  int q, k, v, dout;
};

/// Whether every nonzero result in fp64 is a normal number of fp32.
bool representable(const std::vector<double>& x) {
  for (const double value : x) {
    if (value != 0.0 && (std::fabs(value) > 0x1p126 || std::fabs(value) < 0x1p-126)) return false;
  }
  return true;
}

TEST(Range, ScalesFarFromOne) {
  std::vector<Scales> all;
  for (const int e : {-100, -60, -30, 30, 60, 100}) {
    for (const Scales& s : {Scales{e, 0, 0, 0},
                            {0, e, 0, 0},
                            {0, 0, e, 0},
                            {0, 0, 0, e},
                            {e, -e, 0, 0},
                            {0, 0, e, -e},
                            {0, -e, 0, e},
                            {-e, 0, e, 0},
                            {-e, e, -e, e}}) {
      all.push_back(s);
    }
  }
  int compared = 0;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const Scales& s : all) {
      SCOPED_TRACE(::testing::Message() << "2^" << s.q << " 2^" << s.k << " 2^" << s.v << " 2^" << s.dout);
      Problem p(dtype, {1, 60, 60, 2, 1, 16});
      p.options.causal = true;
      for (const auto& [x, e] : {std::pair{&p.q, s.q}, {&p.k, s.k}, {&p.v, s.v}, {&p.dout, s.dout}}) {
        for (int64_t i = 0; i < x->numel(); ++i) x->set(i, std::ldexp(x->at(i), e));
      }
      const Expected want = reference(p);
      p.run();
      // Logits of 2^100 leave one key per row; then dQ and dK are differences that fp64 itself only rounds.
      const bool one_hot = s.q + s.k > 0;
      const double tolerance = dtype == DType::bf16 ? 0.02 : 1e-5;
      const auto check = [&](const char* name, const Tensor& got, const std::vector<double>& expected) {
        for (int64_t i = 0; i < got.numel(); ++i) {
          if (std::fabs(expected[static_cast<size_t>(i)]) < 0x1p126) {
            ASSERT_TRUE(std::isfinite(got.at(i))) << name;
          }
        }
        if (!representable(expected)) return;
        ++compared;
        EXPECT_LE(relative_error(got, expected), tolerance) << name;
      };
      check("out", p.out, want.out);
      check("dv", p.dv, want.dv);
      if (one_hot) continue;
      check("dq", p.dq, want.dq);
      check("dk", p.dk, want.dk);
    }
  }
  EXPECT_GT(compared, 250);
}

// Rows whose largest logit is far from the others, and far from zero.
TEST(Range, LargestLogits) {
  for (const double logit : {0.0, 60.0, 88.0, 200.0, 1e5, -200.0, -1e5}) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      Problem p(dtype, {1, 40, 200, 1, 1, 16});
      p.options.softmax_scale = 1.0;
      for (int64_t i = 0; i < 40; ++i) p.q.set(i * 16, 4.0);
      for (int64_t j = 0; j < 200; ++j) p.k.set(j * 16, logit / 4.0 * (j == 130 || logit < 0 ? 1.0 : 0.0));
      const Expected want = reference(p), plain = ordinary(p);
      p.run();
      EXPECT_LE(relative_error(p.out, want.out), 1.1 * relative_error(plain.out, want.out) + 1e-7) << logit;
      EXPECT_LE(relative_error(p.dv, want.dv), 1.05 * relative_error(plain.dv, want.dv) + 1e-7) << logit;
    }
  }
}

// A row computed in fp64 and one computed in tiles meet in the same key's gradient.
TEST(Range, WideRowsAmongOthers) {
  Problem p(DType::f32, {1, 150, 300, 4, 2, 24});
  p.use_sinks();
  for (const int64_t row : {0, 3, 96, 149}) fill_rows(p.q, row, row + 1, 3000.0);
  const Expected want = reference(p);
  EachIsa().run([&] {
    p.run();
    EXPECT_LE(relative_error(p.out, want.out), 1e-6);
    EXPECT_LE(relative_error(p.lse, want.lse), 1e-6);
    EXPECT_LE(relative_error(p.dq, want.dq), 1e-6);
    EXPECT_LE(relative_error(p.dk, want.dk), 1e-6);
    EXPECT_LE(relative_error(p.dv, want.dv), 1e-6);
    EXPECT_LE(relative_error(p.dsinks, want.dsinks), 1e-6);
  });
}

TEST(Range, SinksOfEveryMagnitude) {
  for (const double sink : {-std::numeric_limits<double>::infinity(), -1e6, -30.0, 30.0, 1e6}) {
    Problem p(DType::f32, {1, 70, 70, 2, 2, 16});
    p.options.causal = true;
    p.sinks.fill(sink);
    p.use_sinks();
    const Expected want = reference(p);
    p.run();
    EXPECT_LE(relative_error(p.out, want.out), 1e-5) << sink;
    EXPECT_LE(relative_error(p.dv, want.dv), 1e-5) << sink;
    EXPECT_LE(relative_error(p.dsinks, want.dsinks), 1e-4) << sink;
  }
}

}  // namespace
}  // namespace fold::testing
