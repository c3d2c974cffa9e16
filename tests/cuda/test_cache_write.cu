// Cache writes on a device leave the CPU backend's bytes (P4 of docs/numerics.md), all of them and no others, whatever
// the layout, lengths, chunks, strides and padding.
#include "cache_write_testing.h"
#include "numerics/quotient.h"

namespace {

using namespace fold;
using namespace fold::testing;

using CacheWriteOnDevice = DeviceTest;

/// Needs no device: the rounding that the kernels do without a division.
TEST(Quotient, RoundsAsADivisionDoes) {
  Random random(1);
  for (int significand = 128; significand < 256; ++significand) {
    for (const int exponent : {-108, -100, -61, -1, 0, 1, 60, 119, 121}) {
      const float e = std::ldexp(static_cast<float>(significand), exponent - 7), inverse = numerics::div(1.0f, e);
      for (int i = 0; i < 2000; ++i) {
        // Any quotient, and those beside a tie.
        const float q = i % 2 == 0
                            ? std::ldexp(static_cast<float>(random() >> 8), -static_cast<int>(random() % 12) - 18)
                            : static_cast<float>(random() % 128) + 0.5f;
        const uint32_t bits = numerics::bits_of(numerics::mul(q, e)) + random() % 7 - 3;
        const float x = numerics::float_of(bits);
        if (!(x <= numerics::mul(e, 256.0f)) || !numerics::is_finite(x)) continue;
        const float want = numerics::div(x, e), got = numerics::quotient(x, e, inverse);
        ASSERT_TRUE(want >= 0.25f ? got == want : std::fabs(got) < 0.3f) << x << " / " << e;
      }
    }
  }
}

TEST(Quotient, RoundsAsADivisionDoesInFp64) {
  std::mt19937_64 random(2);
  const auto number = [&](int exponents) {  // of many exponents
    const uint64_t exponent = 1023 + random() % static_cast<uint64_t>(exponents) - static_cast<uint64_t>(exponents) / 2;
    return __builtin_bit_cast(double, (random() >> 12) | exponent << 52);
  };
  for (int i = 0; i < 4000000; ++i) {
    const double d = number(80), inverse = numerics::div(1.0, d);
    double a = number(120);
    if (i % 2 == 0) {  // quotients beside an fp64 number
      a = __builtin_bit_cast(double, __builtin_bit_cast(uint64_t, numerics::mul(number(8), d)) + random() % 3 - 1);
    }
    ASSERT_EQ(numerics::quotient(a, d, inverse), numerics::div(a, d)) << a << " / " << d;
    ASSERT_EQ(numerics::quotient(-a, d, inverse), numerics::div(-a, d)) << a << " / " << d;
  }
  EXPECT_EQ(numerics::quotient(0.0, 3.0, numerics::div(1.0, 3.0)), 0.0);
}

TEST_F(CacheWriteOnDevice, EveryLayoutAndType) {
  Random random(2);
  for (const int64_t d : {64, 128, 256}) {
    for (const int k_bits : {16, 8, 4}) {
      for (const int v_bits : {16, 8, 4}) {
        for (const bool tail : {true, false}) {
          const CacheLayout layout{2, d, 128, k_bits, v_bits, tail};
          for (const auto& [k_dtype, v_dtype] : {std::pair(DType::f32, DType::bf16), std::pair(DType::bf16, DType::f16),
                                                 std::pair(DType::f16, DType::f32)}) {
            Batch batch(random, layout, {200});
            BothPools pools(layout, batch.pool_pages);
            for (const int64_t count : {70, 1, 57, 64}) {
              write_both(pools, batch.call(random, layout, {count}, 0.5, k_dtype, v_dtype));
            }
            pools.expect_same("head dim " + std::to_string(d) + ", bits " + std::to_string(k_bits) + " and " +
                              std::to_string(v_bits) + (tail ? ", tail" : ""));
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

/// Requests of many lengths in one call, then one token each, then some more.
TEST_F(CacheWriteOnDevice, RaggedBatchesAndChunks) {
  Random random(3);
  const std::vector<std::vector<int64_t>> rounds = {{1, 0, 63, 64, 65, 127, 509, 256, 1},
                                                    {1, 1, 1, 1, 1, 1, 1, 1, 1},
                                                    {62, 64, 0, 63, 127, 1, 3, 255, 257},
                                                    {1, 0, 1, 0, 65, 2, 0, 1, 0}};
  std::vector<int64_t> capacity(rounds[0].size(), 0);
  for (const auto& counts : rounds) {
    for (size_t b = 0; b < counts.size(); ++b) capacity[b] += counts[b];
  }
  for (const int64_t d : {64, 128, 256}) {
    for (const int64_t page_size : {64, 192, 256, 1024}) {
      const CacheLayout layout{.n_kv_heads = 3, .head_dim = d, .page_size = page_size};
      Batch batch(random, layout, capacity);
      BothPools pools(layout, batch.pool_pages);
      for (const auto& counts : rounds) {
        write_both(pools, batch.call(random, layout, counts, 0.1, DType::bf16, DType::bf16));
        pools.expect_same("head dim " + std::to_string(d) + ", pages of " + std::to_string(page_size));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CacheWriteOnDevice, StridesAndAlignments) {
  Random random(8);
  for (const int64_t d : {64, 128}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const auto& [gap, shift] : {std::pair<int64_t, int64_t>{0, 0}, {16, 0}, {128, 16}, {48, 32}}) {
        const CacheLayout layout{.n_kv_heads = 2, .head_dim = d, .page_size = 64};
        Batch batch(random, layout, {200});
        BothPools pools(layout, batch.pool_pages, gap, shift);
        Call call = batch.call(random, layout, {130}, 0);
        call.k = make_rows(random, 130, 2, d, dtype, 0.1, 1, 3);  // no vector of elements is aligned
        call.v = make_rows(random, 130, 2, d, dtype, 0.1, 8, 2 * d);
        write_both(pools, call);
        call = batch.call(random, layout, {70}, 0);
        call.v = make_rows(random, 70, 2, d, dtype, 0.1);
        call.v.stride_h = 0;  // one head for all
        write_both(pools, call);
        pools.expect_same("gap " + std::to_string(gap) + ", shift " + std::to_string(shift));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CacheWriteOnDevice, PaddingTokensTakeNoPosition) {
  Random random(9);
  const CacheLayout layout{.n_kv_heads = 2, .head_dim = 64, .page_size = 256};
  Batch batch(random, layout, {9500, 300, 3, 400});
  BothPools pools(layout, batch.pool_pages);
  for (const std::vector<int64_t>& counts :
       {std::vector<int64_t>{9000, 100, 1, 0}, {1, 1, 0, 1}, {64, 127, 2, 300}, {0, 0, 0, 0}, {435, 72, 0, 99}}) {
    const Call plain = batch.call(random, layout, counts, 0.05, DType::bf16, DType::bf16);
    write_both(pools, with_padding(random, layout, batch, plain, below(random, 100)));
    pools.expect_same("padding");
    if (HasFatalFailure()) return;
  }
}

TEST_F(CacheWriteOnDevice, RandomCalls) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    Random random(1000 + seed);
    const auto any_of = [&](auto... values) {
      const int64_t all[] = {values...};
      return all[below(random, sizeof...(values))];
    };
    const auto any_dtype = [&] { return static_cast<DType>(below(random, 3)); };
    const CacheLayout layout{.n_kv_heads = 1 + below(random, 4),
                             .head_dim = any_of(64, 64, 128, 128, 256),
                             .page_size = 64 * (1 + below(random, 16)),
                             .k_bits = static_cast<int>(any_of(16, 8, 4)),
                             .v_bits = static_cast<int>(any_of(16, 8, 4)),
                             .tail = below(random, 4) != 0};
    const size_t requests = static_cast<size_t>(1 + below(random, 5));
    std::vector<std::vector<int64_t>> rounds(static_cast<size_t>(2 + below(random, 4)));
    std::vector<int64_t> capacity(requests, 1);
    for (auto& counts : rounds) {
      for (size_t b = 0; b < requests; ++b) {
        counts.push_back(any_of(0, 1, 1, below(random, 64), below(random, 300), below(random, 1400)));
        capacity[b] += counts[b];
      }
    }
    Batch batch(random, layout, capacity);
    BothPools pools(layout, batch.pool_pages, 16 * below(random, 5), 16 * below(random, 5));
    for (const auto& counts : rounds) {
      Call call = batch.call(random, layout, counts, 0.02, any_dtype(), any_dtype());
      if (below(random, 2) == 0) call = with_padding(random, layout, batch, call, below(random, 10));
      write_both(pools, call);
      pools.expect_same("seed " + std::to_string(seed));
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
