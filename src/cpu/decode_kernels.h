#pragma once
#include <memory>

#include "cpu/decode_worker.h"
#include "cpu/head_dim.h"

// An instruction set's kernels from its operations.
namespace fold::cpu {
namespace {

template <class Ops>
void sum_rows(const Group& group, int64_t tile_begin, int64_t tile_end, RangeSums& sums) {
  thread_local std::unique_ptr<RangeWorker<Ops>> worker;
  if (!worker || worker->rows() != group.rows) worker = std::make_unique<RangeWorker<Ops>>(group.rows);
  worker->run(group, tile_begin, tile_end, sums);
}

template <class Ops>
void score_rows(const Group& g, const int64_t* keys, int count, float* logits) {
  constexpr int D = Ops::kDim, kHalf = D / 2;
  const Query& q = g.query;
  const bool coarse = g.params->cache.layout.k_bits == 4;  // level 0, else level 1
  SplitRow rows[kTile];
  const uint16_t* stored[kTile];  // their scales
  const int64_t page_size = g.params->cache.layout.page_size;
  plan::HeadPage page{};
  for (int i = 0; i < count; ++i) {
    const int64_t slot = g.slot_of(keys[i]);
    if (i == 0 || keys[i] / page_size != keys[i - 1] / page_size) page = g.page_of(keys[i]);
    rows[i] = {page.k_h + slot * kHalf, coarse ? kHalfPlane.bytes : page.k_l + slot * kHalf};
    stored[i] = page.k_scale + slot / kTile * kTile + numerics::scale_slot(static_cast<int>(slot % kTile));
    prefetch(rows[i].h, kHalf);
    if (!coarse) prefetch(rows[i].l, kHalf);
    prefetch(stored[i], sizeof(uint16_t));
  }
  for (int i = count; i % 4 != 0; ++i) rows[i] = rows[0];
  for (int first = 0; first < count; first += 4) {
    int32_t products[kQuadProducts];  // (G, 4)
    if (coarse) {
      Ops::template dots<false>(rows + first, q.a_split.data(), nullptr, q.sum_a, g.rows, products);
    } else {
      Ops::template dots<true>(rows + first, q.a_split.data(), q.b_split.data(), q.sum, g.rows, products);
    }
    for (int r = 0; r < g.rows; ++r) {
      const float unit = numerics::mul(q.scale[r], coarse ? 0.5f : 0x1p-8f);
      for (int i = first; i < std::min(first + 4, count); ++i) {
        const int32_t dot = products[4 * r + i - first];
        const float product = static_cast<float>(coarse ? level_0(dot, q.sum_a[r]) : dot);
        logits[r * kTile + i] = numerics::mul(numerics::mul(product, unit), numerics::from_bf16(*stored[i]));
      }
    }
  }
}

template <template <int> class Ops>
void sum_range(const Group& group, int64_t tile_begin, int64_t tile_end, RangeSums& sums) {
  with_head_dim(group.head_dim, [&](auto d) { sum_rows<Ops<d()>>(group, tile_begin, tile_end, sums); });
}

template <template <int> class Ops>
void score_keys(const Group& group, const int64_t* keys, int count, float* logits) {
  with_head_dim(group.head_dim, [&](auto d) { score_rows<Ops<d()>>(group, keys, count, logits); });
}

inline uint16_t split_row(float* x, int head_dim, int8_t* a, int8_t* b) {
  return with_head_dim(head_dim, [&](auto d) {
    numerics::rotate(x, d());
    return numerics::split_row(x, d(), a, b);
  });
}

inline void weigh_logits(const float* logits, int64_t count, float largest, uint32_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = numerics::fix(numerics::sub(logits[i], largest));
}

/// The kernels of a set of operations.
template <template <int> class Ops>
DecodeKernels kernels_of() {
  return {split_row, sum_range<Ops>, score_keys<Ops>, weigh_logits};
}

}  // namespace
}  // namespace fold::cpu
