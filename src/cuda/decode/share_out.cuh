#pragma once
#include "cuda/decode/range_task.cuh"

// Which item each CTA of a step takes, found out by every CTA for itself from the requests' lengths, before the
// references are declared. Each entry (a token of a request) has an item for each of its lanes (a KV head and a part of
// its rows), and more of them the longer it is: of step.spare that are left to give, its share by tiles. Equal lengths
// are cut equally, and of unequal ones none keeps a CTA for longer than a place's fair share of all tiles. Sums are the
// same however they are cut.
namespace fold::cuda {

constexpr int kMostWarps = 16;  ///< of a CTA

struct ShareOut {
  int64_t tiles[kMostWarps];
  int items[kMostWarps];  // a lane's
  Item item;
};

/// Tiles that hold what the entry sees within the step's range of keys.
__device__ inline int tiles_of_entry(const Step& step, int entry) {
  const plan::DecodeParams& p = step.params;
  const int tokens = static_cast<int>(p.tokens), batch = entry / tokens;
  Visible v;
  if (!find_visible(step, length_of(p, batch), batch, entry % tokens, v)) return 0;
  const TileRange range = tiles_within(v, p.key_begin, p.key_end);
  return range.end - range.begin;
}

/// Finds the number-th item; its `splits` is 0 if there are not so many. By all threads of a CTA, thread 0 of which
/// may use it at once.
__device__ __noinline__ void share_out(const Step& step, int number, ShareOut& shared) {
  const int heads = static_cast<int>(step.params.cache.layout.n_kv_heads), lanes = heads * step.parts;
  const int entries = static_cast<int>(step.workspace.groups) / heads;
  const int of_lane = number / lanes;  // counted over the entries
  const auto take = [&](int entry, int split, int splits) {
    const int lane = number % lanes;
    shared.item = {entry * heads + lane / step.parts, lane % step.parts, split, splits};
  };
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x), warps = threads / 32;
  const int lane = thread % 32, warp = thread / 32;
  if (step.splits > 0 || entries == 1) {
    const int splits = step.splits > 0 ? step.splits : 1 + step.spare;
    if (thread == 0) take(of_lane / splits, of_lane % splits, splits);
    return;
  }
  int64_t sum = 0;
  for (int entry = thread; entry < entries; entry += threads) sum += tiles_of_entry(step, entry);
  sum = warp_sum(sum);
  if (lane == 0) shared.tiles[warp] = sum;
  if (thread == 0) shared.item.splits = 0;
  __syncthreads();
  int64_t tiles = 0;
  for (int w = 0; w < warps; ++w) tiles += shared.tiles[w];
  int before = 0;  // items of a lane
  for (int first = 0; first < entries && before <= of_lane; first += threads) {
    const int entry = first + thread;
    int splits = 0;
    if (entry < entries) {
      const int own = tiles_of_entry(step, entry);
      splits = own == 0 ? 1 : min(own, 1 + static_cast<int>(int64_t{step.spare} * own / tiles));
    }
    int upto = splits;
    for (int s = 1; s < 32; s *= 2) {
      const int other = __shfl_up_sync(kWarp, upto, s);
      if (lane >= s) upto += other;
    }
    if (lane == 31) shared.items[warp] = upto;
    __syncthreads();
    int start = before + upto - splits;
    for (int w = 0; w < warps; ++w) {
      start += w < warp ? shared.items[w] : 0;
      before += shared.items[w];
    }
    if (start <= of_lane && of_lane < start + splits) take(entry, of_lane - start, splits);
    __syncthreads();
  }
}

}  // namespace fold::cuda
