#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>

#include "cache_testing.h"
#include "cpu/isa.h"
#include "numerics/block.h"

// The tail's fit (docs/numerics.md, section 9): how well it predicts, and that its bits depend on the content alone.
// tests/cpp/test_golden.cpp compares its bytes with an independent implementation.
namespace {

using namespace fold;
using namespace fold::testing;
using numerics::kRank;
using numerics::kTile;

using Matrix = std::vector<double>;  // row-major

/// Codes of K and readings of V of one head, centred within each block of 64 keys, (keys, d) each; V in its own unit.
struct Centred {
  Centred(const plan::CacheView& cache, const std::vector<int32_t>& table, int64_t n, int64_t head)
      : keys(n), d(static_cast<int>(cache.layout.head_dim)), u(n * d), v(n * d) {
    for (int64_t key = 0; key < n; ++key) {
      const plan::HeadPage page = plan::head_page(cache, table[key / cache.layout.page_size], head);
      const int64_t slot = key % cache.layout.page_size;
      const auto k_row = numerics::plane_row({page.k_h, nullptr, nullptr}, slot, d);
      const auto v_row = numerics::plane_row({page.v_h, page.v_l, page.v_b}, slot, d);
      const double e = numerics::from_bf16(
          page.v_scale[slot / kTile * kTile + numerics::scale_slot(static_cast<int>(slot % kTile))]);
      for (int i = 0; i < d; ++i) {
        u[key * d + i] = numerics::nibble(k_row.h[i / 2], i);
        v[key * d + i] = e * numerics::reading(v_row, i) / 256;
      }
    }
    for (Matrix* x : {&u, &v}) {
      for (int64_t first = 0; first < n; first += kTile) {
        for (int i = 0; i < d; ++i) {
          double mean = 0;
          for (int64_t key = first; key < first + kTile; ++key) mean += (*x)[key * d + i] / kTile;
          for (int64_t key = first; key < first + kTile; ++key) (*x)[key * d + i] -= mean;
        }
      }
    }
  }
  int64_t keys;
  int d;
  Matrix u, v;
};

double energy(const Matrix& x) { return std::inner_product(x.begin(), x.end(), x.begin(), 0.0); }

/// What is left of V: sum over keys of |v - sum_r f_r U_r (P_r . u)|^2.
double residual(const Centred& c, const int8_t* p, const int8_t* u, const float* f) {
  Matrix rest = c.v;
  for (int64_t key = 0; key < c.keys; ++key) {
    for (int r = 0; r < kRank; ++r) {
      double projection = 0;
      for (int i = 0; i < c.d; ++i) projection += p[r * c.d + i] * c.u[key * c.d + i];
      for (int i = 0; i < c.d; ++i) rest[key * c.d + i] -= f[r] * projection * u[r * c.d + i];
    }
  }
  return energy(rest);
}

/// x^T y of (keys, d) matrices.
Matrix gram(const Matrix& x, const Matrix& y, int64_t keys, int d) {
  Matrix g(static_cast<size_t>(d * d));
  for (int64_t key = 0; key < keys; ++key) {
    for (int i = 0; i < d; ++i) {
      for (int j = 0; j < d; ++j) g[i * d + j] += x[key * d + i] * y[key * d + j];
    }
  }
  return g;
}

/// Eigenvalues of a symmetric matrix by Jacobi rotations, descending.
std::vector<double> eigenvalues(Matrix a, int d) {
  for (int sweep = 0; sweep < 12; ++sweep) {
    for (int p = 0; p < d; ++p) {
      for (int q = p + 1; q < d; ++q) {
        if (a[p * d + q] == 0) continue;
        const double angle = 0.5 * std::atan2(2 * a[p * d + q], a[p * d + p] - a[q * d + q]);
        const double c = std::cos(angle), s = std::sin(angle);
        for (int i = 0; i < d; ++i) {
          const double x = a[i * d + p], y = a[i * d + q];
          a[i * d + p] = c * x + s * y;
          a[i * d + q] = c * y - s * x;
        }
        for (int i = 0; i < d; ++i) {
          const double x = a[p * d + i], y = a[q * d + i];
          a[p * d + i] = c * x + s * y;
          a[q * d + i] = c * y - s * x;
        }
      }
    }
  }
  std::vector<double> values;
  for (int i = 0; i < d; ++i) values.push_back(a[i * d + i]);
  std::sort(values.rbegin(), values.rend());
  return values;
}

/// The least residual that any map of rank 16 from the codes to V leaves: |V|^2 less the 16 largest eigenvalues of the
/// fitted values' B^T A^-1 B.
double least_residual(const Centred& c) {
  const int d = c.d;
  Matrix a = gram(c.u, c.u, c.keys, d), b = gram(c.u, c.v, c.keys, d);
  const Matrix rhs = b;
  for (int k = 0; k < d; ++k) {  // Gauss-Jordan; A is positive definite
    const double pivot = a[k * d + k];
    for (int j = 0; j < d; ++j) a[k * d + j] /= pivot, b[k * d + j] /= pivot;
    for (int i = 0; i < d; ++i) {
      const double factor = a[i * d + k];
      if (i == k || factor == 0) continue;
      for (int j = 0; j < d; ++j) a[i * d + j] -= factor * a[k * d + j], b[i * d + j] -= factor * b[k * d + j];
    }
  }
  Matrix fitted(static_cast<size_t>(d * d));
  for (int k = 0; k < d; ++k) {
    for (int i = 0; i < d; ++i) {
      for (int j = 0; j < d; ++j) fitted[i * d + j] += rhs[k * d + i] * b[k * d + j];
    }
  }
  const std::vector<double> values = eigenvalues(fitted, d);
  return energy(c.v) - std::accumulate(values.begin(), values.begin() + kRank, 0.0);
}

struct Written {
  Written(const CacheLayout& layout, Tokens& tokens)
      : table(plain_table(layout, tokens.n)), pool(layout, static_cast<int64_t>(table.size())) {
    write(pool.storage(), table, 0, tokens, 0, tokens.n);
  }
  plan::HeadPage fit_page(int64_t mark, int64_t head) {
    return plan::head_page(pool.view(), table[(mark - 1) / pool.layout.page_size], head);
  }
  std::vector<int32_t> table;
  Pool pool;
};

class TailFit : public ::testing::Test {
 protected:
  void TearDown() override {
    omp_set_num_threads(threads_);
    cpu::set_isa(isa_);
  }
  const int threads_ = omp_get_max_threads();
  const cpu::Isa isa_ = cpu::isa();
};

constexpr int64_t kMark = 1024;

/// Against the best map of rank 16 in fp64. The fit may miss: its ridge, 1e-3 of the mean diagonal; directions that six
/// iterations do not separate, whose energies are nearly equal; rounding P and U to int8, at most (1/254)^2 of the
/// largest element squared for each, against a typical element that is several times smaller: together below 1 % of
/// what is explained.
TEST_F(TailFit, ExplainsAlmostWhatTheBestMapOfItsRankDoes) {
  for (const int64_t d : {64, 128}) {
    for (const int v_bits : {16, 8}) {
      const CacheLayout layout{.n_kv_heads = 2, .head_dim = d, .page_size = 64, .v_bits = v_bits};
      Tokens tokens(kMark, 2, d, 21);
      Written cache(layout, tokens);
      for (int64_t head = 0; head < 2; ++head) {
        const Centred c(cache.pool.view(), cache.table, kMark, head);
        const plan::HeadPage page = cache.fit_page(kMark, head);
        const double all = energy(c.v), best = least_residual(c);
        const double ours = residual(c, page.fit_in, page.fit_out, page.fit_scale);
        ASSERT_LT(best, 0.2 * all) << "the data are meant to be predictable";
        EXPECT_GE(ours, best * (1 - 1e-9));
        EXPECT_LE(ours, best + 0.01 * (all - best)) << "head dim " << d << ", head " << head << ": all " << all;
      }
    }
  }
}

/// V that no code of K predicts is left alone: the fit explains no more than chance does, d parameters of 1024 keys.
TEST_F(TailFit, AddsLittleWhereThereIsNothingToPredict) {
  Tokens tokens(kMark, 1, 64, 22), other(kMark, 1, 64, 23);
  tokens.v = other.v;
  Written cache({.n_kv_heads = 1, .head_dim = 64, .page_size = 64}, tokens);
  const Centred c(cache.pool.view(), cache.table, kMark, 0);
  const plan::HeadPage page = cache.fit_page(kMark, 0);
  const double ours = residual(c, page.fit_in, page.fit_out, page.fit_scale);
  EXPECT_GT(ours, 0.85 * energy(c.v));
  EXPECT_LE(ours, energy(c.v));
}

/// E grows between marks, stays, and grows again: one call through all marks and calls that reach one each.
TEST_F(TailFit, MarksAreTheSameOneByOneOrTogether) {
  Tokens tokens(1800, 1, 64, 24);
  for (const int64_t loud : {100, 1100, 1700}) {
    for (int64_t i = 0; i < 64; ++i) tokens.row(tokens.v, loud, 0)[i] *= static_cast<float>(loud);
  }
  const CacheLayout layout{.n_kv_heads = 1, .head_dim = 64, .page_size = 256};
  Written together(layout, tokens);
  Pool pool(layout, static_cast<int64_t>(together.table.size()));
  for (int64_t at = 0; at < tokens.n; at += 200) {
    write(pool.storage(), together.table, at, tokens, at, std::min(tokens.n, at + 200));
  }
  EXPECT_EQ(content(pool.view(), together.table, tokens.n), content(together.pool.view(), together.table, tokens.n));
  for (const int64_t mark : {1024, 1280, 1536, 1792}) {
    const plan::HeadPage page = together.fit_page(mark, 0);
    EXPECT_GT(page.fit_scale[0], 0) << mark;
  }
}

/// The longer request shares the shorter one's keys: its fit at their mark is the same.
TEST_F(TailFit, DependsOnItsKeysAlone) {
  Tokens tokens(1500, 2, 128, 25);
  const CacheLayout layout{.n_kv_heads = 2, .head_dim = 128, .page_size = 512, .k_bits = 4, .v_bits = 4};
  Written whole(layout, tokens);
  tokens.n = kMark;
  Written prefix(layout, tokens);
  EXPECT_EQ(content(whole.pool.view(), whole.table, kMark), content(prefix.pool.view(), prefix.table, kMark));
}

TEST_F(TailFit, ThreadsAndInstructionSetsChangeNoBit) {
  for (const int64_t d : {64, 128, 256}) {
    Tokens tokens(1300, 3, d, 26);
    const CacheLayout layout{.n_kv_heads = 3, .head_dim = d, .page_size = 256};
    cpu::set_isa(cpu::Isa::portable);
    omp_set_num_threads(1);
    Written first(layout, tokens);
    for (int level = 0; level <= static_cast<int>(isa_); ++level) {
      cpu::set_isa(static_cast<cpu::Isa>(level));
      for (const int threads : {1, 2, 4}) {
        omp_set_num_threads(threads);
        Written again(layout, tokens);
        EXPECT_EQ(content(again.pool.view(), again.table, tokens.n), content(first.pool.view(), first.table, tokens.n))
            << cpu::isa_name(cpu::isa()) << ", " << threads << " threads, head dim " << d;
      }
    }
  }
}

/// Codes all alike, or V all zero, leave no direction.
TEST_F(TailFit, NothingToFitIsZero) {
  for (const bool constant_k : {true, false}) {
    Tokens tokens(kMark, 1, 64, 27);
    auto& x = constant_k ? tokens.k : tokens.v;
    std::fill(x.begin(), x.end(), constant_k ? 1.0f : 0.0f);
    Written cache({.n_kv_heads = 1, .head_dim = 64, .page_size = 64}, tokens);
    const plan::HeadPage page = cache.fit_page(kMark, 0);
    EXPECT_TRUE(std::all_of(page.fit_scale, page.fit_scale + kRank, [](float f) { return f == 0; }));
    EXPECT_TRUE(std::all_of(page.fit_in, page.fit_in + kRank * 64, [](int8_t p) { return p == 0; }));
    EXPECT_TRUE(std::all_of(page.fit_out, page.fit_out + kRank * 64, [](int8_t u) { return u == 0; }));
  }
}

/// The sums' ranges: codes 0 and 15 in halves of a block, V readings at their ends.
TEST_F(TailFit, ExtremesOfTheIntegerSumsDoNotOverflow) {
  constexpr int64_t kDim = 64;
  Tokens tokens(kMark, 1, kDim, 28);
  for (int64_t t = 0; t < kMark; ++t) {
    float row[kDim];
    for (float& x : row) x = (t % 2 == 0 ? 127.0f : -127.0f) / 128;  // a scale of 1/128, which is E
    numerics::rotate(row, kDim);                                     // so that the stored row is this one
    std::copy_n(row, kDim, tokens.row(tokens.k, t, 0));
    std::copy_n(row, kDim, tokens.row(tokens.v, t, 0));
  }
  Written cache({.n_kv_heads = 1, .head_dim = kDim, .page_size = 64}, tokens);
  const Centred c(cache.pool.view(), cache.table, kMark, 0);
  for (int64_t i = 0; i < kDim; ++i) {
    ASSERT_EQ(std::abs(c.u[i]), 7.5) << "the extreme that is meant";
    ASSERT_EQ(std::abs(c.v[i]), 127.0 / 128);
  }
  const plan::HeadPage page = cache.fit_page(kMark, 0);
  // All channels move together, so one direction explains everything but the ridge's share, (1e-3 / 64)^2.
  EXPECT_LE(residual(c, page.fit_in, page.fit_out, page.fit_scale), 1e-4 * energy(c.v));
}

/// Marks lie a quarter of an octave apart, from 1024.
TEST_F(TailFit, Marks) {
  std::vector<int64_t> marks;
  for (int64_t mark = plan::next_mark(0); mark < 5000; mark = plan::next_mark(mark)) marks.push_back(mark);
  EXPECT_EQ(marks, (std::vector<int64_t>{1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096}));
  for (int64_t keys = 0, last = 0; keys < 5000; ++keys) {
    if (std::find(marks.begin(), marks.end(), keys) != marks.end()) last = keys;
    ASSERT_EQ(plan::last_mark(keys), last) << keys;
    ASSERT_EQ(plan::last_mark(plan::next_mark(keys) - 1), last) << keys;
    ASSERT_EQ(plan::last_mark(plan::next_mark(keys)), plan::next_mark(keys)) << keys;
  }
}

}  // namespace
