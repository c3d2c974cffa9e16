#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "numerics/block.h"

namespace {

using namespace fold::numerics;

/// Rows of many magnitudes, among them some with one large channel and some near the smallest scale.
std::vector<std::vector<float>> sample_rows(int d, int count) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-110, 100);
  std::vector<std::vector<float>> rows(static_cast<size_t>(count), std::vector<float>(static_cast<size_t>(d)));
  for (auto& row : rows) {
    const float unit = std::ldexp(1.0f, exponent(random));
    for (float& x : row) x = unit * normal(random);
    if (exponent(random) % 3 == 0) row[static_cast<size_t>(exponent(random) + 110) % row.size()] *= 1000;
  }
  return rows;
}

class Planes : public ::testing::TestWithParam<int> {};

/// Against the matrix itself in fp64. Each of the log2(D) + 1 roundings of an element adds at most 2^-24 of the largest
/// intermediate, which the row's Euclidean norm bounds.
TEST_P(Planes, RotationIsTheHadamardMatrixAndItsOwnInverse) {
  const int d = GetParam();
  for (const auto& x : sample_rows(d, 20)) {
    double norm = 0;
    for (const float v : x) norm += static_cast<double>(v) * v;
    const double tolerance = (std::log2(d) + 2) * 0x1p-24 * std::sqrt(norm) * std::sqrt(d);
    std::vector<float> y = x;
    rotate(y.data(), d);
    for (int i = 0; i < d; ++i) {
      double exact = 0;
      for (int j = 0; j < d; ++j) exact += (__builtin_popcount(i & j) % 2 == 0 ? 1 : -1) * static_cast<double>(x[j]);
      ASSERT_NEAR(y[i], exact / std::sqrt(static_cast<double>(d)), tolerance) << i;
    }
    rotate(y.data(), d);
    for (int i = 0; i < d; ++i) ASSERT_NEAR(y[i], x[i], 2 * tolerance) << i;
  }
}

TEST_P(Planes, EveryReadingIsWithinItsBound) {
  const int d = GetParam();
  std::vector<int8_t> a(static_cast<size_t>(d)), b(a.size());
  std::vector<uint8_t> h(a.size() / 2), l(a.size() / 2);
  for (const auto& x : sample_rows(d, 300)) {
    const double e = from_bf16(split_row(x.data(), d, a.data(), b.data()));
    for (int i = 0; i < d / 2; ++i) {
      h[i] = pack_h(a[2 * i], a[2 * i + 1]);
      l[i] = pack_l(a[2 * i], a[2 * i + 1]);
    }
    const PlaneRow rows[3] = {
        {h.data(), nullptr, nullptr}, {h.data(), l.data(), nullptr}, {h.data(), l.data(), b.data()}};
    // In e: plane h leaves -8..7 of a beside the rounding of a; b stops at 127, a step short of the tie with 128.
    const double bound[3] = {8.5, 0.5, 1.0 / 256};
    for (int level = 0; level < 3; ++level) {
      int r[kMaxHeadDim];
      readings(rows[level], d, r);
      for (int i = 0; i < d; ++i) {
        ASSERT_EQ(r[i], reading(rows[level], i));
        const double quotient = 127 * 0x1p-23;  // quotients are rounded to fp32 before they are rounded to integers
        ASSERT_LE(std::abs(x[i] - e * r[i] / 256), e * (bound[level] + quotient)) << level << " " << i;
      }
    }
    int u[kMaxHeadDim];
    codes(h.data(), d, u);
    for (int i = 0; i < d; ++i) {
      ASSERT_EQ(u[i], code_h(a[i]));
      ASSERT_GE(a[i], -127) << "sums of products (src/cpu/tail_sums.h) rely on it";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Planes, ::testing::Values(64, 128, 256));

TEST(Scale, IsTheSmallestBf16ThatHoldsTheRow) {
  for (uint32_t bits = 0x00000000; bits < 0x7F800000; bits += 9973) {
    const float amax = float_of(bits), e = from_bf16(row_scale(amax));
    ASSERT_GE(e, 0x1p-100f);
    ASSERT_GE(e, amax / 127.0f);
    if (e > 0x1p-100f) {
      ASSERT_LT(from_bf16(static_cast<uint16_t>(row_scale(amax) - 1)), amax / 127.0f) << amax;
    }
  }
}

TEST(Scale, PoisonedRowsAreZeroBytes) {
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), quiet_nan(),
                          float_of(0xFF800001u)}) {
    std::vector<float> x(64, 3.0f);
    x[17] = bad;
    int8_t a[64], b[64];
    std::fill_n(a, 64, int8_t{1});
    std::fill_n(b, 64, int8_t{1});
    EXPECT_EQ(split_row(x.data(), 64, a, b), kBf16Nan);
    for (int i = 0; i < 64; ++i) EXPECT_TRUE(a[i] == 0 && b[i] == 0);
  }
}

TEST(Scale, SlotsOfATileAreAPermutation) {
  std::set<int> slots;
  for (int j = 0; j < kTile; ++j) slots.insert(scale_slot(j));
  EXPECT_EQ(slots.size(), 64u);
  EXPECT_EQ(*slots.begin(), 0);
  EXPECT_EQ(*slots.rbegin(), 63);
}

TEST(Scale, PowerOfTwoNotBelow) {
  for (uint32_t bits = 0x0080; bits < 0x7F80; ++bits) {
    const double e = from_bf16(static_cast<uint16_t>(bits)),
                 power = std::ldexp(1.0, pow2_ceil_exponent(static_cast<uint16_t>(bits)));
    ASSERT_TRUE(power >= e && power / 2 < e) << e;
  }
}

/// A block of 64 keys against sums in fp64.
TEST(Block, SummaryIsTheMean) {
  constexpr int kDim = 128;
  const auto x = sample_rows(kDim, 64);
  std::vector<uint8_t> h(64 * kDim / 2), l(h.size());
  std::vector<int8_t> b(64 * kDim);
  std::vector<uint16_t> scale(64);
  std::vector<double> mean(kDim), code(kDim), magnitude(kDim);
  for (int j = 0; j < 64; ++j) {
    int8_t a[kDim];
    std::vector<float> row = x[j];
    for (float& v : row) v = std::ldexp(v, -std::ilogb(*std::max_element(row.begin(), row.end())) + j % 5);
    scale[scale_slot(j)] = split_row(row.data(), kDim, a, &b[j * kDim]);
    for (int i = 0; i < kDim; ++i) {
      const double value = from_bf16(scale[scale_slot(j)]) * (a[i] + b[j * kDim + i] / 256.0);
      mean[i] += value / 64;
      magnitude[i] += std::abs(value) / 64;
      code[i] += code_h(a[i]) / 64.0;
    }
    for (int i = 0; i < kDim / 2; ++i) {
      h[j * kDim / 2 + i] = pack_h(a[2 * i], a[2 * i + 1]);
      l[j * kDim / 2 + i] = pack_l(a[2 * i], a[2 * i + 1]);
    }
  }
  uint8_t ubar[kDim];
  int8_t mean_a[kDim];
  block_ubar(h.data(), kDim, ubar);
  const float e = from_bf16(block_mean({h.data(), l.data(), b.data()}, scale.data(), kDim, mean_a));
  for (int i = 0; i < kDim; ++i) {
    EXPECT_LE(std::abs(ubar[i] - 16 * code[i]), 0.5) << i;
    EXPECT_LE(std::abs(mean_a[i] * static_cast<double>(e) - mean[i]),
              e / 2 + 66 * 0x1p-24 * magnitude[i] + 127 * e * 0x1p-23)
        << i;
  }
}

TEST(Block, BoundIsTheLargestVScaleOrNan) {
  std::vector<uint16_t> k(64, to_bf16(9.0f)), v(64, to_bf16(0.25f));
  v[40] = to_bf16(0.5f);
  EXPECT_EQ(block_bound(k.data(), v.data()), to_bf16(0.5f));
  for (auto* scales : {&k, &v}) {
    for (const int j : {0, 33, 63}) {
      const uint16_t before = std::exchange((*scales)[j], kBf16Nan);
      EXPECT_EQ(block_bound(k.data(), v.data()), kBf16Nan);
      (*scales)[j] = before;
    }
  }
}

}  // namespace
