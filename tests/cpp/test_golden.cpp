#include <gtest/gtest.h>

#include <cmath>

#include "cpu/isa.h"
#include "fold/decode.h"
#include "fold/safetensors.h"
#include "numerics/exp2.h"
#include "numerics/planes.h"

// Compares with the files of tests/golden (written by make_golden.py from an independent implementation).
namespace {

using fold::DType;
using fold::TensorFile;
using fold::TensorView;

/// What one file holds, as vectors.
class Golden {
 public:
  explicit Golden(const std::string& name) : file_(std::string(FOLD_GOLDEN_DIR "/") + name + ".safetensors") {}

  template <typename T>
  std::vector<T> get(const std::string& name) {
    return file_.read<T>(file_.entry(name));
  }
  std::vector<int64_t> shape(const std::string& name) { return file_.entry(name).shape; }

 private:
  TensorFile file_;
};

/// Equal bits; any NaN equals any NaN.
void expect_same(float got, float want, const std::string& where) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got)) << where << ": " << got;
  } else {
    EXPECT_EQ(fold::numerics::bits_of(got), fold::numerics::bits_of(want)) << where << ": " << got << " not " << want;
  }
}

class Rows : public ::testing::TestWithParam<int> {};

TEST_P(Rows, RotationPlanesAndScales) {
  const int d = GetParam();
  Golden golden("rows");
  const std::string at = "rows." + std::to_string(d) + ".";
  const auto x = golden.get<float>(at + "x"), rotated = golden.get<float>(at + "rotated");
  const auto scale = golden.get<int32_t>(at + "scale");
  const auto a = golden.get<int8_t>(at + "a"), b = golden.get<int8_t>(at + "b");
  const auto h = golden.get<uint8_t>(at + "h"), l = golden.get<uint8_t>(at + "l");
  ASSERT_EQ(x.size(), 34u * static_cast<size_t>(d));
  for (int row = 0; row < 34; ++row) {
    const std::string where = at + std::to_string(row);
    float y[fold::numerics::kMaxHeadDim];
    int8_t got_a[fold::numerics::kMaxHeadDim], got_b[fold::numerics::kMaxHeadDim];
    std::copy_n(&x[row * d], d, y);
    fold::numerics::rotate(y, d);
    for (int i = 0; i < d; ++i) expect_same(y[i], rotated[row * d + i], where + "[" + std::to_string(i) + "]");
    EXPECT_EQ(fold::numerics::split_row(y, d, got_a, got_b), scale[row]) << where;
    for (int i = 0; i < d; ++i) {
      EXPECT_EQ(got_a[i], a[row * d + i]) << where << " channel " << i;
      EXPECT_EQ(got_b[i], b[row * d + i]) << where << " channel " << i;
    }
    for (int i = 0; i < d / 2; ++i) {
      EXPECT_EQ(fold::numerics::pack_h(got_a[2 * i], got_a[2 * i + 1]), h[row * d / 2 + i]) << where << " byte " << i;
      EXPECT_EQ(fold::numerics::pack_l(got_a[2 * i], got_a[2 * i + 1]), l[row * d / 2 + i]) << where << " byte " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, Rows, ::testing::Values(64, 128, 256));

TEST(Golden, Exp2OfSinks) {
  Golden golden("functions");
  const auto x = golden.get<float>("exp2.sink.x"), mantissa = golden.get<float>("exp2.sink.mantissa");
  const auto exponent = golden.get<int32_t>("exp2.sink.exponent");
  ASSERT_GT(x.size(), 100u);
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(fold::numerics::exp2_wide(x[i]), std::ldexp(double{mantissa[i]}, exponent[i])) << x[i];
  }
}

TEST(Golden, Exp2AndWeights) {
  Golden golden("functions");
  const auto x = golden.get<float>("exp2.x"), mantissa = golden.get<float>("exp2.mantissa");
  const auto exponent = golden.get<int32_t>("exp2.exponent");
  const auto ratio = golden.get<float>("fix.ratio");
  const auto one = golden.get<int64_t>("fix.one"), scaled = golden.get<int64_t>("fix.scaled");
  ASSERT_GT(x.size(), 3000u);
  for (size_t i = 0; i < x.size(); ++i) {
    const fold::numerics::Exp2 e = fold::numerics::exp2_parts(x[i]);
    expect_same(e.mantissa, mantissa[i], "2^" + std::to_string(x[i]));
    EXPECT_EQ(e.exponent, exponent[i]) << x[i];
    EXPECT_EQ(fold::numerics::fix(x[i]), one[i]) << x[i];
    EXPECT_EQ(fold::numerics::fix(e, ratio[i]), scaled[i]) << x[i] << ", " << ratio[i];
  }
}

TEST(Golden, Log2) {
  Golden golden("functions");
  const auto x = golden.get<float>("log2.x"), y = golden.get<float>("log2.y");
  ASSERT_GT(x.size(), 2000u);
  for (size_t i = 0; i < x.size(); ++i) {
    expect_same(fold::numerics::log2(x[i]), y[i], "log2 " + std::to_string(x[i]));
  }
}

/// A cache of the file; its layout is make_golden.py's.
struct CacheCase {
  const char* name;
  fold::CacheLayout layout;
  DType dtype;
};

class Pages : public ::testing::TestWithParam<CacheCase> {
 protected:
  void TearDown() override { fold::cpu::set_isa(best_); }
  const fold::cpu::Isa best_ = fold::cpu::isa();
};

/// The section that byte `at` of a page lies in.
std::string section(const fold::PageSections& s, int64_t at) {
  const std::pair<const char*, int64_t> starts[] = {
      {"k_h", s.k_h},   {"k_l", s.k_l},   {"k_b", s.k_b},         {"k_scale", s.k_scale}, {"v_h", s.v_h},
      {"v_l", s.v_l},   {"v_b", s.v_b},   {"v_scale", s.v_scale}, {"bound", s.bound},     {"mean_scale", s.mean_scale},
      {"mean", s.mean}, {"ubar", s.ubar}, {"fit_in", s.fit_in},   {"fit_out", s.fit_out}, {"fit_scale", s.fit_scale}};
  std::pair<const char*, int64_t> found{"", -1};
  for (const auto& start : starts) {
    if (start.second <= at && start.second > found.second) found = start;
  }
  return std::string(found.first) + " + " + std::to_string(at - found.second);
}

TEST_P(Pages, EveryByte) {
  const CacheCase& c = GetParam();
  Golden golden("cache");
  const std::string at = std::string("cache.") + c.name + ".";
  const std::vector<int64_t> shape = golden.shape(at + "k"), pages_shape = golden.shape(at + "pages");
  auto k = golden.get<uint8_t>(at + "k"), v = golden.get<uint8_t>(at + "v");
  const auto want = golden.get<uint8_t>(at + "pages");
  const fold::PageSections sections = fold::page_sections(c.layout);
  ASSERT_EQ(pages_shape[1], sections.bytes);

  for (int level = 0; level <= static_cast<int>(best_); ++level) {
    fold::cpu::set_isa(static_cast<fold::cpu::Isa>(level));
    std::vector<uint8_t> storage(want.size());
    std::vector<int32_t> table, seqlens{0}, cu{0, static_cast<int32_t>(shape[0])};
    for (int32_t page = 0; page < pages_shape[0]; ++page) table.push_back(page);
    fold::cache_write({c.layout, {storage.data(), DType::u8, {pages_shape[0], pages_shape[1]}}},
                      {.k = {k.data(), c.dtype, {shape[0], shape[1], shape[2]}},
                       .v = {v.data(), c.dtype, {shape[0], shape[1], shape[2]}},
                       .block_table = {table.data(), DType::i32, {1, pages_shape[0]}},
                       .seqlens = {seqlens.data(), DType::i32, {1}},
                       .cu_seqlens = {cu.data(), DType::i32, {2}},
                       .slot_mapping = {}});
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(storage[i], want[i]) << fold::cpu::isa_name(fold::cpu::isa()) << ", page " << i / sections.bytes << ", "
                                     << section(sections, static_cast<int64_t>(i) % sections.bytes);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Golden, Pages,
    ::testing::Values(
        CacheCase{"fit", {.n_kv_heads = 1, .head_dim = 64, .page_size = 64}, DType::bf16},
        CacheCase{"mixed", {.n_kv_heads = 2, .head_dim = 128, .page_size = 128, .k_bits = 8, .v_bits = 4}, DType::bf16},
        CacheCase{"narrow",
                  {.n_kv_heads = 1, .head_dim = 256, .page_size = 64, .k_bits = 4, .v_bits = 8, .tail = false},
                  DType::f32}),
    [](const auto& test) { return test.param.name; });

}  // namespace
