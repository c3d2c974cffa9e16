#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "numerics/exp2.h"

// exp2, log2 and fixed point against fp64, over the whole range. The bounds are docs/numerics.md's polynomial error
// plus half an ulp for each rounding that can be seen in the result.
namespace {

using fold::numerics::Exp2;
using fold::numerics::exp2_parts;
using fold::numerics::fix;
using fold::numerics::float_of;

constexpr double kPolynomial = 9.4e-8;  // of the exact polynomial, relative (docs/numerics.md, section 4)

/// Last Horner step: half an ulp of a result in [1, 1.415) or [0.707, 1), relative; the step before it: half an ulp of
/// a number below 1, times |f| <= 1/2, over 0.707. Earlier ones are multiplied by f again.
constexpr double kRounding = 0x1p-24 + 0x1p-25 * 0.5 / 0.707 * 1.5;

/// Largest of f(x) over fp32 numbers of magnitude low..high, both signs, `stride` apart.
template <typename F>
double largest(float low, float high, uint32_t stride, F f) {
  double most = 0;
  const int64_t begin = fold::numerics::bits_of(low), end = fold::numerics::bits_of(high);
#pragma omp parallel for reduction(max : most)
  for (int64_t bits = begin; bits <= end; bits += stride) {
    const float x = float_of(static_cast<uint32_t>(bits));
    most = std::max({most, f(x), f(-x)});
  }
  return most;
}

double exp2_error(float x) {
  const Exp2 e = exp2_parts(x);
  const double exact = std::exp2(static_cast<double>(x) - e.exponent);
  return std::abs(e.mantissa - exact) / exact;
}

/// Below 2^-24 the result is 1 to the last bit; between 2^-24 and 1/2 every 7th number, from there to 1 every 3rd.
TEST(Exp2, RelativeErrorFromMinusOneToOne) {
  EXPECT_LE(largest(0x1p-24f, 0.5f, 7, exp2_error), kPolynomial + kRounding);
  EXPECT_LE(largest(0.5f, 1.0f, 3, exp2_error), kPolynomial + kRounding);
  EXPECT_LE(largest(0.0f, 0x1p-24f, 65537, exp2_error), 0x1p-24);
  EXPECT_LT(kPolynomial + kRounding, 0x1p-22) << "two ulp of a number just above a power of two";
}

/// Everything else follows: a whole part changes the exponent alone.
TEST(Exp2, WholePartsAreExponents) {
  for (int n = -63; n < 40; ++n) {
    for (float f = -0.5f; f <= 0.5f; f += 0x1p-12f) {
      const Exp2 whole = exp2_parts(n + f), fraction = exp2_parts(f);
      if (std::abs(f) == 0.5f) continue;  // ties go to the even whole number
      ASSERT_EQ(whole.mantissa, fraction.mantissa) << n << " + " << f;
      ASSERT_EQ(whole.exponent, n + fraction.exponent);
      ASSERT_EQ(fold::numerics::exp2(n + f), std::ldexp(whole.mantissa, whole.exponent));
    }
  }
}

TEST(Exp2, StepsOverTheWholeRange) {
  for (double x = -126; x <= 40; x += 1.0 / 4099) {
    ASSERT_LE(exp2_error(static_cast<float>(x)), kPolynomial + kRounding) << x;
  }
}

TEST(Exp2, ArgumentsAreClamped) {
  EXPECT_EQ(fold::numerics::exp2(-126.0f), 0x1p-126f);
  EXPECT_EQ(fold::numerics::exp2(-1000.0f), 0x1p-126f);
  EXPECT_EQ(fold::numerics::exp2(-std::numeric_limits<float>::infinity()), 0x1p-126f);
  EXPECT_EQ(fold::numerics::exp2(41.0f), 0x1p40f);
  EXPECT_EQ(fold::numerics::exp2(fold::numerics::quiet_nan()), 0x1p-126f);
}

TEST(Fix, PowersOfTwoAreExactAndEndsSaturate) {
  for (int n = -26; n <= 5; ++n) EXPECT_EQ(fix(static_cast<float>(n)), 1u << (n + 26));
  EXPECT_EQ(fix(6.0f), 0xFFFFFFFFu);
  EXPECT_EQ(fix(1000.0f), 0xFFFFFFFFu);
  EXPECT_EQ(fix(-27.0f), 0u) << "a tie goes to the even number";
  EXPECT_EQ(fix(-64.5f), 0u);
  EXPECT_EQ(fix(-std::numeric_limits<float>::infinity()), 0u);
  EXPECT_EQ(fix(fold::numerics::quiet_nan()), 0u);
}

/// One rounding to fp32 for the product, one to the grid.
TEST(Fix, IsTheRoundedProduct) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> exponent(-40, 8), share(-12, 0);
  for (int i = 0; i < 1000000; ++i) {
    const float x = exponent(random), r = std::exp2(share(random));
    const Exp2 e = exp2_parts(x);
    const double product = static_cast<float>(static_cast<double>(e.mantissa) * r);
    const double want = std::min(std::nearbyint(std::ldexp(product, e.exponent + 26)), 4294967295.0);
    ASSERT_EQ(static_cast<double>(fix(e, r)), want) << x << ", " << r;
  }
}

double log2_error(float y) { return std::abs(fold::numerics::log2(y) - std::log2(static_cast<double>(y))); }

/// Every number of an octave around 1, then samples of every octave: within 2 ulp of max(|log2 y|, 1).
TEST(Log2, ErrorOverTheWholeRange) {
  double most = 0;
#pragma omp parallel for reduction(max : most)
  for (int64_t bits = 0x3F000000; bits <= 0x40000000; ++bits) {  // 1/2 .. 2
    most = std::max(most, log2_error(float_of(static_cast<uint32_t>(bits))));
  }
  EXPECT_LE(most, 2 * 0x1p-23);
  for (uint32_t bits = 0x00800000; bits < 0x7F800000; bits += 1009) {
    const float y = float_of(bits);
    const double magnitude = std::max(std::abs(std::log2(static_cast<double>(y))), 1.0);
    ASSERT_LE(log2_error(y), 2 * std::ldexp(1.0, std::ilogb(magnitude) - 23)) << y;
  }
}

TEST(Log2, PowersOfTwoAreExact) {
  for (int n = -126; n <= 127; ++n) EXPECT_EQ(fold::numerics::log2(fold::numerics::pow2(n)), static_cast<float>(n));
}

}  // namespace
