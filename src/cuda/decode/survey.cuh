#pragma once
#include "cuda/decode/group_state.cuh"
#include "numerics/block.h"
#include "plan/cache_access.h"

// What the scales of a group's keys say (docs/numerics.md, sections 5 and 6), from the blocks' bounds where a block is
// whole, else key by key; and where in the pool keys are.
namespace fold::cuda {

/// Of the page that holds a physical key, as the block table has it.
__device__ inline int page_id(const plan::DecodeParams& p, int batch, int key) {
  return p.block_table[batch * p.block_table_stride + key / static_cast<int>(p.cache.layout.page_size)];
}
/// The section pointers of that page.
__device__ inline plan::HeadPage page_of(const plan::DecodeParams& p, int batch, int kv_head, int key) {
  return plan::head_page(p.cache, page_id(p, batch, key), kv_head);
}
/// Where in its page a physical key is.
__device__ inline int slot_of(const plan::DecodeParams& p, int key) {
  return key % static_cast<int>(p.cache.layout.page_size);
}

__device__ inline bool in_pool(const plan::DecodeParams& p, int id) { return id >= 0 && id < p.cache.num_pages; }

/// What the visible keys' scales say.
struct ScaleSurvey {
  bool exists = true;              // every page is in the pool
  unsigned largest = 0;            // visible V scale as bf16 bits; NaN, which orders above all, if a key is poisoned
  unsigned bound = 0;              // of the settled blocks' bounds the largest
  int exponents = 0, settled = 0;  // sum over the settled blocks' bounds, and how many there are
};

/// Of a thread's share of the whole tiles, and of the warp's lane's of the others, where `threads` share in this.
__device__ inline void survey_scales(const Step& step, const Visible& v, int batch, int kv_head, int threads,
                                     ScaleSurvey& survey) {
  const plan::DecodeParams& p = step.params;
  const int thread = static_cast<int>(threadIdx.x);
  const int whole_begin = (v.first + kTile - 1) / kTile, whole_end = min(v.position + 1, v.draft) / kTile;
  constexpr int kAtOnce = 4;  // tiles whose bounds are on their way
#pragma unroll 1
  for (int tile = whole_begin + thread; tile < whole_end; tile += kAtOnce * threads) {
    int id[kAtOnce];
    uint16_t bound[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      id[i] = page_id(p, batch, min(tile + i * threads, whole_end - 1) * kTile);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int key = min(tile + i * threads, whole_end - 1) * kTile;
      survey.exists &= in_pool(p, id[i]);
      bound[i] = in_pool(p, id[i]) ? plan::head_page(p.cache, id[i], kv_head).bound[slot_of(p, key) / kTile] : 0;
    }
#pragma unroll 1
    for (int i = 0; i < kAtOnce && tile + i * threads < whole_end; ++i) {
      unsigned of_tile = bound[0];
#pragma unroll
      for (int j = 1; j < kAtOnce; ++j) of_tile = i == j ? bound[j] : of_tile;
      survey.largest = max(survey.largest, of_tile);
      if (!v.settled(tile + i * threads)) continue;
      survey.bound = max(survey.bound, of_tile);
      survey.exponents += numerics::pow2_ceil_exponent(static_cast<uint16_t>(of_tile));
      ++survey.settled;
    }
  }
  const auto key_by_key = [&](int tile) {
    const int id = page_id(p, batch, tile * kTile);
    survey.exists &= in_pool(p, id);
    if (!in_pool(p, id)) return;
    const plan::HeadPage page = plan::head_page(p.cache, id, kv_head);
    for (int key = thread % 32; key < kTile; key += 32) {
      if (!v.sees(tile * kTile + key)) continue;
      const int at = slot_of(p, tile * kTile) + numerics::scale_slot(key);
      survey.largest = max(survey.largest, unsigned{page.v_scale[at]});
      if (page.k_scale[at] == numerics::kBf16Nan) survey.largest = max(survey.largest, unsigned{numerics::kBf16Nan});
    }
  };
  // The first tile, if the window cuts it, is the last warp's, and those from whole_end on are the warps' before it.
  const int warp = thread / 32, last_warp = threads / 32 - 1;
  const int tile = warp == last_warp ? v.first / kTile : max(whole_end, whole_begin) + (last_warp - 1 - warp);
  const bool cut = warp == last_warp ? v.first % kTile != 0 : tile < v.tiles();
  if (cut) key_by_key(tile);
}

}  // namespace fold::cuda
