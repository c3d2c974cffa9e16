#include <gtest/gtest.h>
#include <omp.h>
#include <sys/mman.h>

#include <cmath>
#include <limits>

#include "cache_testing.h"
#include "cpu/isa.h"
#include "numerics/block.h"

namespace {

using namespace fold;
using namespace fold::testing;

/// Restores the thread count and the instruction set.
class CacheWrite : public ::testing::Test {
 protected:
  void TearDown() override {
    omp_set_num_threads(threads_);
    cpu::set_isa(isa_);
  }
  const int threads_ = omp_get_max_threads();
  const cpu::Isa isa_ = cpu::isa();
};

CacheLayout small(int64_t page_size = 64) { return {.n_kv_heads = 2, .head_dim = 64, .page_size = page_size}; }

TEST_F(CacheWrite, ChunksEqualTheWhole) {
  Tokens tokens(1341, 2, 64, 1);  // marks at 1024 and 1280
  const std::vector<uint8_t> whole = whole_content(small(), tokens);
  std::vector<int32_t> table = plain_table(small(), tokens.n);
  for (const int64_t chunk : {1, 7, 63, 64, 65, 1000, 1024}) {
    Pool pool(small(), static_cast<int64_t>(table.size()));
    for (int64_t at = 0; at < tokens.n; at += chunk) {
      write(pool.storage(), table, at, tokens, at, std::min(tokens.n, at + chunk));
    }
    EXPECT_EQ(content(pool.view(), table, tokens.n), whole) << "chunks of " << chunk;
  }
}

/// Marks at 1024 and 1280 fall into one page of 320 or 576 keys: each fit has its own slot.
TEST_F(CacheWrite, PageSizesAndIdsChangeNoContent) {
  Tokens tokens(1300, 2, 64, 2);
  const std::vector<uint8_t> whole = whole_content(small(), tokens);
  for (const int64_t page_size : {64, 128, 192, 256, 320, 512, 576, 832, 1024}) {
    const int64_t pages = (tokens.n + page_size - 1) / page_size;
    std::vector<int32_t> ids(static_cast<size_t>(2 * pages));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(9));
    std::vector<int32_t> table(ids.begin(), ids.begin() + pages);
    table.push_back(2147480000);  // past the length
    for (const int fill : {0x00, 0xFF, 0x7F}) {
      Pool pool(small(page_size), 2 * pages, static_cast<uint8_t>(fill));
      write(pool.storage(), table, 0, tokens, 0, tokens.n);
      EXPECT_EQ(content(pool.view(), table, tokens.n), whole) << page_size << " keys a page, filled with " << fill;
      for (auto id = ids.begin() + pages; id != ids.end(); ++id) {
        const uint8_t* page = pool.bytes.data() + *id * pool.sections.bytes;
        EXPECT_EQ(std::count(page, page + pool.sections.bytes, fill), pool.sections.bytes) << "page " << *id;
      }
    }
  }
}

TEST_F(CacheWrite, KeysBesideTheNewOnesStay) {
  Tokens tokens(3, 2, 64, 3);
  for (const int fill : {0x00, 0xFF}) {
    Pool pool(small(), 1, static_cast<uint8_t>(fill));
    std::vector<int32_t> table{0};
    write(pool.storage(), table, 10, tokens, 0, 3);
    const auto written = pool.sections.bytes - std::count(pool.bytes.begin(), pool.bytes.end(), fill);
    EXPECT_LE(written, 2 * 3 * (2 * 2 * 64 + 4)) << "two heads, three keys, K and V: two bytes a channel and a scale";
    EXPECT_GT(written, 2 * 3 * 2 * 64);
  }
}

/// Planes and scales of every layout and input type against src/numerics, row by row.
TEST_F(CacheWrite, EveryLayoutAndTypeStoresItsPlanes) {
  for (const int64_t d : {64, 128, 256}) {
    Tokens tokens(70, 2, d, 4);
    std::vector<uint16_t> bf16[2], f16[2];
    for (const float x : tokens.k) bf16[0].push_back(numerics::to_bf16(x)), f16[0].push_back(numerics::to_f16(x));
    for (const float x : tokens.v) bf16[1].push_back(numerics::to_bf16(x)), f16[1].push_back(numerics::to_f16(x));
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const auto data = [&](int which) -> void* {
        if (dtype == DType::f32) return which == 0 ? tokens.k.data() : tokens.v.data();
        return dtype == DType::bf16 ? bf16[which].data() : f16[which].data();
      };
      const auto value = [&](int which, int64_t i) {
        if (dtype == DType::bf16) return numerics::from_bf16(bf16[which][i]);
        if (dtype == DType::f16) return numerics::from_f16(f16[which][i]);
        return which == 0 ? tokens.k[i] : tokens.v[i];
      };
      for (const int k_bits : {16, 8, 4}) {
        for (const int v_bits : {16, 8, 4}) {
          const CacheLayout layout{2, d, 128, k_bits, v_bits, true};
          Pool pool(layout, 1);
          std::vector<int32_t> table{0}, seqlens{0}, cu{0, 70};
          cache_write(pool.storage(), {.k = {data(0), dtype, {70, 2, d}},
                                       .v = {data(1), dtype, {70, 2, d}},
                                       .block_table = {table.data(), DType::i32, {1, 1}},
                                       .seqlens = vector_view(seqlens),
                                       .cu_seqlens = vector_view(cu),
                                       .slot_mapping = {}});
          for (int64_t key = 0; key < 70; ++key) {
            for (int64_t head = 0; head < 2; ++head) {
              const plan::HeadPage page = plan::head_page(pool.view(), 0, head);
              const int64_t scale = key / 64 * 64 + numerics::scale_slot(static_cast<int>(key % 64));
              for (int which = 0; which < 2; ++which) {
                float x[256];
                int8_t a[256], b[256];
                for (int64_t i = 0; i < d; ++i) x[i] = value(which, (key * 2 + head) * d + i);
                numerics::rotate(x, static_cast<int>(d));
                const uint16_t e = numerics::split_row(x, static_cast<int>(d), a, b);
                ASSERT_EQ((which == 0 ? page.k_scale : page.v_scale)[scale], e);
                const numerics::PlaneRow row =
                    numerics::plane_row(which == 0 ? numerics::PlaneRow{page.k_h, page.k_l, page.k_b}
                                                   : numerics::PlaneRow{page.v_h, page.v_l, page.v_b},
                                        key, static_cast<int>(d));
                const int bits = which == 0 ? k_bits : v_bits;
                ASSERT_EQ(row.l == nullptr, bits == 4);
                ASSERT_EQ(row.b == nullptr, bits != 16);
                for (int i = 0; i < d; ++i) {
                  const int want = bits == 4 ? 256 * 16 * (a[i] >> 4) + 1920 : 256 * a[i] + (bits == 16 ? b[i] : 0);
                  ASSERT_EQ(numerics::reading(row, i), want) << d << " " << bits << " key " << key << " channel " << i;
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST_F(CacheWrite, StridesOfTheInputChangeNothing) {
  constexpr int64_t kN = 130, kH = 2, kD = 64;
  Tokens tokens(kN, kH, kD, 5);
  const std::vector<uint8_t> whole = whole_content(small(), tokens);
  std::vector<float> fused(kN * 3 * kH * kD, NAN), transposed_k(kN * kH * kD), transposed_v(transposed_k);
  for (int64_t t = 0; t < kN; ++t) {
    for (int64_t h = 0; h < kH; ++h) {
      std::copy_n(tokens.row(tokens.k, t, h), kD, &fused[((t * 3 + 1) * kH + h) * kD]);
      std::copy_n(tokens.row(tokens.v, t, h), kD, &fused[((t * 3 + 2) * kH + h) * kD]);
      std::copy_n(tokens.row(tokens.k, t, h), kD, &transposed_k[(h * kN + t) * kD]);
      std::copy_n(tokens.row(tokens.v, t, h), kD, &transposed_v[(h * kN + t) * kD]);
    }
  }
  const auto strided = [](float* data, int64_t token, int64_t head) {
    TensorView view(data, DType::f32, {kN, kH, kD});
    view.strides = {token, head, 1};
    return view;
  };
  std::vector<int32_t> table = plain_table(small(), kN), seqlens{0}, cu{0, kN};
  const auto written = [&](const TensorView& k, const TensorView& v) {
    Pool pool(small(), 3);
    cache_write(pool.storage(), {.k = k,
                                 .v = v,
                                 .block_table = {table.data(), DType::i32, {1, 3}},
                                 .seqlens = vector_view(seqlens),
                                 .cu_seqlens = vector_view(cu),
                                 .slot_mapping = {}});
    return content(pool.view(), table, kN);
  };
  EXPECT_EQ(written(strided(&fused[kH * kD], 3 * kH * kD, kD), strided(&fused[2 * kH * kD], 3 * kH * kD, kD)), whole);
  EXPECT_EQ(written(strided(transposed_k.data(), kD, kN * kD), strided(transposed_v.data(), kD, kN * kD)), whole);

  // One head for all, by a stride of 0: the bytes of that head twice.
  for (int64_t t = 0; t < kN; ++t) {
    std::copy_n(tokens.row(tokens.k, t, 0), kD, tokens.row(tokens.k, t, 1));
    std::copy_n(tokens.row(tokens.v, t, 0), kD, tokens.row(tokens.v, t, 1));
  }
  EXPECT_EQ(written(strided(tokens.k.data(), kH * kD, 0), strided(tokens.v.data(), kH * kD, 0)),
            whole_content(small(), tokens));
}

/// A row that is not finite poisons its own head's block and the fits that see it.
TEST_F(CacheWrite, PoisonStaysInItsBlock) {
  constexpr int64_t kBad = 1100, kBadHead = 1;
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    for (const bool in_k : {true, false}) {
      Tokens tokens(1300, 2, 64, 6);
      std::vector<int32_t> table = plain_table(small(), tokens.n);
      Pool clean(small(), static_cast<int64_t>(table.size())), poisoned(clean);
      write(clean.storage(), table, 0, tokens, 0, tokens.n);
      tokens.row(in_k ? tokens.k : tokens.v, kBad, kBadHead)[5] = bad;
      write(poisoned.storage(), table, 0, tokens, 0, tokens.n);

      EXPECT_EQ(head_content(poisoned.view(), table, tokens.n, 0), head_content(clean.view(), table, tokens.n, 0));
      EXPECT_EQ(head_content(poisoned.view(), table, kBad, kBadHead), head_content(clean.view(), table, kBad, kBadHead))
          << "keys, blocks and the fit at 1024, before the bad key";
      const auto page = [&](Pool& pool, int64_t block) { return plan::head_page(pool.view(), block, kBadHead); };
      for (int64_t block = 0; block < tokens.n / 64; ++block) {
        EXPECT_EQ(std::isnan(numerics::from_bf16(*page(poisoned, block).bound)), block == kBad / 64) << block;
      }
      const plan::HeadPage fit = page(poisoned, 1280 / 64 - 1);
      EXPECT_TRUE(std::all_of(fit.fit_scale, fit.fit_scale + 16, [](float f) { return f == 0; }));
      EXPECT_TRUE(std::all_of(fit.fit_in, fit.fit_in + 16 * 64, [](int8_t p) { return p == 0; }));
      EXPECT_TRUE(std::all_of(fit.fit_out, fit.fit_out + 16 * 64, [](int8_t u) { return u == 0; }));
    }
  }
}

TEST_F(CacheWrite, PaddingTokensTakeNoPosition) {
  Tokens tokens(100, 2, 64, 7);
  const std::vector<uint8_t> whole = whole_content(small(), tokens);
  // Every third token is padding, and some follow behind cu_seqlens; all hold NaN.
  Tokens padded(160, 2, 64, 0);
  std::fill(padded.k.begin(), padded.k.end(), NAN);
  std::fill(padded.v.begin(), padded.v.end(), NAN);
  std::vector<int64_t> slots(160, -1);
  std::vector<int32_t> table{3, 1};
  int32_t at = 0;
  for (int64_t t = 0; t < 100; ++t, ++at) {
    if (at % 3 == 2) ++at;
    for (int64_t h = 0; h < 2; ++h) {
      std::copy_n(tokens.row(tokens.k, t, h), 64, padded.row(padded.k, at, h));
      std::copy_n(tokens.row(tokens.v, t, h), 64, padded.row(padded.v, at, h));
    }
    slots[at] = table[t / 64] * 64 + t % 64;
  }
  Pool pool(small(), 4);
  std::vector<int32_t> seqlens{0}, cu{0, at};
  cache_write(pool.storage(), {.k = {padded.k.data(), DType::f32, {160, 2, 64}},
                               .v = {padded.v.data(), DType::f32, {160, 2, 64}},
                               .block_table = {table.data(), DType::i32, {1, 2}},
                               .seqlens = vector_view(seqlens),
                               .cu_seqlens = vector_view(cu),
                               .slot_mapping = {slots.data(), DType::i64, {160}}});
  EXPECT_EQ(content(pool.view(), table, 100), whole);
}

/// Requests of many lengths in one call, on every instruction set and thread count, against each alone.
TEST_F(CacheWrite, BatchThreadsAndInstructionSetsChangeNoBit) {
  const std::vector<int32_t> counts{1, 0, 64, 1290, 63, 129};
  std::vector<int32_t> cu{0}, table, seqlens(counts.size(), 0);
  for (const int32_t n : counts) cu.push_back(cu.back() + n);
  Tokens tokens(cu.back(), 2, 64, 8);
  constexpr int64_t kMaxPages = 21;
  for (size_t b = 0; b < counts.size(); ++b) {
    for (int64_t i = 0; i < kMaxPages; ++i) {
      table.push_back(i * 64 < counts[b] ? static_cast<int32_t>(i * 6 + static_cast<int64_t>(b)) : -7);
    }
  }
  for (int level = 0; level <= static_cast<int>(isa_); ++level) {
    cpu::set_isa(static_cast<cpu::Isa>(level));
    for (const int threads : {1, 2, 5}) {
      omp_set_num_threads(threads);
      Pool pool(small(), 6 * kMaxPages);
      cache_write(pool.storage(), {.k = {tokens.k.data(), DType::f32, {tokens.n, 2, 64}},
                                   .v = {tokens.v.data(), DType::f32, {tokens.n, 2, 64}},
                                   .block_table = {table.data(), DType::i32, {6, kMaxPages}},
                                   .seqlens = vector_view(seqlens),
                                   .cu_seqlens = vector_view(cu),
                                   .slot_mapping = {}});
      cpu::set_isa(cpu::Isa::portable);
      for (size_t b = 0; b < counts.size(); ++b) {
        std::vector<int32_t> own(table.begin() + b * kMaxPages, table.begin() + (b + 1) * kMaxPages);
        std::vector<int32_t> alone_table = plain_table(small(), counts[b]);
        Pool alone(small(), static_cast<int64_t>(alone_table.size()));
        write(alone.storage(), alone_table, 0, tokens, cu[b], cu[b + 1]);
        EXPECT_EQ(content(pool.view(), own, counts[b]), content(alone.view(), alone_table, counts[b]))
            << "request " << b << ", instruction set " << level << ", " << threads << " threads";
      }
      cpu::set_isa(static_cast<cpu::Isa>(level));
    }
  }
}

/// Keys that were cut off leave nothing behind, in the block they share with new ones or in a fit.
TEST_F(CacheWrite, CutAndWrittenAgainIsTheWhole) {
  Tokens tokens(1100, 2, 64, 10), other(400, 2, 64, 11);
  const std::vector<uint8_t> whole = whole_content(small(), tokens);
  std::vector<int32_t> table = plain_table(small(), 1400);
  Pool pool(small(), static_cast<int64_t>(table.size()));
  write(pool.storage(), table, 0, tokens, 0, 1000);
  write(pool.storage(), table, 1000, other, 0, 400);
  write(pool.storage(), table, 1000, tokens, 1000, 1100);
  EXPECT_EQ(content(pool.view(), table, 1100), whole);
}

TEST_F(CacheWrite, PagesMayLiePastFourGigabytes) {
  const CacheLayout layout = small();
  const int64_t stride = (int64_t{1} << 32) + 4096, bytes = page_sections(layout).bytes;
  const size_t size = static_cast<size_t>(2 * stride + bytes);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  Tokens tokens(130, 2, 64, 12);
  const std::vector<uint8_t> whole = whole_content(layout, tokens);
  CacheStorage storage{layout, {memory, DType::u8, {3, bytes}}};
  storage.storage.strides[0] = stride;
  std::vector<int32_t> table{2, 0, 1};
  write(storage, table, 0, tokens, 0, tokens.n);
  const plan::CacheView view{static_cast<uint8_t*>(memory), stride, 3, layout, page_sections(layout)};
  EXPECT_EQ(content(view, table, tokens.n), whole);
  munmap(memory, size);
}

}  // namespace
