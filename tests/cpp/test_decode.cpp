// Decode through the C++ API: every instruction set computes the same bits; dense decode against fp64; partial sums;
// errors.
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <random>
#include <tuple>

#include "cpu/isa.h"
#include "fold/decode.h"
#include "plan/cache_access.h"

namespace {

using fold::CacheLayout;
using fold::CacheStorage;
using fold::DType;
using fold::TensorView;

/// One request of `keys` keys on poisoned storage, and queries for its newest `tokens` tokens.
struct Problem {
  Problem(CacheLayout layout_, int64_t group, int64_t keys_, int64_t tokens_ = 1, unsigned seed = 1)
      : layout(layout_), heads(group * layout_.n_kv_heads), keys(keys_), tokens(tokens_) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, int64_t count, float scale) {
      values.resize(static_cast<size_t>(count));
      for (float& value : values) value = scale * normal(rng);
    };
    fill(k, keys * layout.n_kv_heads * layout.head_dim, 1);
    fill(v, keys * layout.n_kv_heads * layout.head_dim, 1);
    fill(q, tokens * heads * layout.head_dim, 3);
    pages = (keys + layout.page_size - 1) / layout.page_size;
    bytes.assign(static_cast<size_t>(pages * fold::page_sections(layout).bytes), 0xFF);
    for (int64_t i = 0; i < pages; ++i) table.push_back(static_cast<int32_t>(pages - 1 - i));
    length = static_cast<int32_t>(keys);
    const int32_t before = 0, ends[2] = {0, length};
    const int64_t d = layout.head_dim, hk = layout.n_kv_heads;
    fold::cache_write(storage(), {.k = TensorView(k.data(), DType::f32, {keys, hk, d}),
                                  .v = TensorView(v.data(), DType::f32, {keys, hk, d}),
                                  .block_table = TensorView(table.data(), DType::i32, {1, pages}),
                                  .seqlens = TensorView(const_cast<int32_t*>(&before), DType::i32, {1}),
                                  .cu_seqlens = TensorView(const_cast<int32_t*>(ends), DType::i32, {2}),
                                  .slot_mapping = {}});
  }

  CacheStorage storage() {
    return {layout, TensorView(bytes.data(), DType::u8, {pages, fold::page_sections(layout).bytes})};
  }

  fold::DecodeArgs args() {
    fold::DecodeArgs a;
    a.q = TensorView(q.data(), DType::f32, {1, tokens, heads, layout.head_dim});
    a.block_table = TensorView(table.data(), DType::i32, {1, pages});
    a.seqlens = TensorView(&length, DType::i32, {1});
    a.depth = TensorView(&depth, DType::f32, {1});
    return a;
  }

  std::vector<float> decode(const fold::DecodeArgs& a) {
    std::vector<float> out(static_cast<size_t>(tokens * heads * layout.head_dim));
    fold::DecodeResults results;
    results.out = TensorView(out.data(), DType::f32, {1, tokens, heads, layout.head_dim});
    fold::decode(storage(), a, results);
    return out;
  }

  /// fp64 attention of query head h of the last token.
  std::vector<double> exact(int64_t h) const {
    const int64_t d = layout.head_dim, hk = layout.n_kv_heads, kv = h / (heads / hk);
    std::vector<double> weights(static_cast<size_t>(keys)), out(static_cast<size_t>(d), 0.0);
    double largest = -1e300, total = 0;
    for (int64_t j = 0; j < keys; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < d; ++c) dot += double{q[((tokens - 1) * heads + h) * d + c]} * k[(j * hk + kv) * d + c];
      weights[j] = dot / std::sqrt(static_cast<double>(d));
      largest = std::max(largest, weights[j]);
    }
    for (double& w : weights) total += w = std::exp(w - largest);
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t c = 0; c < d; ++c) out[c] += weights[j] / total * v[(j * hk + kv) * d + c];
    }
    return out;
  }

  CacheLayout layout;
  int64_t heads, keys, tokens, pages = 0;
  int32_t length = 0;
  float depth = INFINITY;
  std::vector<float> k, v, q;
  std::vector<uint8_t> bytes;
  std::vector<int32_t> table;
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<fold::cpu::Isa> available() {
  std::vector<fold::cpu::Isa> sets;
  const auto best = fold::cpu::isa();
  for (const auto set : {fold::cpu::Isa::portable, fold::cpu::Isa::avx2, fold::cpu::Isa::avx512}) {
    if (set <= best) sets.push_back(set);
  }
  return sets;
}

class DecodeIsa : public testing::TestWithParam<std::tuple<int64_t, int64_t, int, bool>> {};  // D, G, bits, tail

TEST_P(DecodeIsa, EverySetComputesTheSameBits) {
  const auto [dim, group, bits, tail] = GetParam();
  const auto best = fold::cpu::isa();
  Problem problem({.n_kv_heads = 2, .head_dim = dim, .k_bits = bits, .v_bits = bits, .tail = tail}, group, 1357, 2);
  for (const float depth : {9.0f, 12.0f, 15.5f, INFINITY}) {
    problem.depth = depth;
    std::vector<float> first;
    for (const auto set : available()) {
      fold::cpu::set_isa(set);
      const std::vector<float> out = problem.decode(problem.args());
      if (first.empty()) first = out;
      EXPECT_TRUE(same(first, out)) << fold::cpu::isa_name(set) << " at depth " << depth;
    }
  }
  fold::cpu::set_isa(best);
}

INSTANTIATE_TEST_SUITE_P(Shapes, DecodeIsa,
                         testing::Combine(testing::Values(64, 128, 256), testing::Values(1, 3, 4, 13),
                                          testing::Values(4, 8, 16), testing::Bool()));

TEST(Decode, SplitsAndThreadsChangeNoBit) {
  Problem problem({.n_kv_heads = 2, .head_dim = 64}, 3, 2111);
  problem.depth = 11;
  fold::DecodeArgs args = problem.args();
  const int threads = omp_get_max_threads();
  const std::vector<float> first = problem.decode(args);
  for (const int count : {1, 2, 3}) {
    omp_set_num_threads(count);
    for (const int splits : {1, 4, 7, 33, 64}) {
      args.splits = splits;
      EXPECT_TRUE(same(first, problem.decode(args))) << splits << " splits, " << count << " threads";
    }
  }
  omp_set_num_threads(threads);
}

/// A damaged file, or pages of a caller's own, may hold any float there.
TEST(Decode, DirectionsOfTheTailThatAreNotNumbersCountAsZero) {
  Problem problem({.n_kv_heads = 1, .head_dim = 64}, 2, 1500);
  problem.depth = 8;
  const fold::DecodeArgs args = problem.args();
  const CacheStorage cache = problem.storage();
  const fold::plan::CacheView view{problem.bytes.data(), cache.storage.shape[1], problem.pages, problem.layout,
                                   fold::page_sections(problem.layout)};
  const int64_t mark = fold::plan::last_mark(problem.keys - 64), page_size = problem.layout.page_size;
  const auto page = fold::plan::head_page(view, problem.table[(mark - 1) / page_size], 0);
  float* const scale = page.fit_scale + fold::plan::fit_slot(mark, page_size) * fold::numerics::kRank;
  const std::vector<float> whole = problem.decode(args);
  scale[0] = scale[3] = 0;
  const std::vector<float> expected = problem.decode(args);
  EXPECT_FALSE(same(whole, expected)) << "no key was dropped";
  for (const float wrong : {NAN, INFINITY, -INFINITY}) {
    scale[0] = scale[3] = wrong;
    EXPECT_TRUE(same(expected, problem.decode(args))) << wrong;
  }
}

TEST(Decode, DenseErrorIsFarBelowBf16s) {
  for (const int64_t keys : {1, 63, 64, 65, 257, 1009}) {
    Problem problem({.n_kv_heads = 1, .head_dim = 128}, 2, keys);
    const std::vector<float> out = problem.decode(problem.args());
    double error = 0, norm = 0, rounded = 0;
    for (int64_t h = 0; h < 2; ++h) {
      const std::vector<double> exact = problem.exact(h);
      for (int64_t c = 0; c < 128; ++c) {
        error += std::pow(out[h * 128 + c] - exact[c], 2);
        norm += exact[c] * exact[c];
        rounded += std::pow(exact[c] * 0x1p-9, 2);  // half a bf16 unit in the last place, at least: an output in bf16
      }
    }
    EXPECT_LT(error, rounded / 9) << keys << " keys: relative error " << std::sqrt(error / norm);
  }
}

TEST(Decode, PartialsAddToTheWholeInAnyOrder) {
  Problem problem({.n_kv_heads = 1, .head_dim = 64}, 4, 1500);
  problem.depth = 12;
  const fold::DecodeArgs args = problem.args();
  const std::vector<float> whole = problem.decode(args);
  struct Sums {
    std::vector<int64_t> num, den;
    std::vector<float> grid;
    fold::Partial view() {
      return {TensorView(num.data(), DType::i64, {1, 1, 4, 64}), TensorView(den.data(), DType::i64, {1, 1, 4, 3}),
              TensorView(grid.data(), DType::f32, {1, 1, 4, 3})};
    }
    Sums() : num(4 * 64), den(4 * 3), grid(4 * 3) {}
  };
  std::vector<Sums> parts(5);
  const int64_t edges[6] = {0, 64, 64, 640, 1024, 1500};  // one is empty
  for (int i = 0; i < 5; ++i) fold::partial(problem.storage(), args, edges[i], edges[i + 1], parts[i].view());
  for (const auto& order : {std::array{0, 1, 2, 3, 4}, std::array{4, 1, 3, 0, 2}}) {
    Sums total = parts[order[0]];
    for (int i = 1; i < 5; ++i) fold::add_partials(total.view(), parts[order[i]].view());
    std::vector<float> out(4 * 64);
    fold::finish(total.view(), {}, TensorView(out.data(), DType::f32, {1, 1, 4, 64}), {}, {});
    EXPECT_TRUE(same(whole, out));
  }
}

/// Runs f and returns the error's text.
template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const fold::Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Decode, FinishRefusesAGridThatNoPartialHas) {
  std::vector<int64_t> numerator(64, 1), denominator{int64_t{1} << 26, int64_t{1} << 26, 1};
  float grid[3] = {0, 1, 0};
  std::vector<float> out(64);
  const auto finish = [&] {
    return error_of([&] {
      fold::finish({.numerator = TensorView(numerator.data(), DType::i64, {1, 1, 1, 64}),
                    .denominator = TensorView(denominator.data(), DType::i64, {1, 1, 1, 3}),
                    .grid = TensorView(grid, DType::f32, {1, 1, 1, 3})},
                   {}, TensorView(out.data(), DType::f32, {1, 1, 1, 64}), {}, {});
    });
  };
  for (const float e : {0.0f, 3.0f, -1.0f, INFINITY, 0x1p-120f}) {
    grid[1] = e;
    EXPECT_EQ(finish(), "grid of row 0=" + std::to_string(e) + "; a power of two, from 2^-100");
  }
  for (const float e : {0x1p-100f, 1.0f, 0x1p127f}) {
    grid[1] = e;
    EXPECT_EQ(finish(), "no error");
  }
}

TEST(Decode, BadArgumentsSayWhatWasGotAndWhatIsAllowed) {
  Problem problem({.n_kv_heads = 2, .head_dim = 64}, 2, 300);
  const auto with = [&](auto change) {
    return error_of([&] {
      fold::DecodeArgs args = problem.args();
      change(args);
      problem.decode(args);
    });
  };
  EXPECT_EQ(with([](auto& a) { a.q.dtype = DType::i32; }), "q.dtype=int32; supported: float32, bfloat16, float16");
  EXPECT_EQ(with([](auto& a) { a.q.strides[3] = 2; }), "q.stride(-1)=2; must be 1");
  EXPECT_EQ(with([](auto& a) { a.q.shape[2] = 3; }), "n_heads=3; a multiple of n_kv_heads=2, 1 to 64 times it");
  EXPECT_EQ(with([](auto& a) { a.window_left = -2; }), "window_left=-2; -1 (all keys) or more");
  EXPECT_EQ(with([](auto& a) { a.splits = -1; }), "splits=-1; at least 0");
  EXPECT_EQ(with([](auto& a) { a.softmax_scale = NAN; }), "softmax_scale=nan; a finite number (float32)");
  EXPECT_NE(with([](auto& a) { a.softmax_scale = 3e38; }).find("softmax_scale=3"), std::string::npos);
  problem.depth = NAN;
  EXPECT_EQ(with([](auto&) {}), "depth=nan; a finite number, or +inf to read every V");
  problem.depth = 12;
  problem.length = 700;
  EXPECT_EQ(with([](auto&) {}), "keys of request 0=700; block_table has room for 512");
  problem.length = 300;
  problem.table[1] = 2;
  EXPECT_EQ(with([](auto&) {}), "block_table[0][1]=2; page ids 0..1");
}

TEST(Decode, RefusesMemoryThatOverlapsWhereItWrites) {
  Problem problem({.n_kv_heads = 2, .head_dim = 64}, 2, 300);
  std::vector<float> out(4 * 64, -1.0f);
  const std::vector<float> before = out;
  fold::DecodeResults results;
  results.out = TensorView(out.data(), DType::f32, {1, 1, 4, 64});
  results.out.strides[2] = 0;
  EXPECT_EQ(error_of([&] { fold::decode(problem.storage(), problem.args(), results); }),
            "out.stride(2)=0; must not be 0 in a tensor that is written");
  results.out.strides[2] = 64;
  CacheStorage overlapping = problem.storage();
  const int64_t bytes = overlapping.storage.strides[0];
  for (const int64_t stride : {int64_t{0}, bytes - 128, 128 - bytes}) {
    overlapping.storage.strides[0] = stride;
    EXPECT_EQ(
        error_of([&] { fold::decode(overlapping, problem.args(), results); }),
        "storage.stride(0)=" + std::to_string(stride) + "; pages must not overlap: at least " + std::to_string(bytes));
  }
  EXPECT_EQ(out, before);
}

}  // namespace
