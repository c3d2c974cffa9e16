// Public partial sums and reads of the cache through the API: the device has the CPU's bytes (P4 of docs/numerics.md).
#include "step_testing.h"

namespace {

using namespace fold;
using namespace fold::testing;

/// Partial sums of ranges, added and finished on both sides.
class Partials : public DeviceTest {
 protected:
  struct Sums {
    Sums(int64_t b, int64_t t, int64_t h, int64_t d)
        : numerator(filled(DType::i64, {b, t, h, d}, int64_t{-7})),
          denominator(filled(DType::i64, {b, t, h, 3}, int64_t{-7})),
          grid(filled(DType::f32, {b, t, h, 3}, -7.0f)) {}
    Partial here() { return {numerator.here(), denominator.here(), grid.here()}; }
    Partial there() const { return {numerator.there(), denominator.there(), grid.there()}; }
    void expect_same(const char* what) const {
      numerator.expect_same(what);
      denominator.expect_same(what);
      grid.expect_same(what);
    }
    Both<int64_t> numerator, denominator;
    Both<float> grid;
  };

  void compare(int64_t dim, DType out_type, float shift) {
    SCOPED_TRACE("head dim " + std::to_string(dim) + ", shift " + std::to_string(shift));
    Scene s({.n_kv_heads = 2, .head_dim = dim}, {700, 0, 1, 1500}, 1, 0.002);
    const int64_t b = s.requests, t = 1, h = kGroup * 2;
    auto q = normal(s.random, {b, t, h, dim}, 3), sinks = normal(s.random, {h}, 3);
    auto table = s.table(), lengths = integers(s.before);
    auto depth = filled(DType::f32, {1}, 11.0f);
    const auto arguments = [&](bool there) {
      DecodeArgs args;
      args.q = there ? q.there() : q.here();
      args.block_table = there ? table.there() : table.here();
      args.seqlens = there ? lengths.there() : lengths.here();
      args.depth = there ? depth.there() : depth.here();
      args.reference_shift = shift;
      return args;
    };
    Sums sum(b, t, h, dim), part(b, t, h, dim);
    const Workspace workspace(decode_workspace(s.pools.device(), arguments(true)));
    const Launch launch{.stream = nullptr, .workspace = workspace.view()};
    bool first = true;
    for (const auto& [begin, end] : {std::pair{0, 640}, {640, 704}, {704, 2048}}) {
      Sums& into = first ? sum : part;
      partial(s.pools.host(), arguments(false), begin, end, into.here());
      partial(s.pools.device(), arguments(true), begin, end, into.there(), launch);
      check(cudaDeviceSynchronize());
      into.expect_same("a part");
      if (!first) {
        add_partials(sum.here(), part.here());
        add_partials(sum.there(), part.there(), {});
        check(cudaDeviceSynchronize());
        sum.expect_same("a sum");
      }
      first = false;
    }
    const int64_t width = dtype_size(out_type);
    std::vector<uint8_t> poison(static_cast<size_t>(b * t * h * dim * width), 0x55);
    Both<uint8_t> out(out_type, {b, t, h, dim}, poison);
    auto lse = filled(DType::f32, {b, h, t}, 7.0f);
    auto valid = filled(DType::u8, {b, t, h}, uint8_t{7});
    for (const bool with_sinks : {false, true}) {
      finish(sum.here(), with_sinks ? sinks.here() : TensorView(), out.here(), lse.here(), valid.here());
      finish(sum.there(), with_sinks ? sinks.there() : TensorView(), out.there(), lse.there(), valid.there(), {});
      check(cudaDeviceSynchronize());
      out.expect_same("out");
      lse.expect_same("lse");
      valid.expect_same("valid");
    }
    const auto holding = std::count(valid.host.begin(), valid.host.end(), 1);
    // Rows without keys always are.
    EXPECT_EQ(shift == 0, holding > h) << holding << " rows are valid";
  }
};

TEST_F(Partials, AddAndFinishToTheCpusBytes) {
  for (const int64_t dim : {64, 128, 256}) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) compare(dim, type, 0);
  }
}

TEST_F(Partials, RowsThatAreNotDoneAreSaidToBe) { compare(128, DType::f32, 60); }

TEST_F(Partials, GridsThatDifferPoisonTheirRow) {
  const int64_t rows = 5, d = 64;
  Sums a(1, 1, rows, d), b(1, 1, rows, d);
  for (Sums* s : {&a, &b}) {
    for (int64_t r = 0; r < rows; ++r) {
      const float grid[3] = {3, 0.5f, 2};
      const int64_t sums[3] = {int64_t{1} << 25, int64_t{1} << 25, 100};
      std::copy(grid, grid + 3, s->grid.host.begin() + 3 * r);
      std::copy(sums, sums + 3, s->denominator.host.begin() + 3 * r);
    }
  }
  b.grid.host[3 * 2 + 1] = 0.25f;  // row 2
  for (Sums* s : {&a, &b}) {
    s->grid.device.set(s->grid.host);
    s->denominator.device.set(s->denominator.host);
  }
  EXPECT_THROW(add_partials(a.here(), b.here()), Error);
  add_partials(a.there(), b.there(), {});
  Both<float> out = filled(DType::f32, {1, 1, rows, d}, 7.0f);
  auto valid = filled(DType::u8, {1, 1, rows}, uint8_t{7});
  finish(a.there(), {}, out.there(), {}, valid.there(), {});
  check(cudaDeviceSynchronize());
  EXPECT_EQ(valid.device.back(), (std::vector<uint8_t>{1, 1, 0, 1, 1}));
  const std::vector<float> got = out.device.back();
  for (int64_t i = 0; i < rows * d; ++i) EXPECT_EQ(std::isnan(got[static_cast<size_t>(i)]), i / d == 2) << i;
  const std::vector<int64_t> numerator = a.numerator.device.back();
  EXPECT_EQ(numerator[0], -14);
  EXPECT_EQ(numerator[2 * d], 0);
}

class CacheRead : public DeviceTest {};

TEST_F(CacheRead, HasTheCpusBytes) {
  for (const int64_t dim : {64, 128, 256}) {
    for (const auto& [k_bits, v_bits] : {std::pair{16, 16}, {8, 4}, {4, 16}}) {
      for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
        SCOPED_TRACE("head dim " + std::to_string(dim) + ", bits " + std::to_string(k_bits));
        Scene s({.n_kv_heads = 3, .head_dim = dim, .page_size = 64, .k_bits = k_bits, .v_bits = v_bits},
                {65, 0, 1, 300}, 1, type == DType::f32 ? 0.3 : 0);
        auto table = s.table(), starts = integers({2, 67, 67, 68, 368});  // two rows before and behind are nobody's
        std::vector<uint8_t> poison(static_cast<size_t>(370 * 3 * dim * dtype_size(type)), 0x55);
        Both<uint8_t> k(type, {370, 3, dim}, poison), v(type, {370, 3, dim}, poison);
        cache_read(s.pools.host(), table.here(), starts.here(), k.here(), v.here());
        cache_read(s.pools.device(), table.there(), starts.there(), k.there(), v.there(), {});
        check(cudaDeviceSynchronize());
        for (const Both<uint8_t>* rows : {&k, &v}) {
          if (type != DType::f32) {
            rows->expect_same("rows");
            continue;
          }
          std::vector<float> got(rows->host.size() / 4), want(got.size());
          const std::vector<uint8_t> bytes = rows->device.back();
          std::memcpy(got.data(), bytes.data(), bytes.size());
          std::memcpy(want.data(), rows->host.data(), bytes.size());
          expect_same(got, want, "rows");
        }
      }
    }
  }
}

TEST_F(CacheRead, KeysWithoutAPageAreNan) {
  Scene s({.n_kv_heads = 1, .head_dim = 64, .page_size = 64}, {200, 100}, 1);
  s.batch.table[1] = -1;                                              // keys 64..127 of the first request
  s.batch.table[static_cast<size_t>(s.batch.width)] = INT32_MAX;      // all of the second's
  auto table = s.table(), starts = integers({0, 200, 200 + 64 * 8});  // past the table's columns too
  auto k = filled(DType::f32, {900, 1, 64}, 7.0f), v = filled(DType::f32, {900, 1, 64}, 7.0f);
  cache_read(s.pools.device(), table.there(), starts.there(), k.there(), v.there(), {});
  check(cudaDeviceSynchronize());
  for (const Both<float>* rows : {&k, &v}) {
    const std::vector<float> got = rows->device.back();
    const auto is_nan = [&](int64_t row) { return std::isnan(got[static_cast<size_t>(row * 64)]); };
    EXPECT_FALSE(is_nan(63));
    EXPECT_TRUE(is_nan(64));
    EXPECT_TRUE(is_nan(127));
    EXPECT_FALSE(is_nan(128));
    EXPECT_TRUE(is_nan(200));
    EXPECT_TRUE(is_nan(200 + 64 * 8 - 1));
    EXPECT_EQ(got[static_cast<size_t>(64 * (200 + 64 * 8))], 7.0f);
  }
}

}  // namespace
