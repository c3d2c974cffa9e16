#include <gtest/gtest.h>

#include <algorithm>

#include "plan/attention_plan.h"

namespace fold::plan {
namespace {

TEST(AttentionPlan, VisibleKeysAndTheRowsThatSeeThem) {
  const int64_t unlimited = kUnlimitedWindow;
  for (const int64_t q_len : {0, 1, 5, 9}) {
    for (const int64_t k_len : {0, 1, 4, 9, 12}) {
      for (const int64_t left : {int64_t{0}, int64_t{3}, unlimited}) {
        for (const int64_t right : {int64_t{0}, int64_t{2}, unlimited}) {
          ForwardParams p{};
          p.window_left = left;
          p.window_right = right;
          const Sequence s{
              .index = 0, .q_begin = 0, .q_len = q_len, .k_begin = 0, .k_len = k_len, .q_global = 0, .k_global = 0};
          const auto sees = [&](int64_t i, int64_t j) {
            const int64_t diagonal = i + k_len - q_len;
            return diagonal - j <= left && j - diagonal <= right;
          };
          KeyRange before{0, 0};
          for (int64_t i = 0; i < q_len; ++i) {
            const KeyRange keys = visible_keys(p, s, i);
            for (int64_t j = 0; j < k_len; ++j) EXPECT_EQ(sees(i, j), keys.first <= j && j < keys.last);
            EXPECT_GE(keys.first, before.first);
            EXPECT_GE(keys.last, before.last);
            before = keys;
          }
          for (int64_t first = 0; first < k_len; first += 3) {
            const int64_t last = std::min(first + 3, k_len);
            const KeyRange rows = rows_seeing(p, s, first, last);
            EXPECT_GE(rows.first, 0);
            EXPECT_LE(rows.last, q_len);
            for (int64_t i = 0; i < q_len; ++i) {
              bool any = false;
              for (int64_t j = first; j < last; ++j) any = any || sees(i, j);
              EXPECT_TRUE(!any || (rows.first <= i && i < rows.last));
            }
          }
        }
      }
    }
  }
}

TEST(AttentionPlan, SequencesOfBothLayouts) {
  ForwardParams dense{};
  dense.batch = 3;
  dense.seqlen_q = 5;
  dense.seqlen_k = 7;
  const auto d = sequences(dense);
  ASSERT_EQ(d.size(), 3u);
  EXPECT_EQ(d[2].q_begin, 0);
  EXPECT_EQ(d[2].q_global, 10);
  EXPECT_EQ(d[2].k_global, 14);

  const int32_t ends_q[] = {0, 4, 4, 204}, ends_k[] = {0, 0, 3, 403};
  ForwardParams packed{};
  packed.batch = 3;
  packed.cu_seqlens_q = ends_q;
  packed.cu_seqlens_k = ends_k;
  const auto s = sequences(packed);
  EXPECT_EQ(s[0].k_len, 0);
  EXPECT_EQ(s[1].q_len, 0);
  EXPECT_EQ(s[2].q_begin, 4);
  EXPECT_EQ(s[2].k_len, 400);
  // 4 rows are one tile, 200 are three; per head.
  EXPECT_EQ(query_tiles(s, 2).size(), 2u * (1 + 0 + 3));
  EXPECT_EQ(key_tiles(s, 2).size(), 2u * (0 + 1 + 3));
}

// A sequence's tasks do not depend on what surrounds it.
TEST(AttentionPlan, TilesAreTheSequencesOwn) {
  const Sequence one{.index = 0, .q_begin = 0, .q_len = 300, .k_begin = 0, .k_len = 500, .q_global = 0, .k_global = 0};
  Sequence other = one;
  other.q_begin = other.q_global = 77;
  other.k_begin = other.k_global = 1000;
  const auto alone = query_tiles({one}, 1), beside = query_tiles({Sequence{}, other}, 1);
  ASSERT_EQ(alone.size(), beside.size());
  for (size_t i = 0; i < alone.size(); ++i) EXPECT_EQ(alone[i].tile, beside[i].tile);
}

}  // namespace
}  // namespace fold::plan
