#include <algorithm>
#include <bit>
#include <type_traits>

#include "cuda/cache/append.cuh"
#include "cuda/cache/blocks.cuh"
#include "cuda/cache/cache_write.h"
#include "cuda/cache/tail_fit.cuh"
#include "cuda/cache/tokens.cuh"
#include "cuda/launch.h"

namespace fold::cuda {
namespace {

using namespace cache;

/// Keys that a row of the block table has pages for.
int64_t room_of(const plan::CacheWriteParams& p, const plan::CacheWriteBounds& bounds) {
  return std::min<int64_t>(bounds.max_pages * p.cache.layout.page_size, std::numeric_limits<int32_t>::max());
}

/// Requests that can bring tokens.
int64_t active_requests(const plan::CacheWriteParams& p, const plan::CacheWriteBounds& bounds) {
  return std::min(p.batch, bounds.tokens);
}

/// Most blocks that a call can touch: a request with n tokens touches at most (n + 126) / 64, and at most n.
int64_t max_blocks(const plan::CacheWriteParams& p, const plan::CacheWriteBounds& bounds) {
  return std::min(bounds.tokens, (bounds.tokens + (2 * kTile - 2) * active_requests(p, bounds)) / kTile);
}

/// Four in each octave of keys.
int64_t marks_up_to(int64_t keys) {
  const int64_t last = plan::last_mark(keys);
  if (last == 0) return 0;
  const int octave = std::bit_width(static_cast<uint64_t>(last)) - 1,
            first = std::bit_width(uint64_t{numerics::kFirstMark}) - 1;
  return 4 * (octave - first) + (last >> (octave - 2)) - 3;
}

/// Most fits that a call can ask for. Marks are at least kFitSlotKeys apart.
int64_t max_fits(const plan::CacheWriteParams& p, const plan::CacheWriteBounds& bounds) {
  if (!p.cache.layout.tail) return 0;
  const int64_t requests = active_requests(p, bounds), marks = marks_up_to(room_of(p, bounds));
  return p.cache.layout.n_kv_heads * std::min(requests * marks, bounds.tokens / numerics::kFitSlotKeys + requests);
}

constexpr int kBlocksOfFit = 16;  ///< more thread blocks are not worth it, if as many fits are reached as can be

/// Thread blocks that compute fits. Each needs a slot in the workspace, hence fewer of the largest ones.
int64_t fit_blocks(const plan::CacheWriteParams& p, const plan::CacheWriteBounds& bounds) {
  return std::min<int64_t>(p.cache.layout.head_dim == 256 ? kMaxFitBlocks / 2 : kMaxFitBlocks,
                           max_fits(p, bounds) * kBlocksOfFit);
}

int64_t fit_slots(const plan::CacheWriteParams& p, const plan::CacheWriteBounds& bounds) {
  const int64_t blocks = fit_blocks(p, bounds);
  if (p.cache.layout.head_dim == 256) return blocks;
  return std::min<int64_t>(kMaxFitSlots, std::max(blocks, 2 * max_fits(p, bounds)));
}

int64_t fit_slot_bytes(int64_t head_dim) {
  return head_dim == 64 ? sizeof(FitSlot<64>) : head_dim == 128 ? sizeof(FitSlot<128>) : sizeof(FitSlot<256>);
}

/// Where the workspace's parts start, in bytes.
struct WorkspaceParts {
  /// listed: whether tokens are listed that are no padding.
  WorkspaceParts(const plan::CacheWriteParams& p, const plan::CacheWriteBounds& bounds, bool listed) {
    counters = place(kFitCounters * sizeof(uint32_t));
    counts = place(listed ? p.batch * sizeof(int32_t) : 0);
    token_of = place(listed ? bounds.tokens * sizeof(int32_t) : 0);
    slots = place(fit_slots(p, bounds) * fit_slot_bytes(p.cache.layout.head_dim));
  }

  int64_t place(int64_t bytes) {
    const int64_t start = end;
    end += (bytes + 255) / 256 * 256;
    return start;
  }

  int64_t end = 0;
  int64_t counters, counts, token_of, slots;
};

template <int D>
void launch_fits(const Write& w, const plan::CacheWriteBounds& bounds, void* slots, cudaStream_t stream) {
  const int64_t blocks = fit_blocks(w.params, bounds);
  if (blocks == 0) return;
  launch_kernel(fit_tails<D>, {blocks, kFitThreads, sizeof(FitShared<D>), true}, stream, "the tail's fits", w,
                static_cast<FitSlot<D>*>(slots), static_cast<int>(fit_slots(w.params, bounds)));
}

template <int D>
void launch_write(Write& w, const plan::CacheWriteBounds& bounds, void* slots, cudaStream_t stream) {
  const int64_t heads = w.params.cache.layout.n_kv_heads, touched = max_blocks(w.params, bounds);
  const int64_t four_waves = 4 * multiprocessors() * BlockShape<D>::kResident;
  const int64_t shares = std::clamp<int64_t>(four_waves / touched, 1, heads);
  w.head_step = static_cast<int>((heads + shares - 1) / shares);
  const int64_t blocks = touched * ((heads + w.head_step - 1) / w.head_step);
  launch_kernel(write_blocks<D>, {blocks, BlockShape<D>::kThreads, sizeof(BlockShared<D>), true}, stream,
                "rows and blocks", w);
  launch_fits<D>(w, bounds, slots, stream);
}

template <int D>
void launch_append(const Append& a, const plan::CacheWriteBounds& bounds, void* slots, cudaStream_t stream) {
  const int64_t blocks = a.write.params.batch * a.blocks * a.write.params.cache.layout.n_kv_heads;
  launch_kernel(append_rows<D>, {blocks, BlockShape<D>::kThreads, sizeof(AppendShared<D>), true}, stream,
                "a step's rows and blocks", a);
  launch_fits<D>(a.write, bounds, slots, stream);
}

/// Calls launch with the head dim as a constant.
template <typename Launch>
void for_head_dim(int64_t head_dim, const Launch& launch) {
  switch (head_dim) {
    case 64:
      return launch(std::integral_constant<int, 64>());
    case 128:
      return launch(std::integral_constant<int, 128>());
    default:
      return launch(std::integral_constant<int, 256>());
  }
}

plan::CacheWriteBounds bounds_of(const plan::StepParams& p) {
  return {.tokens = p.write.batch * p.tokens, .max_pages = p.max_pages};
}

}  // namespace

int64_t cache_write_workspace(const plan::CacheWriteParams& params, const plan::CacheWriteBounds& bounds) {
  return WorkspaceParts(params, bounds, params.slot_mapping != nullptr).end;
}

void cache_write(const plan::CacheWriteParams& params, const plan::CacheWriteBounds& bounds, void* workspace,
                 cudaStream_t stream) {
  if (bounds.tokens == 0 || params.batch == 0 || bounds.max_pages == 0 || params.cache.num_pages == 0) return;
  const WorkspaceParts parts(params, bounds, params.slot_mapping != nullptr);
  const auto at = [workspace](int64_t offset) { return static_cast<uint8_t*>(workspace) + offset; };
  Write w{.params = params,
          .tokens = static_cast<int32_t>(bounds.tokens),
          .room = room_of(params, bounds),
          .head_step = 1,
          .token_of = nullptr,
          .counts = nullptr,
          .counters = reinterpret_cast<uint32_t*>(at(parts.counters))};
  if (params.slot_mapping != nullptr) {
    w.token_of = reinterpret_cast<int32_t*>(at(parts.token_of));
    w.counts = reinterpret_cast<int32_t*>(at(parts.counts));
    launch_kernel(list_tokens, {params.batch, kTokenThreads, 0, true}, stream, "the list of real tokens", w);
  }
  for_head_dim(params.cache.layout.head_dim, [&](auto d) { launch_write<d()>(w, bounds, at(parts.slots), stream); });
}

int64_t step_write_workspace(const plan::StepParams& params) {
  return WorkspaceParts(params.write, bounds_of(params), false).end;
}

void step_write(const plan::StepParams& params, void* workspace, cudaStream_t stream) {
  const plan::CacheWriteBounds bounds = bounds_of(params);
  if (bounds.tokens == 0) return;
  const WorkspaceParts parts(params.write, bounds, false);
  const auto at = [workspace](int64_t offset) { return static_cast<uint8_t*>(workspace) + offset; };
  const Append a{.write = {.params = params.write,
                           .tokens = static_cast<int32_t>(bounds.tokens),
                           .room = room_of(params.write, bounds),
                           .head_step = 1,
                           .token_of = nullptr,
                           .counts = params.token_counts,
                           .counters = reinterpret_cast<uint32_t*>(at(parts.counters))},
                 .bringing = bringing_of(params),
                 .lengths = params.lengths,
                 .blocks = static_cast<int>((params.tokens + 2 * kTile - 2) / kTile)};
  for_head_dim(params.write.cache.layout.head_dim,
               [&](auto d) { launch_append<d()>(a, bounds, at(parts.slots), stream); });
}

}  // namespace fold::cuda
