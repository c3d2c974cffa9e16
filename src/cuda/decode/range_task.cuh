#pragma once
#include "cuda/decode/group_state.cuh"
#include "cuda/ptx/global_sums.cuh"
#include "cuda/ptx/launch_order.cuh"

namespace fold::cuda {

/// What a CTA does at a time: the sums of a range of tiles and of rows of a group.
struct Item {
  int group, part;    // the part-th of step.parts ranges of rows
  int split, splits;  // the split-th of so many ranges of tiles
};

/// What a CTA knows about its item.
struct RangeTask {
  GroupState g;
  Visible visible;
  int group, batch, token, kv_head, rows;
  int row_begin, row_end;  // whose values are summed here
  TileRange tiles;
  int splits;  // ranges that the group is cut into
  // As declared, from join_task() on. Until then outliers are expected.
  uint64_t active, nan, recomputed;
  int run, fit_mark, typical, outliers, seen;
};

/// A page's id; where the pool has no such page that of another, for nonsense that nobody asks for.
__device__ inline unsigned in_pool_or_any(const plan::CacheView& cache, unsigned id) {
  return min(id, static_cast<unsigned>(cache.num_pages - 1));
}

/// Where a KV head's part of a page's sections starts, in bytes from the page's start. Of those that a cache does not
/// keep nobody asks.
struct HeadSections {
  int k_h, k_l, k_b, k_scale, v_h, v_l, v_b, v_scale, bound, mean_scale, mean, ubar;
};
template <int D>
__device__ HeadSections head_sections(const plan::CacheView& cache, int kv_head) {
  const PageSections& from = cache.sections;
  const int row = kv_head * static_cast<int>(cache.layout.page_size), block = row / kTile;
  const auto offset = [](int64_t section, int before) { return static_cast<int>(section) + before; };
  return {.k_h = offset(from.k_h, row * D / 2),
          .k_l = offset(from.k_l, row * D / 2),
          .k_b = offset(from.k_b, row * D),
          .k_scale = offset(from.k_scale, 2 * row),
          .v_h = offset(from.v_h, row * D / 2),
          .v_l = offset(from.v_l, row * D / 2),
          .v_b = offset(from.v_b, row * D),
          .v_scale = offset(from.v_scale, 2 * row),
          .bound = offset(from.bound, 2 * block),
          .mean_scale = offset(from.mean_scale, 2 * block),
          .mean = offset(from.mean, D * block),
          .ubar = offset(from.ubar, D * block)};
}

/// So many ranges of a group's tiles, or fewer for none to be shorter than is worth it.
__device__ inline int splits_that_pay(const Step& step, int tiles, int splits) {
  return min(splits, max((tiles + step.least - 1) / step.least, 1));
}

/// Where a tile's keys are: the page, and the slot of the first.
struct Spot {
  const uint8_t* page;
  int slot;
  /// The first key's part of a section that has so many bytes a key.
  __device__ const uint8_t* at(int section, int key_bytes) const { return page + (section + slot * key_bytes); }
};

/// What can be said before the group's references are declared. False: the token sees no key. One thread.
__device__ inline bool start_task(const Step& step, const Item& item, RangeTask& task) {
  const plan::DecodeParams& p = step.params;
  const GroupPlace at = place_of_group(step, item.group);
  task.group = item.group;
  task.batch = at.batch;
  task.token = at.token;
  task.kv_head = at.kv_head;
  if (!find_visible(step, length_of(p, task.batch), task.batch, task.token, task.visible)) return false;
  task.g = step.workspace.group(item.group);
  task.rows = step.workspace.rows;
  task.row_begin = task.rows * item.part / step.parts;
  task.row_end = task.rows * (item.part + 1) / step.parts;
  task.splits = item.splits;
  task.outliers = 1;
  const TileRange all = tiles_within(task.visible, p.key_begin, p.key_end);
  const int tiles = all.end - all.begin, splits = splits_that_pay(step, tiles, item.splits);
  const int each = tiles / splits, more = tiles % splits;
  task.tiles.begin = min(all.begin + each * item.split + min(item.split, more), all.end);  // the rest have none
  task.tiles.end = min(task.tiles.begin + each + (item.split < more), all.end);
  return true;
}

/// Waits until the group's references are declared, and learns the rest of them in thread 0.
__device__ inline void join_task(RangeTask& task) {
  ptx::wait_for_earlier_kernels();
  if (threadIdx.x != 0) return;
  const GroupHead head = *task.g.head;
  if (head.seen == 0) {  // nothing else of it is written
    task.active = 0;
    task.seen = task.fit_mark = task.typical = task.outliers = 0;
    return;
  }
  task.active = head.active;
  task.nan = head.nan;
  task.recomputed = head.recomputed;
  task.run = head.run;
  task.fit_mark = head.fit_mark;
  task.typical = head.typical;
  task.outliers = head.outliers;
  task.seen = head.seen;
}

/// Adds a CTA's products of weights with the bytes of values to the group's i-th numerator, of row r, without what
/// those bytes are above the values: 128, and half less where only plane h was read. mass, half_mass: the weights of
/// all, of the latter.
__device__ inline void add_numerator(const RangeTask& task, int r, int i, unsigned long long products,
                                     unsigned long long mass, unsigned long long half_mass) {
  const unsigned long long sum = products - (mass << 15) + (half_mass << 7);
  if ((task.active >> r & 1) != 0 && sum != 0) ptx::add_global(&task.g.num[i], sum << 8);
}

/// Adds a CTA's sums of row r to the group's.
__device__ inline void add_row_sums(const RangeTask& task, int r, const RowSums& of_range) {
  if ((task.active >> r & 1) == 0) return;
  RowSums& sums = task.g.sums[r];
  ptx::add_global(&sums.den, of_range.den);
  ptx::add_global(&sums.mass, of_range.mass);
  ptx::add_global(&sums.dropped, of_range.dropped);
  ptx::add_global(&sums.values_read, of_range.values_read);
  ptx::max_global(&sums.peak, of_range.peak);
}

}  // namespace fold::cuda
