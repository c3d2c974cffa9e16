// The tail's fits on a device leave the CPU backend's bytes (P4 of docs/numerics.md), however many a call reaches and
// however they are cut.
#include "cache_write_testing.h"

namespace {

using namespace fold;
using namespace fold::testing;

using CacheFitsOnDevice = DeviceTest;

/// A fit by parts (few in a call) and whole (many), alone and with others, reached by one token or in the middle of a
/// chunk.
TEST_F(CacheFitsOnDevice, FitsAtMarks) {
  Random random(4);
  struct Case {
    int64_t d, heads, page_size;
    std::vector<std::vector<int64_t>> rounds;
  };
  const Case cases[] = {
      {64, 2, 64, {{1000}, {23}, {1}, {1}, {255}, {70}}},
      {128, 1, 320, {{2100}, {459}, {1}}},
      {128, 3, 256, {{1100, 900, 1279}, {1, 124, 1}, {179, 0, 255}, {1, 1, 1}}},
      {256, 2, 576, {{1023, 1300}, {1, 236}, {600, 1}}},
      // More fits than there are slots for parts: 336, 70.
      {64, 8, 256, {{2600, 2600, 2600, 2600, 2600, 2600, 2600}}},
      {256, 7, 256, {{1290, 1290, 1290, 1290, 1290}}},
  };
  for (const Case& c : cases) {
    for (const double hard : {0.0, 0.001}) {
      const CacheLayout layout{.n_kv_heads = c.heads, .head_dim = c.d, .page_size = c.page_size};
      std::vector<int64_t> capacity(c.rounds[0].size(), 0);
      for (const auto& counts : c.rounds) {
        for (size_t b = 0; b < counts.size(); ++b) capacity[b] += counts[b];
      }
      Batch batch(random, layout, capacity);
      BothPools pools(layout, batch.pool_pages);
      for (const auto& counts : c.rounds) {
        write_both(pools, batch.call(random, layout, counts, hard, DType::f32, DType::bf16));
        pools.expect_same("head dim " + std::to_string(c.d) + ", " + std::to_string(c.heads) + " heads, hard rows " +
                          std::to_string(hard));
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// V that K predicts, codes and readings at their ends, nothing to fit, scales that grow on the way, and one direction,
/// of which rounding leaves traces in the others.
TEST_F(CacheFitsOnDevice, FitsOfSpecialContent) {
  Random random(5);
  for (const int64_t d : {64, 128, 256}) {
    for (const int v_bits : {16, 8, 4}) {
      for (int content = 0; content < 6; ++content) {
        const CacheLayout layout{.n_kv_heads = 1, .head_dim = d, .page_size = 256, .v_bits = v_bits};
        Batch batch(random, layout, {1300});
        BothPools pools(layout, batch.pool_pages);
        Call call = batch.call(random, layout, {1300}, 0);
        Tokens predictable(call.tokens, 1, d, 6);
        auto* k = reinterpret_cast<float*>(call.k.bytes.data());
        auto* v = reinterpret_cast<float*>(call.v.bytes.data());
        const int64_t count = call.tokens * d;
        std::copy_n(predictable.k.data(), count, k);
        std::copy_n(predictable.v.data(), count, v);
        if (content == 1 || content == 5) {
          for (int64_t row = 0; row < call.tokens; ++row) {
            std::vector<float> x(static_cast<size_t>(d));
            for (int64_t c = 0; c < d; ++c) {
              const int64_t code = content == 1 ? 127 : 127 - c * c % 97;
              x[static_cast<size_t>(c)] = static_cast<float>(row % 2 == 0 ? code : -code) / 128;
            }
            numerics::rotate(x.data(), static_cast<int>(d));
            std::copy_n(x.data(), d, k + row * d);
            std::copy_n(x.data(), d, v + row * d);
          }
        }
        if (content == 2) std::fill_n(v, count, 0.0f);
        if (content == 3) std::fill_n(k, count, 1.0f);
        if (content == 4) {
          for (const int64_t loud : {100, 1100, 1200}) {
            for (int64_t i = 0; i < d; ++i) v[loud * d + i] *= static_cast<float>(loud * loud);
          }
        }
        write_both(pools, call);
        pools.expect_same("head dim " + std::to_string(d) + ", bits " + std::to_string(v_bits) + ", content " +
                          std::to_string(content));
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// So many blocks in a part that its sums are put away in between.
TEST_F(CacheFitsOnDevice, LongFits) {
  Random random(7);
  constexpr int64_t kKeys = 40960;
  const CacheLayout layout{.n_kv_heads = 6, .head_dim = 64, .page_size = 1024};
  Batch batch(random, layout, {kKeys});
  BothPools pools(layout, batch.pool_pages);
  write_both(pools, batch.call(random, layout, {kKeys}, 0, DType::bf16, DType::bf16));  // 132 fits
  pools.expect_same("one call");
  batch.lengths[0] -= 64;
  write_both(pools, batch.call(random, layout, {63}, 0, DType::bf16, DType::bf16));
  write_both(pools, batch.call(random, layout, {1}, 0, DType::bf16, DType::bf16));
  pools.expect_same("the last block again");
}

/// A part, or a fit that is not cut, of so many blocks that its sums are put away in between.
TEST_F(CacheFitsOnDevice, SumsOfManyBlocks) {
  Random random(6);
  constexpr int64_t kHeads = 2, kShared = numerics::kFirstMark - numerics::kTile;
  struct Case {
    int64_t d, mark, others;
  };
  // A request that reaches `mark`, and so many others that its two fits have two slots each (of 288, at head dim 256 of
  // 64), or that no fit is cut.
  for (const auto& [d, mark, others] : {Case{64, 10240, 142}, Case{64, 5120, 144}, Case{128, 10240, 142},
                                        Case{128, 5120, 144}, Case{256, 5120, 30}, Case{256, 2560, 32}}) {
    const CacheLayout layout{.n_kv_heads = kHeads, .head_dim = d, .page_size = numerics::kTile};
    std::vector<int64_t> capacity(static_cast<size_t>(1 + others), numerics::kTile);
    capacity[0] = mark;
    capacity[1] = numerics::kFirstMark;
    Batch batch(random, layout, capacity);
    std::vector<int64_t> counts(capacity);
    for (int64_t& count : counts) --count;
    // All but one of the others start with the same pages.
    for (size_t b = 2; b < capacity.size(); ++b) {
      const auto shared = batch.table.begin() + batch.width, row = shared + static_cast<int64_t>(b - 1) * batch.width;
      row[kShared / layout.page_size] = row[0];
      std::copy_n(shared, kShared / layout.page_size, row);
      batch.lengths[b] = kShared;
    }
    BothPools pools(layout, batch.pool_pages);
    Call prompts = batch.call(random, layout, counts, 0);
    // The others' fits take no time: they have no sums if a key is NaN.
    std::fill_n(reinterpret_cast<float*>(prompts.v.bytes.data()) + prompts.cu[1] * kHeads * d, kHeads * d, NAN);
    cache_write(pools.host(), CallTensors(prompts, layout).host());
    pools.give_pages();
    write_both(pools, batch.call(random, layout, std::vector<int64_t>(capacity.size(), 1), 0));
    pools.expect_same("head dim " + std::to_string(d) + ", mark " + std::to_string(mark));
    if (HasFatalFailure()) return;
  }
}

}  // namespace
