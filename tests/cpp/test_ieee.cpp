#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>

#include "numerics/ieee.h"

// Conversions against a rounding written in fp64, which holds every value and every midpoint exactly.
namespace {

using namespace fold::numerics;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// A format with `digits` fraction bits whose smallest normal number is 2^min_exponent and whose largest finite one is
/// below 2^end_exponent.
struct Format {
  int digits, min_exponent, end_exponent;

  /// Distance of the format's numbers around x.
  double step(double x) const {
    return std::ldexp(1.0, std::max(x == 0 ? -2000 : std::ilogb(x), min_exponent) - digits);
  }

  double nearest(double x) const {
    const double unit = step(x), rounded = std::nearbyint(x / unit) * unit;
    return std::abs(rounded) < std::ldexp(1.0, end_exponent) ? rounded : std::copysign(kInfinity, x);
  }
};
constexpr auto bf16_value = [](uint16_t bits) { return from_bf16(bits); };
constexpr auto f16_value = [](uint16_t bits) { return from_f16(bits); };
constexpr Format kBf16{7, -126, 128}, kF16{10, -14, 16};

float next(float x, int steps) { return float_of(bits_of(x) + static_cast<uint32_t>(steps)); }

/// fp32 numbers at and around every number of a format and every midpoint, both signs: f(x).
template <typename Decode, typename F>
void walk_edges(Decode decode, const Format& format, F f) {
  for (uint32_t bits = 0; bits < 0x8000; ++bits) {
    const float x = decode(static_cast<uint16_t>(bits));
    if (!std::isfinite(x)) continue;
    const float half = static_cast<float>(x + format.step(x) / 2);
    for (const float at : {x, half, static_cast<float>(x + format.step(x) / 4)}) {
      for (int offset = at == 0 ? 0 : -1; offset <= 1; ++offset) {
        f(next(at, offset));
        f(-next(at, offset));
      }
    }
  }
}

TEST(Ieee, Bf16IsTheUpperHalfOfFp32) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    EXPECT_EQ(bits_of(from_bf16(static_cast<uint16_t>(bits))), bits << 16);
  }
}

TEST(Ieee, F16ValuesAreTheFormats) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
    const float got = from_f16(static_cast<uint16_t>(bits));
    ASSERT_EQ(std::signbit(got), bits >= 0x8000) << bits;
    if (exponent == 31) {
      ASSERT_TRUE(fraction == 0 ? std::isinf(got) : std::isnan(got)) << bits;
    } else {
      const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
      ASSERT_EQ(std::abs(static_cast<double>(got)), magnitude) << bits;
    }
  }
}

TEST(Ieee, EveryNumberSurvivesTheWayThere) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    if (std::isnan(from_bf16(half))) {
      ASSERT_TRUE(std::isnan(from_bf16(to_bf16(from_bf16(half)))));
    } else {
      ASSERT_EQ(to_bf16(from_bf16(half)), half);
    }
    if (std::isnan(from_f16(half))) {
      ASSERT_TRUE(std::isnan(from_f16(to_f16(from_f16(half)))));
    } else {
      ASSERT_EQ(to_f16(from_f16(half)), half);
    }
  }
}

TEST(Ieee, Bf16RoundsToNearestEven) {
  walk_edges(bf16_value, kBf16, [](float x) {
    const float got = from_bf16(to_bf16(x));
    ASSERT_EQ(static_cast<double>(got), kBf16.nearest(x)) << x;
    ASSERT_EQ(std::signbit(got), std::signbit(x)) << x;
  });
}

TEST(Ieee, F16RoundsToNearestEven) {
  const auto check = [](float x) {
    const float got = from_f16(to_f16(x));
    ASSERT_EQ(static_cast<double>(got), kF16.nearest(x)) << x;
    ASSERT_EQ(std::signbit(got), std::signbit(x)) << x;
  };
  walk_edges(f16_value, kF16, check);
  for (uint32_t bits = 0; bits < 0x7F800000; bits += 4099) check(float_of(bits));  // the whole range of fp32
}

TEST(Ieee, NotANumberStaysOne) {
  for (const uint32_t bits : {0x7F800001u, 0x7F80FFFFu, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu}) {
    EXPECT_TRUE(std::isnan(from_bf16(to_bf16(float_of(bits))))) << bits;
    EXPECT_TRUE(std::isnan(from_f16(to_f16(float_of(bits))))) << bits;
  }
  EXPECT_TRUE(std::isnan(from_bf16(kBf16Nan)));
  EXPECT_EQ(from_f16(to_f16(-kInfinity)), -kInfinity);
  EXPECT_EQ(from_bf16(to_bf16(kInfinity)), kInfinity);
}

TEST(Ieee, Bf16UpIsTheSmallestNotBelow) {
  walk_edges(bf16_value, kBf16, [](float x) {
    if (std::signbit(x) || x > from_bf16(0x7F7F)) return;
    const uint16_t up = to_bf16_up(x);
    ASSERT_GE(from_bf16(up), x);
    if (x > 0) {
      ASSERT_LT(from_bf16(static_cast<uint16_t>(up - 1)), x);
    }
  });
}

TEST(Ieee, RneTakesTiesToEven) {
  const std::array<std::array<float, 2>, 8> cases = {
      {{0.5f, 0}, {1.5f, 2}, {2.5f, 2}, {-0.5f, 0}, {-1.5f, -2}, {-2.5f, -2}, {0.49999997f, 0}, {126.5f, 126}}};
  for (const auto& [x, want] : cases) EXPECT_EQ(rne(x), want) << x;
}

TEST(Ieee, Pow2OfEveryNormalExponent) {
  for (int e = -126; e <= 127; ++e) EXPECT_EQ(static_cast<double>(pow2(e)), std::ldexp(1.0, e));
}

TEST(Ieee, FiniteOrNot) {
  EXPECT_TRUE(is_finite(0.0f) && is_finite(-std::numeric_limits<float>::max()));
  EXPECT_FALSE(is_finite(kInfinity) || is_finite(-kInfinity) || is_finite(quiet_nan()));
}

/// a b + c with a b = 1 + 2^-11 + 2^-24: fused, the 2^-24 survives; in two operations it does not.
TEST(Ieee, OneRoundingPerOperation) {
  volatile float a = 1 + 0x1p-12f, c = -(1 + 0x1p-11f);  // not known to the compiler
  EXPECT_EQ(fma(a, a, c), 0x1p-24f);
  EXPECT_EQ(add(mul(a, a), c), 0.0f);
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-4, 4);
  for (int i = 0; i < 100000; ++i) {
    const float x = uniform(random), y = uniform(random), z = uniform(random);
    const double product = static_cast<double>(x) * y;  // exact
    ASSERT_EQ(mul(x, y), static_cast<float>(product));
    ASSERT_EQ(add(mul(x, y), z), static_cast<float>(static_cast<double>(static_cast<float>(product)) + z));
    ASSERT_EQ(fma(x, y, z), std::fma(x, y, z));
  }
}

}  // namespace
