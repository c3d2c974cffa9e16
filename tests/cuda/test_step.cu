// Whole decoding steps, public partial sums and reads of the cache through the API: the device has the CPU's bytes (P4
// of docs/numerics.md), and what its tensors hold that makes no sense is harmless.
#include <functional>

#include "cache_write_testing.h"

namespace {

using namespace fold;
using namespace fold::testing;

/// A tensor of the host and its copy on the device.
template <typename T>
struct Both {
  Both(DType type, std::initializer_list<int64_t> dims, std::vector<T> values)
      : host(std::move(values)), device(host), shape(nullptr, type, dims) {}

  TensorView here() {
    TensorView view = shape;
    view.data = host.data();
    return view;
  }
  TensorView there() const { return on_device(shape, device.data()); }
  void expect_same(const char* what) const { fold::testing::expect_same(device.back(), host, what); }

  std::vector<T> host;
  OnDevice<T> device;
  TensorView shape;
};

template <typename T>
Both<T> filled(DType type, std::initializer_list<int64_t> dims, T value) {
  int64_t size = 1;
  for (const int64_t d : dims) size *= d;
  return {type, dims, std::vector<T>(static_cast<size_t>(size), value)};
}

Both<float> normal(Random& random, std::initializer_list<int64_t> dims, float size = 1) {
  int64_t count = 1;
  for (const int64_t d : dims) count *= d;
  std::vector<float> values(static_cast<size_t>(count));
  std::normal_distribution<float> distribution;
  for (float& x : values) x = size * distribution(random);
  return {DType::f32, dims, std::move(values)};
}

Both<int32_t> integers(const std::vector<int32_t>& values) {
  return {DType::i32, {static_cast<int64_t>(values.size())}, values};
}

/// Requests on scattered pages, the same on both sides, and queries for them.
struct Scene {
  Scene(const CacheLayout& cache_layout, const std::vector<int64_t>& lengths, int64_t room, double hard = 0)
      : layout(cache_layout),
        batch(random, layout, capacity(lengths, room)),
        pools(layout, batch.pool_pages),
        requests(static_cast<int64_t>(lengths.size())) {
    write_both(pools, batch.call(random, layout, lengths, hard));
    for (const int64_t n : batch.lengths) before.push_back(static_cast<int32_t>(n));
  }

  static std::vector<int64_t> capacity(std::vector<int64_t> lengths, int64_t room) {
    for (int64_t& n : lengths) n += room;
    return lengths;
  }

  Both<int32_t> table() const { return {DType::i32, {requests, batch.width}, batch.table}; }

  const CacheLayout layout;
  Random random{5};
  Batch batch;
  BothPools pools;
  int64_t requests;
  std::vector<int32_t> before;
};

class Step : public DeviceTest, public ::testing::WithParamInterface<bool> {};  // with the tail model

constexpr int64_t kGroup = 4;

/// T new tokens for each request; change() may alter what the step is told before it runs on both sides.
struct StepCase {
  int64_t tokens = 1;
  std::vector<int32_t> q_lens;
  std::function<std::vector<int64_t>(const Scene&)> slots;  // or none
};

void compare_step(Scene& s, const StepCase& c) {
  const int64_t b = s.requests, t = c.tokens, hk = s.layout.n_kv_heads, h = kGroup * hk, d = s.layout.head_dim;
  auto q = normal(s.random, {b, t, h, d}, 3), k = normal(s.random, {b * t, hk, d}),
       v = normal(s.random, {b * t, hk, d});
  auto table = s.table(), before = integers(s.before), q_lens = integers(c.q_lens);
  Both<int64_t> slots(DType::i64, {b * t}, c.slots ? c.slots(s) : std::vector<int64_t>());
  auto depth = filled(DType::f32, {1}, 12.0f), sinks = normal(s.random, {h});
  auto out = filled(DType::f32, {b, t, h, d}, 7.0f), lse = filled(DType::f32, {b, h, t}, 7.0f);
  auto bytes = filled(DType::i64, {b, t, hk}, int64_t{-1});
  const auto view = [](auto& both, bool there) { return there ? both.there() : both.here(); };
  const auto arguments = [&](bool there) {
    StepArgs args{.k = view(k, there), .v = view(v, there), .slot_mapping = {}, .decode = {}};
    if (c.slots) args.slot_mapping = view(slots, there);
    args.decode.q = view(q, there);
    args.decode.block_table = view(table, there);
    args.decode.seqlens = view(before, there);
    if (!c.q_lens.empty()) args.decode.q_lens = view(q_lens, there);
    args.decode.depth = view(depth, there);
    args.decode.sinks = view(sinks, there);
    return args;
  };
  const auto results = [&](bool there) {
    DecodeResults r;
    r.out = view(out, there);
    r.lse = view(lse, there);
    r.bytes_read = view(bytes, there);
    return r;
  };
  const StepArgs device_arguments = arguments(true);
  const Workspace workspace(decode_step_workspace(s.pools.device(), device_arguments));
  decode_step(s.pools.device(), device_arguments, results(true), {.stream = nullptr, .workspace = workspace.view()});
  check(cudaDeviceSynchronize());
  decode_step(s.pools.host(), arguments(false), results(false));
  s.pools.expect_same("pages");
  out.expect_same("out");
  lse.expect_same("lse");
  bytes.expect_same("bytes read");
}

TEST_P(Step, OneTokenEach) {
  for (const int64_t dim : {64, 128, 256}) {
    SCOPED_TRACE("head dim " + std::to_string(dim));
    const CacheLayout layout{.n_kv_heads = 2, .head_dim = dim, .page_size = 64, .tail = GetParam()};
    Scene s(layout, {1, 63, 64, 130, 1023, 1024}, 1);
    compare_step(s, {});
  }
}

TEST_P(Step, PaddingRequests) {
  Scene s({.n_kv_heads = 2, .head_dim = 128, .tail = GetParam()}, {200, 0, 0, 300}, 8);
  s.batch.table[static_cast<size_t>(s.batch.width)] = -1;  // the second holds no keys and has no page: padding
  compare_step(s, {});
  Scene drafts({.n_kv_heads = 2, .head_dim = 128, .tail = GetParam()}, {200, 0, 0, 300}, 8);
  drafts.batch.table[static_cast<size_t>(drafts.batch.width)] = -1;
  compare_step(drafts, {.tokens = 5, .q_lens = {}, .slots = {}});
}

TEST_P(Step, SomeTokensOfSomeRequests) {
  Scene s({.n_kv_heads = 2, .head_dim = 128, .page_size = 64, .tail = GetParam()}, {60, 61, 1020, 300}, 8);
  compare_step(s, {.tokens = 5, .q_lens = {5, 0, 4, 1}, .slots = {}});
}

TEST_P(Step, MoreTokensThanABlockHas) {
  Scene s({.n_kv_heads = 1, .head_dim = 64, .page_size = 64, .tail = GetParam()}, {30, 62}, 70);
  compare_step(s, {.tokens = 70, .q_lens = {70, 67}, .slots = {}});
}

TEST_P(Step, SlotsOfTheCallers) {
  const std::vector<int64_t> given{5, 2, 0, 3};
  const auto slots = [&](const Scene& s) {
    std::vector<int64_t> all(static_cast<size_t>(5 * s.requests), -1);
    for (int64_t b = 0; b < s.requests; ++b) {
      for (int64_t t = 0; t < given[static_cast<size_t>(b)]; ++t) {
        all[static_cast<size_t>(5 * b + t)] = s.batch.slot(s.layout, b, s.before[static_cast<size_t>(b)] + t);
      }
    }
    return all;
  };
  Scene s({.n_kv_heads = 2, .head_dim = 64, .page_size = 64, .tail = GetParam()}, {60, 62, 1020, 300}, 8);
  compare_step(s, {.tokens = 5, .q_lens = {}, .slots = slots});
}

INSTANTIATE_TEST_SUITE_P(Tail, Step, ::testing::Values(true, false));

using Steps = DeviceTest;

/// Rows are written anywhere and copied from multiples of 16 bytes only.
TEST_F(Steps, ReadAlignedPagesOnly) {
  Scene s({.n_kv_heads = 1, .head_dim = 64, .page_size = 64}, {100}, 8);
  auto q = normal(s.random, {1, 1, kGroup, 64}), out = filled(DType::f32, {1, 1, kGroup, 64}, 7.0f);
  auto table = s.table(), lengths = integers({100});
  DecodeArgs args;
  args.q = q.there();
  args.block_table = table.there();
  args.seqlens = lengths.there();
  DecodeResults results;
  results.out = out.there();
  CacheStorage shifted = s.pools.device();
  shifted.storage.data = static_cast<uint8_t*>(shifted.storage.data) + 4;
  try {
    const Workspace workspace(decode_workspace(shifted, args));
    decode(shifted, args, results, {.stream = nullptr, .workspace = workspace.view()});
    ADD_FAILURE() << "pages at a multiple of 4 bytes were read";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("must start at multiples of 16 bytes"), std::string::npos) << e.what();
  }
}

/// Lengths and numbers of tokens that cannot be bring nothing; neighbours do not notice.
TEST_F(Steps, ThatMakeNoSenseAreHarmless) {
  const CacheLayout layout{.n_kv_heads = 1, .head_dim = 64, .page_size = 64};
  Scene s(layout, {100, 100, 100, 100}, 8);
  constexpr int64_t kTokens = 3;
  const int64_t h = kGroup, d = 64;
  auto q = normal(s.random, {4, kTokens, h, d}, 3), k = normal(s.random, {4 * kTokens, 1, d}),
       v = normal(s.random, {4 * kTokens, 1, d});
  auto table = s.table(), before = integers({100, -5, INT32_MAX - 1, 100}), q_lens = integers({3, 2, 3, -4});
  auto out = filled(DType::f32, {4, kTokens, h, d}, 7.0f);
  StepArgs args{.k = k.there(), .v = v.there(), .slot_mapping = {}, .decode = {}};
  args.decode.q = q.there();
  args.decode.block_table = table.there();
  args.decode.seqlens = before.there();
  args.decode.q_lens = q_lens.there();
  DecodeResults results;
  results.out = out.there();
  const Workspace workspace(decode_step_workspace(s.pools.device(), args));
  decode_step(s.pools.device(), args, results, {.stream = nullptr, .workspace = workspace.view()});
  check(cudaDeviceSynchronize());

  // The first request alone, on the CPU.
  std::vector<float> want(static_cast<size_t>(kTokens * h * d));
  int32_t length = 100;
  StepArgs alone{.k = TensorView(k.host.data(), DType::f32, {kTokens, 1, d}),
                 .v = TensorView(v.host.data(), DType::f32, {kTokens, 1, d}),
                 .slot_mapping = {},
                 .decode = {}};
  alone.decode.q = TensorView(q.host.data(), DType::f32, {1, kTokens, h, d});
  alone.decode.block_table = TensorView(table.host.data(), DType::i32, {1, s.batch.width});
  alone.decode.seqlens = TensorView(&length, DType::i32, {1});
  DecodeResults host_results;
  host_results.out = TensorView(want.data(), DType::f32, {1, kTokens, h, d});
  decode_step(s.pools.host(), alone, host_results);
  std::vector<float> got = out.device.back();
  got.resize(want.size());
  expect_same(got, want, "the request that makes sense");
  s.pools.expect_same("pages");
}

/// What a step writes is what a cache write does, whatever the rows and how they lie: three tokens a request, over the
/// end of a block.
TEST_F(Steps, WriteEveryLayoutAndType) {
  const auto compare = [](const CacheLayout& layout, DType k_dtype, DType v_dtype, int64_t first, int64_t pad) {
    constexpr int64_t kTokens = 3;
    Scene s(layout, {0, 62, 125, 191}, kTokens, 0.3);
    const int64_t b = s.requests, hk = layout.n_kv_heads, d = layout.head_dim;
    Rows k = make_rows(s.random, b * kTokens, hk, d, k_dtype, 0.5, first, pad);
    Rows v = make_rows(s.random, b * kTokens, hk, d, v_dtype, 0.5, first, pad);
    const OnDevice<uint8_t> k_there(k.bytes), v_there(v.bytes);
    auto q = normal(s.random, {b, kTokens, hk, d});
    auto table = s.table(), before = integers(s.before);
    auto out = filled(DType::f32, {b, kTokens, hk, d}, 7.0f);
    const auto rows = [&](const Rows& from, uint8_t* data) {
      TensorView view(data + from.first * dtype_size(from.dtype), from.dtype, {b * kTokens, hk, d});
      view.strides = {from.stride_t, from.stride_h, 1};
      return view;
    };
    const auto there_rows = [&](const Rows& from, const OnDevice<uint8_t>& bytes) {
      const TensorView view = rows(from, bytes.data());
      return on_device(view, view.data);
    };
    StepArgs here{.k = rows(k, k.bytes.data()), .v = rows(v, v.bytes.data()), .slot_mapping = {}, .decode = {}};
    here.decode.q = q.here();
    here.decode.block_table = table.here();
    here.decode.seqlens = before.here();
    StepArgs there{.k = there_rows(k, k_there), .v = there_rows(v, v_there), .slot_mapping = {}, .decode = {}};
    there.decode.q = q.there();
    there.decode.block_table = table.there();
    there.decode.seqlens = before.there();
    DecodeResults results_here, results_there;
    results_here.out = out.here();
    results_there.out = out.there();
    const Workspace workspace(decode_step_workspace(s.pools.device(), there));
    decode_step(s.pools.device(), there, results_there, {.stream = nullptr, .workspace = workspace.view()});
    check(cudaDeviceSynchronize());
    decode_step(s.pools.host(), here, results_here);
    s.pools.expect_same("pages");
    out.expect_same("out");
  };
  for (const int64_t dim : {64, 128, 256}) {
    for (const auto& [k_bits, v_bits] : {std::pair{16, 16}, {8, 4}, {4, 8}}) {
      for (const bool tail : {true, false}) {
        SCOPED_TRACE("head dim " + std::to_string(dim) + ", bits " + std::to_string(k_bits));
        const CacheLayout layout{2, dim, 64, k_bits, v_bits, tail};
        compare(layout, DType::bf16, DType::f16, 0, 0);
        compare(layout, DType::f16, DType::f32, 1, 3);
        compare(layout, DType::f32, DType::bf16, 3, 1);
      }
    }
  }
}

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
