#pragma once
#include "cuda/decode/group_state.cuh"
#include "numerics/block.h"
#include "plan/cache_access.h"

// What the scales of a group's keys say (docs/numerics.md, sections 5 and 6), from the blocks' bounds where a block is
// whole, else key by key; and where in the pool keys are.
namespace fold::cuda {

/// Of the page that holds a physical key, as the block table has it. Past L1, as is all that prepare_kernel reads.
__device__ inline int page_id(const Step& step, int batch, int key) {
  const plan::DecodeParams& p = step.params;
  return __ldcg(p.block_table + batch * p.block_table_stride + column_of_tile(step, key / kTile));
}
/// The section pointers of that page.
__device__ inline plan::HeadPage page_of(const Step& step, int batch, int kv_head, int key) {
  return plan::head_page(step.params.cache, page_id(step, batch, key), kv_head);
}
/// Where in its page a physical key is.
__device__ inline int slot_of(const Step& step, int key) {
  return key - column_of_tile(step, key / kTile) * step.tiles_of_page * kTile;
}

__device__ inline bool in_pool(const plan::DecodeParams& p, int id) { return id >= 0 && id < p.cache.num_pages; }

/// What the visible keys' scales say.
struct SurveyedScales {
  bool exists = true;              // every page is in the pool
  unsigned largest = 0;            // visible V scale as bf16 bits; NaN, which orders above all, if a key is poisoned
  unsigned bound = 0;              // of the settled blocks' bounds the largest
  int exponents = 0, settled = 0;  // sum over the settled blocks' bounds, and how many there are
};

/// Finds that out of a thread's share of the whole tiles, and a lane's of the others, where all threads of a CTA share
/// in this. What is in the pages is asked for in two steps, between which others may ask for theirs.
class ScaleSurvey {
 public:
  SurveyedScales found;

  __device__ ScaleSurvey(const Step& step, const Visible& v, int batch, int kv_head)
      : step_(step),
        p_(step.params),
        v_(v),
        batch_(batch),
        kv_head_(kv_head),
        settled_end_(v.settled_end()),
        begin_((v.first + kTile - 1) / kTile),
        end_(min(v.position + 1, v.draft) / kTile),
        tile_(begin_ + static_cast<int>(threadIdx.x)) {
    // The first tile, if the window cuts it, is the last warp's, those past the whole ones are the warps' before it.
    const int before = (threads() - static_cast<int>(threadIdx.x) - 1) / 32;
    cut_tile_ = before > 0 ? max(end_, begin_) + before - 1 : v.first % kTile != 0 ? v.first / kTile : INT_MAX;
  }

  /// Asks for the pages of the thread's first tiles.
  __device__ void look_up() {
    look_up_whole();
    if (is_cut()) cut_id_ = page_id(step_, batch_, cut_tile_ * kTile);
  }
  /// Asks for their bounds.
  __device__ void load() {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      found.exists &= in_pool(p_, id_[i]);
      bound_[i] = tile(i) < end_ && in_pool(p_, id_[i]) ? bound_of(id_[i], tile(i) * kTile) : 0;
    }
  }
  /// Adds these, and all further ones.
  __device__ void add_whole_tiles() {
    add();
#pragma unroll 1
    for (tile_ += kAtOnce * threads(); tile_ < end_; tile_ += kAtOnce * threads()) {
      look_up_whole();
      load();
      add();
    }
  }

  /// Key by key.
  __device__ void add_cut_tiles() {
    if (!is_cut()) return;
    found.exists &= in_pool(p_, cut_id_);
    if (!in_pool(p_, cut_id_)) return;
    const plan::HeadPage page = plan::head_page(p_.cache, cut_id_, kv_head_);
    uint16_t v_scale[2] = {}, k_scale[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int key = static_cast<int>(threadIdx.x) % 32 + 32 * j;
      if (!v_.sees(cut_tile_ * kTile + key)) continue;
      const int at = slot_of(step_, cut_tile_ * kTile) + numerics::scale_slot(key);
      v_scale[j] = __ldcg(page.v_scale + at);
      k_scale[j] = __ldcg(page.k_scale + at);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      found.largest = max(found.largest, unsigned{v_scale[j]});
      if (k_scale[j] == numerics::kBf16Nan) found.largest = max(found.largest, unsigned{numerics::kBf16Nan});
    }
  }

 private:
  static constexpr int kAtOnce = 4;  ///< tiles whose bounds are on their way

  __device__ static int threads() { return static_cast<int>(blockDim.x); }
  __device__ int tile(int i) const { return tile_ + i * threads(); }
  __device__ bool is_cut() const { return cut_tile_ < v_.tiles(); }

  __device__ void look_up_whole() {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) id_[i] = tile(i) < end_ ? page_id(step_, batch_, tile(i) * kTile) : 0;
  }

  __device__ uint16_t bound_of(int id, int key) const {
    return __ldcg(plan::head_page(p_.cache, id, kv_head_).bound + slot_of(step_, key) / kTile);
  }

  __device__ void add() {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      found.largest = max(found.largest, unsigned{bound_[i]});
      if (tile(i) >= min(end_, settled_end_)) continue;  // none of them is before the first that is settled
      found.bound = max(found.bound, unsigned{bound_[i]});
      found.exponents += numerics::pow2_ceil_exponent(bound_[i]);
      ++found.settled;
    }
  }

  const Step& step_;
  const plan::DecodeParams& p_;
  const Visible& v_;
  const int batch_, kv_head_, settled_end_;
  const int begin_, end_;  // of the whole tiles
  int tile_;               // the first of the thread's that are on their way
  int cut_tile_;           // the warp's, if there is one
  int cut_id_ = 0;
  int id_[kAtOnce];
  uint16_t bound_[kAtOnce];
};

}  // namespace fold::cuda
