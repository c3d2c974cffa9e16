#include <algorithm>

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

/// Most fits that a call can ask for. Marks are at least kFitSlotKeys apart.
int64_t max_fits(const plan::CacheWriteParams& p, const plan::CacheWriteBounds& bounds) {
  if (!p.cache.layout.tail) return 0;
  const int64_t requests = active_requests(p, bounds), room = room_of(p, bounds);
  int64_t marks = 0;
  for (int64_t mark = plan::next_mark(0); mark <= room; mark = plan::next_mark(mark)) ++marks;
  return p.cache.layout.n_kv_heads * std::min(requests * marks, bounds.tokens / numerics::kFitSlotKeys + requests);
}

/// Thread blocks that compute fits. Each has a slot in the workspace, hence fewer of the largest ones.
int64_t fit_blocks(const plan::CacheWriteParams& p, const plan::CacheWriteBounds& bounds) {
  return std::min<int64_t>(p.cache.layout.head_dim == 256 ? kMaxFitBlocks / 2 : kMaxFitBlocks,
                           max_fits(p, bounds) * kMaxParts);
}

int64_t fit_slot_bytes(int64_t head_dim) {
  return head_dim == 64 ? sizeof(FitSlot<64>) : head_dim == 128 ? sizeof(FitSlot<128>) : sizeof(FitSlot<256>);
}

/// Where the workspace's parts start, in bytes.
struct WorkspaceParts {
  WorkspaceParts(const plan::CacheWriteParams& p, const plan::CacheWriteBounds& bounds) {
    const bool listed = p.slot_mapping != nullptr;
    arrivals = place(kMaxFitBlocks * sizeof(uint32_t));
    counts = place(listed ? p.batch * sizeof(int32_t) : 0);
    token_of = place(listed ? bounds.tokens * sizeof(int32_t) : 0);
    slots = place(fit_blocks(p, bounds) * fit_slot_bytes(p.cache.layout.head_dim));
  }

  int64_t place(int64_t bytes) {
    const int64_t start = end;
    end += (bytes + 255) / 256 * 256;
    return start;
  }

  int64_t end = 0;
  int64_t arrivals, counts, token_of, slots;
};

template <int D>
void launch_all(Write& w, const plan::CacheWriteBounds& bounds, void* slots, cudaStream_t stream) {
  const plan::CacheWriteParams& p = w.params;
  int device = 0, multiprocessors = 0;
  require_success(cudaGetDevice(&device), "the current device");
  require_success(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
                  "the device's multiprocessors");
  const int64_t heads = p.cache.layout.n_kv_heads, touched = max_blocks(p, bounds);
  const int64_t four_waves = 4 * multiprocessors * BlockShape<D>::kResident;
  const int64_t shares = std::clamp<int64_t>(four_waves / touched, 1, heads);
  w.head_step = static_cast<int>((heads + shares - 1) / shares);
  launch_kernel(write_blocks<D>,
                {touched * ((heads + w.head_step - 1) / w.head_step), BlockShape<D>::kThreads, sizeof(BlockShared<D>)},
                stream, "rows and blocks", w);
  if (const int64_t blocks = fit_blocks(p, bounds); blocks > 0) {
    launch_kernel(fit_tails<D>, {blocks, kFitThreads, sizeof(FitShared<D>)}, stream, "the tail's fits", w,
                  static_cast<FitSlot<D>*>(slots));
  }
}

}  // namespace

int64_t cache_write_workspace(const plan::CacheWriteParams& params, const plan::CacheWriteBounds& bounds) {
  return WorkspaceParts(params, bounds).end;
}

void cache_write(const plan::CacheWriteParams& params, const plan::CacheWriteBounds& bounds, void* workspace,
                 cudaStream_t stream) {
  if (bounds.tokens == 0 || params.batch == 0 || bounds.max_pages == 0 || params.cache.num_pages == 0) return;
  const WorkspaceParts parts(params, bounds);
  const auto at = [workspace](int64_t offset) { return static_cast<uint8_t*>(workspace) + offset; };
  Write w{.params = params,
          .tokens = static_cast<int32_t>(bounds.tokens),
          .room = room_of(params, bounds),
          .head_step = 1,
          .token_of = nullptr,
          .counts = nullptr,
          .arrivals = reinterpret_cast<uint32_t*>(at(parts.arrivals))};
  if (params.slot_mapping != nullptr) {
    w.token_of = reinterpret_cast<int32_t*>(at(parts.token_of));
    w.counts = reinterpret_cast<int32_t*>(at(parts.counts));
    launch_kernel(list_tokens, {params.batch, kTokenThreads, 0}, stream, "the list of real tokens", w);
  }
  switch (params.cache.layout.head_dim) {
    case 64:
      return launch_all<64>(w, bounds, at(parts.slots), stream);
    case 128:
      return launch_all<128>(w, bounds, at(parts.slots), stream);
    default:
      return launch_all<256>(w, bounds, at(parts.slots), stream);
  }
}

}  // namespace fold::cuda
