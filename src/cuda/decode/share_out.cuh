#pragma once
#include "cuda/decode/range_task.cuh"

// Which item each CTA of a step takes. Where requests may be long enough for it to matter, every CTA finds that out for
// itself from their lengths, before the references are declared. An entry (a token of a request) has an item for each
// of its lanes (a KV head and a part of its rows) and for each whole share of tiles that it has, one at least; a share
// is what a place on the device gets if all have the same. So equal lengths are cut equally, and of unequal ones none
// keeps a CTA for more than two shares. CTAs beyond the last item have none. Sums are the same however they are cut.
namespace fold::cuda {

constexpr int kMostWarps = 16;  ///< of a CTA

struct ShareOut {
  float tiles[kMostWarps];
  int items[kMostWarps];
  Item item;  // its `splits` is 0 if there is none
};

/// Tiles that hold what the entry sees within the step's range of keys.
__device__ inline int tiles_of_entry(const Step& step, int entry) {
  const plan::DecodeParams& p = step.params;
  const int tokens = static_cast<int>(p.tokens), batch = entry / tokens;
  Visible v;
  if (!find_visible(step, length_of(p, batch), batch, entry - batch * tokens, v)) return 0;
  const TileRange range = tiles_within(v, p.key_begin, p.key_end);
  return range.end - range.begin;
}

/// Sums over the warps before the thread's, and over all. sums: (warps,) shared memory, written here.
template <typename T>
struct BlockSum {
  T before, all;
};
template <typename T>
__device__ BlockSum<T> sum_of_warps(T upto_lane, T* sums) {
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  if (threadIdx.x % 32 == 31) sums[warp] = upto_lane;
  __syncthreads();
  BlockSum<T> sum{0, 0};
#pragma unroll 1
  for (int w = 0; w < warps; ++w) {
    if (w == warp) sum.before = sum.all;
    sum.all += sums[w];
  }
  return sum;
}
template <typename T>
__device__ T sum_up_to_lane(T value) {
  for (int s = 1; s < 32; s *= 2) {
    const T other = __shfl_up_sync(kWarp, value, s);
    if (static_cast<int>(threadIdx.x) % 32 >= s) value += other;
  }
  return value;
}

/// Finds the number-th item. By all threads of a CTA, which meet before it is read. scratch: `room` integers; of more
/// entries each has one item a lane.
__device__ inline void share_out(const Step& step, int number, int* scratch, int room, ShareOut& shared) {
  const int heads = static_cast<int>(step.params.cache.layout.n_kv_heads), lanes = heads * step.parts;
  const int entries = static_cast<int>(step.workspace.groups) / heads;
  // A lane's items stand together: CTAs beside each other look at neighbouring keys.
  const auto take = [&](int entry, int of_entry, int splits) {
    const int lane = of_entry / splits, head = step.parts == 1 ? lane : lane / step.parts;
    shared.item = {entry * heads + head, lane - head * step.parts, of_entry - lane * splits, splits};
  };
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int fixed = step.splits > 0 ? step.splits : entries > room ? 1 : 0;
  if (thread == 0) shared.item.splits = 0;
  if (fixed > 0) {
    const int entry = number / (lanes * fixed);
    if (thread == 0 && entry < entries) take(entry, number - entry * lanes * fixed, fixed);
    return;
  }
  float sum = 0;  // the same in every CTA, as the order is
#pragma unroll 1
  for (int entry = thread; entry < entries; entry += threads) {
    const int tiles = tiles_of_entry(step, entry);
    scratch[entry] = tiles;
    sum += static_cast<float>(tiles);
  }
  const float tiles = sum_of_warps(sum_up_to_lane(sum), shared.tiles).all;
  // Of a tile, and a little more, so that what is whole stays so when rounded down; the whole places' sum, too.
  const float shares = numerics::div(static_cast<float>(step.places) * (1 + 0x1p-18f), tiles);
  const auto splits_of = [&](int entry) {
    const int own = scratch[entry];
    return max(1, min(own, static_cast<int>(static_cast<float>(own) * shares)));
  };
  const int each = (entries + threads - 1) / threads, first = min(thread * each, entries),
            last = min(first + each, entries);
  int own = 0;
#pragma unroll 1
  for (int entry = first; entry < last; ++entry) own += lanes * splits_of(entry);
  const int upto = sum_up_to_lane(own);
  int start = sum_of_warps(upto, shared.items).before + upto - own;
  if (number < start || number >= start + own) return;
#pragma unroll 1
  for (int entry = first;; ++entry) {
    const int splits = splits_of(entry);
    if (number < start + lanes * splits) return take(entry, number - start, splits);
    start += lanes * splits;
  }
}
/// The same where registers are short.
__device__ __noinline__ void share_out_apart(const Step& step, int number, int* scratch, int room, ShareOut& shared) {
  share_out(step, number, scratch, room, shared);
}

}  // namespace fold::cuda
