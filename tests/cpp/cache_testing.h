#pragma once
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "fold/decode.h"
#include "plan/cache_access.h"

// Page pools, tokens and what a request's pages say, for tests of cache writes.
namespace fold::testing {

/// A pool whose every byte starts as `fill`.
struct Pool {
  Pool(const CacheLayout& cache_layout, int64_t pages, uint8_t fill = 0xFF)
      : layout(cache_layout),
        sections(page_sections(layout)),
        num_pages(pages),
        bytes(static_cast<size_t>(pages * sections.bytes), fill) {}

  CacheStorage storage() { return {layout, {bytes.data(), DType::u8, {num_pages, sections.bytes}}}; }
  plan::CacheView view() { return {bytes.data(), sections.bytes, num_pages, layout, sections}; }

  CacheLayout layout;
  PageSections sections;
  int64_t num_pages;
  std::vector<uint8_t> bytes;
};

/// K and V (n, heads, d) in fp32. V is partly a linear map of K, so that a fit has something to find.
struct Tokens {
  Tokens(int64_t count, int64_t kv_heads, int64_t head_dim, unsigned seed) : n(count), heads(kv_heads), d(head_dim) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    constexpr int kHidden = 6;
    std::vector<float> to_k(kHidden * d), to_v(kHidden * d);
    for (float& x : to_k) x = normal(random);
    for (float& x : to_v) x = normal(random);
    for (int64_t row = 0; row < n * heads; ++row) {
      float hidden[kHidden];
      for (float& x : hidden) x = normal(random);
      for (int64_t i = 0; i < d; ++i) {
        k.push_back(0.3f * normal(random));
        v.push_back(0.3f * normal(random));
        for (int r = 0; r < kHidden; ++r) {
          k.back() += hidden[r] * to_k[r * d + i];
          v.back() += hidden[r] * to_v[r * d + i];
        }
      }
    }
  }

  /// Row `token` of one head of x (k or v).
  float* row(std::vector<float>& x, int64_t token, int64_t head) { return x.data() + (token * heads + head) * d; }

  int64_t n, heads, d;
  std::vector<float> k, v;
};

inline TensorView vector_view(std::vector<int32_t>& x) {
  return {x.data(), DType::i32, {static_cast<int64_t>(x.size())}};
}

/// Page ids 0, 1, 2, ... of as many pages as `keys` need.
inline std::vector<int32_t> plain_table(const CacheLayout& layout, int64_t keys) {
  std::vector<int32_t> table(static_cast<size_t>((keys + layout.page_size - 1) / layout.page_size));
  std::iota(table.begin(), table.end(), 0);
  return table;
}

/// Writes tokens [begin, end) of one request that holds `length` keys.
inline void write(const CacheStorage& storage, std::vector<int32_t>& table, int64_t length, Tokens& t, int64_t begin,
                  int64_t end) {
  std::vector<int32_t> seqlens{static_cast<int32_t>(length)}, cu{0, static_cast<int32_t>(end - begin)};
  const auto rows = [&](std::vector<float>& x) {
    return TensorView(x.data() + begin * t.heads * t.d, DType::f32, {end - begin, t.heads, t.d});
  };
  cache_write(storage, {.k = rows(t.k),
                        .v = rows(t.v),
                        .block_table = {table.data(), DType::i32, {1, static_cast<int64_t>(table.size())}},
                        .seqlens = vector_view(seqlens),
                        .cu_seqlens = vector_view(cu),
                        .slot_mapping = {}});
}

/// Everything that the format defines about a request's first `length` keys of one KV head, in logical order: what does
/// not depend on where its pages lie or how large they are.
inline std::vector<uint8_t> head_content(const plan::CacheView& cache, const std::vector<int32_t>& table,
                                         int64_t length, int64_t head) {
  std::vector<uint8_t> out;
  const auto put = [&out](const auto* from, int64_t index, int64_t count) {
    if (from == nullptr) return;
    const auto* bytes = reinterpret_cast<const uint8_t*>(from + index * count);
    out.insert(out.end(), bytes, bytes + count * static_cast<int64_t>(sizeof(*from)));
  };
  const int64_t d = cache.layout.head_dim, page_size = cache.layout.page_size, tile = numerics::kTile;
  const auto page_of = [&](int64_t key) { return plan::head_page(cache, table[key / page_size], head); };
  for (int64_t key = 0; key < length; ++key) {
    const plan::HeadPage page = page_of(key);
    const int64_t slot = key % page_size;
    const int64_t scale = slot / tile * tile + numerics::scale_slot(static_cast<int>(slot % tile));
    put(page.k_h, slot, d / 2);
    put(page.k_l, slot, d / 2);
    put(page.k_b, slot, d);
    put(page.k_scale, scale, 1);
    put(page.v_h, slot, d / 2);
    put(page.v_l, slot, d / 2);
    put(page.v_b, slot, d);
    put(page.v_scale, scale, 1);
    if (key % tile != tile - 1) continue;
    put(page.bound, slot / tile, 1);
    put(page.mean_scale, slot / tile, 1);
    put(page.mean, slot / tile, d);
    put(page.ubar, slot / tile, d);
  }
  for (int64_t mark = plan::next_mark(0); mark <= length; mark = plan::next_mark(mark)) {
    const plan::HeadPage page = page_of(mark - 1);
    const int64_t slot = plan::fit_slot(mark, page_size);
    put(page.fit_in, slot, numerics::kRank * d);
    put(page.fit_out, slot, numerics::kRank * d);
    put(page.fit_scale, slot, numerics::kRank);
  }
  return out;
}

/// head_content of every head.
inline std::vector<uint8_t> content(const plan::CacheView& cache, const std::vector<int32_t>& table, int64_t length) {
  std::vector<uint8_t> all;
  for (int64_t head = 0; head < cache.layout.n_kv_heads; ++head) {
    const std::vector<uint8_t> one = head_content(cache, table, length, head);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

/// The content of these tokens written in one call into a plain pool.
inline std::vector<uint8_t> whole_content(const CacheLayout& layout, Tokens& tokens) {
  std::vector<int32_t> table = plain_table(layout, tokens.n);
  Pool pool(layout, static_cast<int64_t>(table.size()));
  write(pool.storage(), table, 0, tokens, 0, tokens.n);
  return content(pool.view(), table, tokens.n);
}

}  // namespace fold::testing
