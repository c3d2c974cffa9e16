#pragma once
#include <climits>

#include "cuda/decode/range_task.cuh"

// Which item each CTA of a step takes. Where requests may be long enough for it to matter, every CTA finds that out for
// itself from their lengths, before the references are declared. An entry (a token of a request) has an item for each
// of its lanes (a KV head and a part of its rows) and for each whole share of tiles that it has, one at least; a share
// is what a place gets if all have the same (Step::places: those on the device, or more where that fills its waves). So
// equal lengths are cut equally, and of unequal ones none keeps a CTA for more than two shares. CTAs beyond the last
// item have none. Sums are the same however they are cut.
namespace fold::cuda {

struct ShareOut {
  LocateShared locate;
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

/// Finds the number-th item. By all threads of a CTA, which meet before it is read. scratch: `room` integers; of more
/// entries each has one item a lane.
__device__ inline void share_out(const Step& step, int number, int* scratch, int room, ShareOut& shared) {
  const int heads = static_cast<int>(step.params.cache.layout.n_kv_heads), lanes = heads * step.parts;
  const int entries = static_cast<int>(step.workspace.groups) / heads;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  int splits = step.splits > 0 ? step.splits : entries > room ? 1 : 0, entry, of_entry;
  if (splits > 0) {
    entry = number / (lanes * splits);
    of_entry = number - entry * lanes * splits;
    if (entry >= entries) entry = -1;
  } else {
    const int most = INT_MAX / entries;  // so that sums fit
    unsigned own = 0, tiles = 0;
#pragma unroll 1
    for (int i = thread; i < entries; i += threads) {
      scratch[i] = min(tiles_of_entry(step, i), most);
      own += static_cast<unsigned>(scratch[i]);
    }
    exclusive_sum(own, tiles, shared.locate.scan);
    // Of a tile, and a little more, so that what is whole stays so when rounded down.
    const float shares =
        numerics::div(static_cast<float>(step.places) * (1 + 0x1p-18f), static_cast<float>(max(tiles, 1u)));
    const auto splits_of = [&](int i) {
      const int splits = min(scratch[i], static_cast<int>(static_cast<float>(scratch[i]) * shares));
      return max(1, splits_that_pay(step, scratch[i], splits));
    };
    const Located at = locate(
        static_cast<unsigned>(number), entries, [&](int i) { return static_cast<unsigned>(lanes * splits_of(i)); },
        shared.locate);
    entry = at.owner;
    of_entry = static_cast<int>(at.offset);
    splits = splits_of(max(entry, 0));
  }
  if (thread != 0) return;
  // A lane's items stand together: CTAs beside each other look at neighbouring keys.
  const int lane = of_entry / splits, head = step.parts == 1 ? lane : lane / step.parts;
  shared.item = {entry * heads + head, lane - head * step.parts, of_entry - lane * splits, entry < 0 ? 0 : splits};
}
/// The same where registers are short.
__device__ __noinline__ void share_out_apart(const Step& step, int number, int* scratch, int room, ShareOut& shared) {
  share_out(step, number, scratch, room, shared);
}

}  // namespace fold::cuda
