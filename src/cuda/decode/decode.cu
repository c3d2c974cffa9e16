#include <algorithm>

#include "cuda/decode/decode.h"
#include "cuda/decode/finish.cuh"
#include "cuda/decode/sum_any.cuh"
#include "cuda/decode/sum_narrow.cuh"
#include "cuda/decode/sum_stream.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/ptx/launch_order.cuh"

namespace fold::cuda {
namespace {

/// How the rows of a group are summed: up to 4, 8 or 12 at a time by StreamSummer, or with the tail model up to 4 or 8
/// by NarrowSummer; any number (Quads = 0) by RangeSummer.
template <int D, int Quads, bool Tail>
struct Summing {
  using Shared = StreamShared<D, Quads>;
  using Summer = StreamSummer<D, Quads>;
};
template <int D, int Quads>
struct Summing<D, Quads, true> {
  using Shared = NarrowShared<D, Quads>;
  using Summer = NarrowSummer<D, Quads>;
};
template <int D>
struct Summing<D, 0, true> {
  using Shared = SumShared<D>;
  using Summer = RangeSummer<D>;
};

// A group's sums are made by whoever comes. Its work is handed out in units: tiles, if the summer takes those, or
// ranges of tiles of a part of the rows.

/// How many a run of a group has.
template <class Summer>
__device__ unsigned units_of(const Step& step, const TileRange& tiles, bool again) {
  if constexpr (Summer::kTakesTiles) {
    return static_cast<unsigned>(tiles.end - tiles.begin);
  } else {
    return static_cast<unsigned>(step.parts * (again ? step.rerun_splits : step.splits));
  }
}

/// Takes work of a group, described by `task`. units: of those taken, such without a tile; else 0. False: there is
/// nothing left. One thread.
template <class Summer>
__device__ bool take(const Step& step, int index, RangeTask& task, unsigned& units) {
  const plan::DecodeParams& p = step.params;
  task.g = step.workspace.group(index);
  GroupHead& head = *task.g.head;
  const TileRange tiles = head.tiles;
  task.chunk = 1;
  unsigned wanted = 1;
  if constexpr (Summer::kTakesTiles) {
    // A few chunks a warp, so that all end together.
    const int each = (tiles.end - tiles.begin) / (step.splits * Summer::kWarps * 6);
    task.chunk = max(1, min(each, kMaxChunk));
    wanted = static_cast<unsigned>(task.chunk * Summer::kWarps);
  }
  const unsigned taken = atomicAdd(&head.taken, wanted), first = taken & kTakenMask;
  const bool again = taken >> kRunShift != 0;
  if (first >= units_of<Summer>(step, tiles, again)) return false;
  __threadfence();  // what led to the run is seen
  atomicAdd(&head.workers, 1u);
  const int kv_heads = static_cast<int>(p.cache.layout.n_kv_heads), token = index / kv_heads;
  task.visible = head.visible;
  task.batch = token / static_cast<int>(p.tokens);
  task.kv_head = index % kv_heads;
  task.rows = step.workspace.rows;
  task.row_begin = 0;
  task.row_end = task.rows;
  task.active = *const_cast<volatile uint64_t*>(&head.active);
  task.fit_mark = head.fit_mark;
  task.typical = head.typical;
  task.outliers = head.outliers;
  task.first_tile = tiles.begin;
  units = 0;
  if constexpr (Summer::kTakesTiles) {
    task.tiles = {tiles.begin + static_cast<int>(first), tiles.end};
  } else {
    const int splits = again ? step.rerun_splits : step.splits, part = static_cast<int>(first) / splits,
              split = static_cast<int>(first) % splits;
    const int each = (tiles.end - tiles.begin) / splits, more = (tiles.end - tiles.begin) % splits;
    const int begin = tiles.begin + each * split + min(split, more);
    task.tiles = {begin, begin + each + (split < more)};
    task.row_begin = task.rows * part / step.parts;
    task.row_end = task.rows * (part + 1) / step.parts;
    if (task.tiles.begin == task.tiles.end) units = 1;
  }
  return true;
}

/// A CTA's visit to a group, in shared memory, as registers are scarce.
struct Visit {
  int group;          // -1: none
  bool first;         // nobody was sent there before
  bool helps;         // all groups have had their visits
  bool searches;      // there may be one that needs help
  unsigned reopened;  // WorkQueue's at the last search
  bool some, last;    // whether there is something to do, whether nothing is left afterwards
  unsigned units;
  uint64_t again;  // rows
};

/// Works on a group until nothing of it is left to take. The CTA that adds its last sums finishes it, or has it run
/// again.
template <int D, class Summer, class Shared>
__device__ void work_on(const Step& step, Visit& visit, RangeTask& task, Shared& shared) {
  if (threadIdx.x == 0) {
    const GroupHead& head = *step.workspace.group(visit.group).head;
    visit.some = visit.last = false;
    if (head.seen == 0) {
      if (visit.first) atomicAdd(&step.workspace.queue()->finished, 1u);
    } else if (units_of<Summer>(step, head.tiles, false) == 0) {  // nothing is summed
      visit.last = visit.first;
    } else {
      visit.some = take<Summer>(step, visit.group, task, visit.units);
    }
  }
  __syncthreads();
  if (visit.some) {
    if (visit.units == 0) {
      const unsigned units = Summer(step, task, shared).run();
      if (threadIdx.x == 0) visit.units = units;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      GroupHead& head = *task.g.head;
      const bool again = head.run > 0;  // not over before these units are in
      visit.last = atomicAdd(&head.done, visit.units) + visit.units == units_of<Summer>(step, head.tiles, again);
      __threadfence();
    }
    __syncthreads();
  }
  if (!visit.last) return;
  const bool again = finish_group<D>(step, visit.group, visit.again);
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (again) {
    GroupHead& head = *step.workspace.group(visit.group).head;
    atomicExch(&head.taken, static_cast<unsigned>(head.run) << kRunShift);
    __threadfence();  // who sees the number sees that there is work
    atomicAdd(&step.workspace.queue()->reopened, 1u);
  } else {
    atomicAdd(&step.workspace.queue()->finished, 1u);
  }
}

/// The group of which most is left for each CTA that works on it, if it is worth coming. chosen: -1 before. By all
/// threads.
template <class Summer>
__device__ void find_group(const Step& step, int& chosen) {
  __shared__ unsigned most;
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  unsigned best = 0;
  int group = -1;
  for (int i = threadIdx.x; i < step.workspace.groups; i += blockDim.x) {
    const GroupHead& head = *step.workspace.group(i).head;
    if (head.seen == 0) continue;
    const unsigned taken = *const_cast<volatile const unsigned*>(&head.taken);
    const unsigned all = units_of<Summer>(step, head.tiles, taken >> kRunShift != 0),
                   gone = min(taken & kTakenMask, all);
    unsigned left = all - gone;
    if constexpr (Summer::kTakesTiles) {
      if (gone > 0 && left < 4 * Summer::kWarps) left = 0;  // over before a CTA has started
    }
    const unsigned each =
        left == 0 ? 0 : max(1u, 16 * left / (1 + *const_cast<volatile const unsigned*>(&head.workers)));
    if (each > best) {
      best = each;
      group = i;
    }
  }
  if (best > 0) atomicMax(&most, best);
  __syncthreads();
  if (best > 0 && best == most) atomicMax(&chosen, group);
}

/// Where to go next, or where to search. False: nothing is left to do. One thread.
template <class Summer>
__device__ bool next_visit(const Step& step, Visit& visit) {
  WorkQueue& queue = *step.workspace.queue();
  if (!visit.helps) {  // every group has its number of visits first
    const auto per_group = static_cast<unsigned>(Summer::kTakesTiles ? step.splits : step.splits * step.parts);
    const unsigned n = atomicAdd(&queue.visits, 1u);
    visit.first = n % per_group == 0;
    visit.helps = visit.searches = n / per_group >= step.workspace.groups;
    visit.group = visit.helps ? -1 : static_cast<int>(n / per_group);
    if (!visit.helps) return true;
    visit.first = false;
  } else if (visit.group >= 0) {
    visit.searches = true;
  } else if (step.params.numerator != nullptr) {
    return false;  // partial sums never run again
  } else {
    // What was not worth helping is not later, unless it runs again.
    visit.searches = *const_cast<volatile unsigned*>(&queue.reopened) != visit.reopened;
    if (!visit.searches) {
      if (*const_cast<volatile unsigned*>(&queue.finished) >= step.workspace.groups) return false;
      __nanosleep(200);
    }
  }
  visit.group = -1;
  if (visit.searches) {
    visit.reopened = *const_cast<volatile unsigned*>(&queue.reopened);
    __threadfence();
  }
  return true;
}

/// Whole groups, by as many CTAs as there may be. Whoever has no visit to make helps where it can. Waiting CTAs wait
/// for running ones only, since work belongs to whoever took it: no CTA has to be resident for others to get on.
template <int D, class Summing>
__global__ __launch_bounds__(Summing::Summer::kThreads,
                             Summing::Summer::kCtas) void step_kernel(const __grid_constant__ Step step) {
  using Summer = typename Summing::Summer;
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Summing::Shared*>(shared_bytes);
  __shared__ RangeTask task;
  __shared__ Visit visit;
  __shared__ bool more;
  if (threadIdx.x == 0) visit.helps = false;
  while (true) {
    if (threadIdx.x == 0) more = next_visit<Summer>(step, visit);
    __syncthreads();
    if (!more) return;
    if (visit.helps && visit.searches) find_group<Summer>(step, visit.group);
    __syncthreads();
    if (visit.group >= 0) work_on<D, Summer>(step, visit, task, shared);
    __syncthreads();
  }
}

constexpr int kPrepareThreads = 2 * kScoredKeys;

/// Before step_kernel: one CTA a group.
template <int D>
__global__ __launch_bounds__(kPrepareThreads) void prepare_kernel(const __grid_constant__ Step step) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  const int index = static_cast<int>(blockIdx.x);
  clear_group(step, index);
  const bool seen = prepare_group<D>(step, index, *reinterpret_cast<PrepareShared<D>*>(shared_bytes));
  if (!seen) write_unseen<D>(step, index);
  if (threadIdx.x == 0) step.workspace.group(index).head->seen = seen;
}

constexpr int kMostSplits = 64;
constexpr int kRerunSplits = 128;  ///< few groups run again: cut fine, they keep the whole device busy
static_assert(kMaxRows * int64_t{std::max(kMostSplits, kRerunSplits)} < kTakenMask);

template <int D, int Quads, bool Tail>
void launch_step(Step step, int multiprocessors, cudaStream_t stream) {
  using How = Summing<D, Quads, Tail>;
  using Summer = typename How::Summer;
  constexpr size_t kShared = sizeof(typename How::Shared);
  // Beside it the kernel's own variables and what CUDA keeps for itself.
  static_assert(Summer::kCtas * (kShared + 512 + 1024) <= 228 * 1024, "shared memory of a Hopper multiprocessor");
  const int64_t groups = step.workspace.groups, ctas = int64_t{multiprocessors} * Summer::kCtas;
  step.splits = step.params.splits > 0
                    ? std::min(step.params.splits, kMostSplits)
                    : static_cast<int>(std::clamp<int64_t>(ctas / (groups * step.parts), 1, kMostSplits));
  launch_kernel(prepare_kernel<D>, {groups, kPrepareThreads, sizeof(PrepareShared<D>), true}, stream, "decode, prepare",
                step);
  launch_kernel(step_kernel<D, How>, {ctas, Summer::kThreads, kShared, true}, stream, "decode", step);
}

template <int D>
void launch_for_rows(const Step& step, int multiprocessors, cudaStream_t stream) {
  const int rows = step.workspace.rows;
  if constexpr (D <= 128) {
    if (step.params.cache.layout.tail) {
      if (rows <= 4) return launch_step<D, 1, true>(step, multiprocessors, stream);
      if (rows <= 8) return launch_step<D, 2, true>(step, multiprocessors, stream);
    } else {
      if (rows <= 4) return launch_step<D, 1, false>(step, multiprocessors, stream);
      if (rows <= 8) return launch_step<D, 2, false>(step, multiprocessors, stream);
      if (rows <= 12) return launch_step<D, 3, false>(step, multiprocessors, stream);
    }
  }
  launch_step<D, 0, true>(step, multiprocessors, stream);
}

Workspace workspace_of(const plan::DecodeParams& p, void* base) {
  const int rows = static_cast<int>(p.heads / p.cache.layout.n_kv_heads);
  const int head_dim = static_cast<int>(p.cache.layout.head_dim);
  return {static_cast<uint8_t*>(base), p.batch * p.tokens * p.cache.layout.n_kv_heads,
          Workspace::bytes_of_group(rows, head_dim), rows, head_dim};
}

}  // namespace

int64_t decode_workspace(const plan::DecodeParams& params) { return workspace_of(params, nullptr).bytes(); }

void decode(const plan::DecodeParams& params, const plan::DecodeBounds& bounds, void* workspace, cudaStream_t stream) {
  Step step{.params = params,
            .gates = {},
            .workspace = workspace_of(params, workspace),
            .splits = 1,
            .rerun_splits = 1,
            .parts = 1,
            .max_pages = bounds.max_pages};
  if (step.workspace.groups == 0) return;
  if (params.gates != nullptr) {
    step.gates = {params.gates[0], params.gates[1], params.gates[2], params.gates[3], params.gates[4]};
  }
  const int multiprocessors = cuda::multiprocessors();
  step.parts = (step.workspace.rows + kPartRows - 1) / kPartRows;
  step.rerun_splits = kRerunSplits;
  switch (step.workspace.head_dim) {
    case 64:
      return launch_for_rows<64>(step, multiprocessors, stream);
    case 128:
      return launch_for_rows<128>(step, multiprocessors, stream);
    default:
      return launch_for_rows<256>(step, multiprocessors, stream);
  }
}

}  // namespace fold::cuda
