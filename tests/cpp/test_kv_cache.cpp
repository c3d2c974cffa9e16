#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>

#include "fold/kv_cache.h"
#include "fold/supports.h"

namespace {

using fold::DType;
using fold::KVCache;
using fold::KVCacheOptions;
using fold::TensorView;

constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 64;

KVCacheOptions small_options() {
  KVCacheOptions options;
  options.layout = {.n_kv_heads = kKvHeads, .head_dim = kDim, .page_size = 64};
  options.n_heads = kHeads;
  options.batch = 2;
  options.max_len = 300;
  return options;
}

/// (rows, heads, kDim) f32, normal.
struct Rows {
  Rows(int64_t rows, int64_t heads, unsigned seed) : values(rows * heads * kDim), n(rows), h(heads) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& x : values) x = normal(random);
  }
  TensorView view(int64_t first = 0, int64_t count = -1) {
    return {values.data() + first * h * kDim, DType::f32, {count < 0 ? n - first : count, h, kDim}};
  }
  TensorView tokens(int64_t batch, int64_t first = 0) {
    return {values.data() + first * h * kDim, DType::f32, {batch, (n - first) / batch, h, kDim}};
  }
  std::vector<float> values;
  int64_t n, h;
};

template <typename T>
TensorView ints(std::vector<T>& v) {
  return {v.data(), sizeof(T) == 4 ? DType::i32 : DType::i64, {static_cast<int64_t>(v.size())}};
}

/// The bytes of every page that a request holds, and the table: what a refused call must leave alone.
std::vector<std::vector<uint8_t>> contents(const KVCache& cache) {
  std::vector<std::vector<uint8_t>> all;
  const fold::CacheStorage storage = cache.storage();
  const int64_t bytes = storage.storage.shape[1];
  for (const int64_t id : cache.table().requests()) {
    std::vector<uint8_t> one(8);
    const int64_t length = cache.table().length(id);
    std::memcpy(one.data(), &length, 8);
    for (const int32_t page : cache.table().pages(id)) {
      const uint8_t* from = storage.storage.as<uint8_t>() + page * bytes;
      one.insert(one.end(), from, from + bytes);
    }
    all.push_back(std::move(one));
  }
  return all;
}

std::vector<float> attend(const KVCache& cache, Rows& q, int64_t batch, std::span<const int64_t> ids = {},
                          std::optional<int64_t> window_left = {}) {
  std::vector<float> out(q.values.size());
  fold::DecodeArgs call;
  call.q = q.tokens(batch);
  call.window_left = window_left;
  fold::DecodeResults results;
  results.out = TensorView(out.data(), DType::f32, {batch, q.n / batch, kHeads, kDim});
  cache.attend(call, results, ids);
  return out;
}

/// Softmax over the first n keys in fp64, all as given. q: (kHeads, kDim) at row `row`.
double error_vs_fp64(const std::vector<float>& out, Rows& q, int64_t row, Rows& k, Rows& v, int64_t n) {
  double error = 0, norm = 0;
  for (int64_t h = 0; h < kHeads; ++h) {
    const int64_t kv = h / (kHeads / kKvHeads);
    std::vector<double> sum(kDim);
    double mass = 0;
    for (int64_t j = 0; j < n; ++j) {
      double s = 0;
      for (int64_t c = 0; c < kDim; ++c) {
        s += double{q.values[(row * kHeads + h) * kDim + c]} * double{k.values[(j * kKvHeads + kv) * kDim + c]};
      }
      const double w = std::exp(s / 8);
      mass += w;
      for (int64_t c = 0; c < kDim; ++c) sum[c] += w * v.values[(j * kKvHeads + kv) * kDim + c];
    }
    for (int64_t c = 0; c < kDim; ++c) {
      const double exact = sum[c] / mass, d = out[(row * kHeads + h) * kDim + c] - exact;
      error += d * d;
      norm += exact * exact;
    }
  }
  return std::sqrt(error / norm);
}

TEST(KVCache, PrefillThenDecodeIsAttention) {
  KVCache cache(small_options());
  Rows k(200, kKvHeads, 1), v(200, kKvHeads, 2), q(200, kHeads, 3), out(200, kHeads, 0);
  std::vector<int32_t> cu{0, 199, 199};
  cache.prefill(q.view(0, 199), k.view(0, 199), v.view(0, 199), ints(cu), out.view(0, 199));
  EXPECT_LT(error_vs_fp64(out.values, q, 198, k, v, 199), 1e-6);
  const int64_t id = cache.table().requests()[0];
  std::vector<float> step(kHeads * kDim);
  fold::DecodeArgs call;
  call.q = q.tokens(1, 199);
  fold::DecodeResults results;
  results.out = TensorView(step.data(), DType::f32, {1, 1, kHeads, kDim});
  cache.decode(call, k.view(199), v.view(199), results, {&id, 1});
  EXPECT_EQ(cache.table().length(id), 200);
  Rows last(1, kHeads, 0);
  std::copy(q.values.end() - kHeads * kDim, q.values.end(), last.values.begin());
  EXPECT_LT(error_vs_fp64(step, last, 0, k, v, 200), 2e-4);
}

TEST(KVCache, ChunksAndForksHaveTheBitsOfOnePrefill) {
  KVCacheOptions options = small_options();
  options.batch = 1;
  options.max_len = 200;
  options.num_pages = 12;
  KVCache whole(options), parts(options);
  Rows k(150, kKvHeads, 1), v(150, kKvHeads, 2), q(1, kHeads, 3);
  std::vector<int32_t> cu{0, 150};
  whole.write_prompt(k.view(), v.view(), ints(cu));
  for (int64_t at = 0, n; at < 150; at += n) {
    n = std::min<int64_t>(150 - at, 1 + at / 2);
    parts.append(k.view(at, n), v.view(at, n));
  }
  const auto expected = attend(whole, q, 1);
  EXPECT_EQ(attend(parts, q, 1), expected);
  EXPECT_TRUE(contents(parts) == contents(whole));

  // A fork inside a block grows another way; then the parent does, into the page they shared.
  const int64_t parent = whole.table().requests()[0], child = whole.fork(parent, 100);
  Rows other(50, kKvHeads, 9);
  whole.append(other.view(), other.view(), {&child, 1});
  EXPECT_EQ(attend(whole, q, 1, {&parent, 1}), expected);
  whole.truncate(child, 100);
  whole.append(k.view(100), v.view(100), {&child, 1});
  EXPECT_EQ(attend(whole, q, 1, {&child, 1}), expected);
  whole.free_request(parent);
  EXPECT_EQ(attend(whole, q, 1, {&child, 1}), expected);
}

TEST(KVCache, PartialsOfHalvesFinishToTheWhole) {
  KVCache cache(small_options());
  Rows k(400, kKvHeads, 1), v(400, kKvHeads, 2), q(2, kHeads, 3);
  cache.append(k.view(), v.view());
  struct Sum {
    std::vector<int64_t> numerator = std::vector<int64_t>(2 * kHeads * kDim),
                         denominator = std::vector<int64_t>(2 * kHeads * 3);
    std::vector<float> grid = std::vector<float>(2 * kHeads * 3);
    fold::Partial view() {
      return {TensorView(numerator.data(), DType::i64, {2, 1, kHeads, kDim}),
              TensorView(denominator.data(), DType::i64, {2, 1, kHeads, 3}),
              TensorView(grid.data(), DType::f32, {2, 1, kHeads, 3})};
    }
  } a, b;
  fold::DecodeArgs call;
  call.q = q.tokens(2);
  cache.partial(call, 0, 128, a.view());
  cache.partial(call, 128, 1000, b.view());
  fold::add_partials(a.view(), b.view());
  std::vector<float> out(q.values.size());
  fold::finish(a.view(), {}, TensorView(out.data(), DType::f32, {2, 1, kHeads, kDim}), {}, {});
  EXPECT_EQ(out, attend(cache, q, 2));
}

TEST(KVCache, ACallsWindowTakesThePlaceOfTheCaches) {
  KVCacheOptions options = small_options(), narrow = options;
  narrow.window_left = 30;
  KVCache all(options), some(narrow);
  Rows k(400, kKvHeads, 1), v(400, kKvHeads, 2), q(2, kHeads, 3);
  for (KVCache* cache : {&all, &some}) cache->append(k.view(), v.view());
  EXPECT_NE(attend(all, q, 2), attend(some, q, 2));
  EXPECT_EQ(attend(all, q, 2, {}, 30), attend(some, q, 2));
  EXPECT_EQ(attend(all, q, 2), attend(some, q, 2, {}, -1));
  EXPECT_EQ(attend(all, q, 2, {}, 0), attend(some, q, 2, {}, 0));
}

TEST(KVCache, SavedAndLoadedIsTheSame) {
  const std::string path = (std::filesystem::temp_directory_path() / "fold_test_kv_cache.safetensors").string();
  KVCacheOptions options = small_options();
  options.depth = 9.1f;
  options.softmax_scale = 0.1;
  options.window_left = 77;
  options.sinks = {0.5f, -1, 2, 1e-30f};
  options.layout.v_bits = 8;
  KVCache cache(options);
  Rows k(260, kKvHeads, 1), v(260, kKvHeads, 2), q(3, kHeads, 3);
  cache.append(k.view(), v.view());
  cache.fork(cache.table().requests()[1], 70);
  cache.save(path);
  const KVCache loaded = KVCache::load(path);
  EXPECT_TRUE(contents(loaded) == contents(cache));
  EXPECT_EQ(loaded.table().free_pages(), cache.table().free_pages());
  EXPECT_EQ(loaded.options().depth, options.depth);
  EXPECT_EQ(loaded.options().softmax_scale, options.softmax_scale);
  EXPECT_EQ(loaded.options().window_left, options.window_left);
  EXPECT_EQ(loaded.options().sinks, options.sinks);
  EXPECT_EQ(loaded.options().max_len, options.max_len);
  EXPECT_EQ(attend(loaded, q, 3), attend(cache, q, 3));
  std::filesystem::remove(path);
}

TEST(KVCache, ARefusedCallChangesNothing) {
  KVCache cache(small_options());
  Rows k(140, kKvHeads, 1), v(140, kKvHeads, 2), q(2, kHeads, 3), wide(2, kKvHeads + 1, 4);
  cache.append(k.view(), v.view());
  const int64_t parent = cache.table().requests()[0];
  cache.fork(parent);
  const auto before = contents(cache);
  std::vector<float> out(3 * kHeads * kDim);
  fold::DecodeResults results;
  results.out = TensorView(out.data(), DType::f32, {1, 1, kHeads, kDim});
  fold::DecodeArgs call;
  call.q = q.tokens(1, 1);
  const std::span<const int64_t> one(&parent, 1);
  const auto refuse = [&](const char* what, auto f) {
    try {
      f();
      ADD_FAILURE() << what << ": accepted";
    } catch (const fold::Error& e) {
      EXPECT_EQ(e.argument(), what) << e.what();
    }
    EXPECT_TRUE(contents(cache) == before) << what;
    EXPECT_EQ(cache.table().requests().size(), 3u);
  };
  const TensorView row = k.view(0, 1);
  const int64_t foreign = KVCache(small_options()).table().requests()[0];
  std::vector<int32_t> falling{0, 2, 1}, early{1, 2, 2}, long_one{0, 3}, many{2};
  refuse("k.shape", [&] { cache.append(wide.view(0, 1), row, one); });
  refuse("v.shape", [&] { cache.decode(call, row, wide.view(0, 1), results, one); });
  refuse("k.shape", [&] { cache.append(k.view(0, 2), v.view(0, 2)); });
  refuse("request", [&] { cache.append(row, row, {&foreign, 1}); });
  refuse("cu_seqlens[2]", [&] {
    cache.write_prompt(k.view(), v.view(), ints(falling), std::vector<int64_t>{parent, parent + 1});
  });
  refuse("cu_seqlens[0]", [&] {
    cache.write_prompt(k.view(), v.view(), ints(early), std::vector<int64_t>{parent, parent + 1});
  });
  refuse("cu_seqlens[1]", [&] { cache.write_prompt(k.view(0, 2), v.view(0, 2), ints(long_one), one); });
  refuse("request", [&] { cache.append(k.view(0, 2), v.view(0, 2), std::vector<int64_t>{parent, parent}); });
  fold::DecodeArgs bad = call;
  bad.q_lens = ints(many);
  refuse("q_lens[0]", [&] { cache.decode(bad, row, row, results, one); });
  bad = call;
  bad.window_left = -2;
  refuse("window_left", [&] { cache.decode(bad, row, row, results, one); });
  float nan = NAN;
  bad = call;
  bad.depth = TensorView(&nan, DType::f32, {1});
  refuse("depth", [&] { cache.decode(bad, row, row, results, one); });
  fold::DecodeResults small = results;
  small.out.shape[3] = kDim / 2;
  refuse("out.shape", [&] { cache.decode(call, row, row, small, one); });
  bad = call;
  bad.q.shape[2] = kHeads - 1;
  refuse("q.shape", [&] { cache.decode(bad, row, row, results, one); });
  bad = call;
  bad.q.dtype = DType::i32;
  refuse("q.dtype", [&] { cache.decode(bad, row, row, results, one); });
  Rows long_rows(231, kKvHeads, 5);
  refuse("tokens", [&] { cache.append(long_rows.view(), long_rows.view(), one); });
  TensorView repeated = row;  // one row, 2^32 + 1 times
  repeated.shape[0] = (int64_t{1} << 32) + 1;
  repeated.strides[0] = 0;
  refuse("k.shape", [&] { cache.append(repeated, repeated, one); });

  // A prompt that there is no room for: its output stays as it was, too.
  Rows queries(231, kHeads, 6);
  std::vector<float> prompt_out(231 * kHeads * kDim, -1.0f);
  const std::vector<float> untouched = prompt_out;
  const TensorView out_view(prompt_out.data(), DType::f32, {231, kHeads, kDim});
  std::vector<int32_t> all{0, 231};
  refuse("tokens",
         [&] { cache.prefill(queries.view(), long_rows.view(), long_rows.view(), ints(all), out_view, {}, one); });
  EXPECT_EQ(prompt_out, untouched);
}

TEST(KVCache, RefusesOptionsThatCannotBe) {
  const auto refuse = [](const char* what, auto change) {
    KVCacheOptions options = small_options();
    change(options);
    try {
      KVCache cache(options);
      ADD_FAILURE() << what << ": accepted";
    } catch (const fold::Error& e) {
      EXPECT_EQ(e.argument(), what);
    }
  };
  refuse("head_dim", [](auto& o) { o.layout.head_dim = 80; });
  refuse("page_size", [](auto& o) { o.layout.page_size = 100; });
  refuse("v_bits", [](auto& o) { o.layout.v_bits = 12; });
  refuse("n_heads", [](auto& o) { o.n_heads = 3; });
  refuse("n_heads", [](auto& o) { o.n_heads = 130; });
  refuse("max_len", [](auto& o) { o.max_len = 0; });
  refuse("batch", [](auto& o) { o.batch = -1; });
  refuse("num_pages", [](auto& o) { o.num_pages = int64_t{1} << 40; });
  refuse("num_pages", [](auto& o) { o.batch = o.max_len = INT32_MAX; });
  refuse("depth", [](auto& o) { o.depth = NAN; });
  refuse("softmax_scale", [](auto& o) { o.softmax_scale = INFINITY; });
  refuse("softmax_scale", [](auto& o) { o.softmax_scale = 1e300; });
  refuse("window_left", [](auto& o) { o.window_left = -2; });
  refuse("sinks", [](auto& o) { o.sinks = {1}; });
  refuse("device", [](auto& o) { o.device = fold::Device::cuda, o.device_index = 99; });
}

TEST(KVCache, PoolsAreCommittedAsTheyAreUsed) {
  KVCacheOptions options = small_options();
  options.batch = 1;
  options.max_len = 1 << 30;
  options.num_pages = 1 << 16;  // 3 GB
  KVCache cache(options);
  Rows k(65, kKvHeads, 1), q(1, kHeads, 3);
  cache.append(k.view(), k.view());
  EXPECT_LT(error_vs_fp64(attend(cache, q, 1), q, 0, k, k, 65), 2e-4);
}

/// docs/support.md, in C++.
TEST(Supports, AnswersWithTheOperationsOwnReason) {
  using fold::Operation;
  EXPECT_TRUE(fold::supports(Operation::cache, {}));
  fold::SupportQuery query;
  query.head_dim = 80;
  EXPECT_TRUE(fold::supports(Operation::attention, query));
  EXPECT_EQ(fold::unsupported(Operation::cache, query), "head_dim=80; supported: 64, 128, 256");
  query.head_dim = 257;
  EXPECT_EQ(fold::unsupported(Operation::attention, query), "head_dim=257; 1 to 256");
  query = {};
  query.n_heads = 9;
  query.n_kv_heads = 2;
  EXPECT_FALSE(fold::supports(Operation::attention, query));
  EXPECT_FALSE(fold::supports(Operation::cache, query));
  query = {};
  query.device = fold::Device::cuda;
  query.device_index = 99;
  for (const Operation operation : {Operation::attention, Operation::cache}) {
    EXPECT_EQ(fold::unsupported(operation, query).value_or("").find("device=cuda:99; supported: cpu ("), 0u);
  }
}

}  // namespace
