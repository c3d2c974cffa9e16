#include <algorithm>

#include "cuda/decode/decode.h"
#include "cuda/decode/finish.cuh"
#include "cuda/decode/sum_any.cuh"
#include "cuda/decode/sum_narrow.cuh"
#include "cuda/launch.h"
#include "cuda/ptx/launch_order.cuh"

namespace fold::cuda {
namespace {

/// How the rows of a group are summed (kCtas on a multiprocessor at least, which takes kRanges ranges at first): four
/// or eight at a time by NarrowSummer, any number (Quads = 0) by RangeSummer.
template <int D, int Quads>
struct Summing {
  using Shared = NarrowShared<D, Quads>;
  using Summer = NarrowSummer<D, Quads>;
  static constexpr int kThreads = kNarrowThreads, kCtas = Quads == 1 ? 4 : 3, kRanges = kCtas;
  // Beside each the kernel's own variables and what CUDA keeps for itself.
  static_assert(kCtas * (sizeof(Shared) + 256 + 1024) <= 228 * 1024, "shared memory of a Hopper multiprocessor");
};
template <int D>
struct Summing<D, 0> {
  using Shared = SumShared<D>;
  using Summer = RangeSummer<D>;
  static constexpr int kThreads = kSumThreads, kCtas = 1, kRanges = 3;
};

/// The tiles of one of `splits` ranges of a group.
__device__ TileRange share(const Visible& visible, const plan::DecodeParams& p, int split, int splits) {
  const TileRange range = tiles_within(visible, p.key_begin, p.key_end);
  const int64_t tiles = range.end - range.begin;
  return {range.begin + static_cast<int>(tiles * split / splits),
          range.begin + static_cast<int>(tiles * (split + 1) / splits)};
}

enum class Outcome { kOthersWork, kFinished, kRunsAgain };

/// The sums of one item (a range of tiles and of rows of a group, counted over all groups); the CTA that adds a group's
/// last ones finishes it. Sets task.
template <int D, int Quads>
__device__ Outcome run_item(const Step& step, int taken, int splits, RangeTask& task,
                            typename Summing<D, Quads>::Shared& shared) {
  __shared__ unsigned arrived;
  __shared__ uint64_t again;
  if (threadIdx.x == 0) {
    const int items = splits * step.parts, index = taken / items, item = taken % items;
    const GroupState g = step.workspace.group(index);
    const int kv_heads = static_cast<int>(step.params.cache.layout.n_kv_heads), part = item / splits;
    task = {.g = g,
            .visible = g.head->visible,
            .active = g.head->active,
            .index = index,
            .batch = index / kv_heads / static_cast<int>(step.params.tokens),
            .kv_head = index % kv_heads,
            .rows = step.workspace.rows,
            .fit_mark = g.head->fit_mark,
            .typical = g.head->typical,
            .row_begin = step.workspace.rows * part / step.parts,
            .row_end = step.workspace.rows * (part + 1) / step.parts,
            .tiles = share(g.head->visible, step.params, item % splits, splits)};
    if (g.head->seen == 0) task.rows = 0;
  }
  __syncthreads();
  if (task.rows == 0) return Outcome::kFinished;
  if (task.tiles.begin < task.tiles.end && task.active != 0) {
    typename Summing<D, Quads>::Summer(step, task, shared).run();
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicAdd(&task.g.head->arrivals, 1u);
  __syncthreads();
  if (arrived + 1 != static_cast<unsigned>(splits * step.parts)) return Outcome::kOthersWork;
  __threadfence();
  return finish_group<D>(step, task.index, again) ? Outcome::kRunsAgain : Outcome::kFinished;
}

/// Puts a group into the queue of those that run again.
__device__ void enqueue(const Step& step, int index) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x != 0) return;
  const unsigned at = atomicAdd(&step.workspace.queue()->tail, 1u);
  atomicExch(&step.workspace.queue_entries()[at], index);
}

/// The next item of the groups that run again, or -1 once every one is finished. Waiting CTAs wait for running ones
/// only: an item belongs to whoever took it, so no CTA has to be resident for others to get on.
__device__ int take_item(const Step& step, int items) {
  RerunQueue& queue = *step.workspace.queue();
  volatile unsigned* const open = &queue.open;
  if (*open == 0) return -1;
  const unsigned ticket = atomicAdd(&queue.head, 1u);
  const int64_t entry = ticket / items;
  volatile int* const entries = step.workspace.queue_entries();
  while (entry < step.workspace.groups * Workspace::kQueueEntries && *open != 0) {
    const int group = entries[entry];
    if (group >= 0) return group * items + static_cast<int>(ticket) % items;
    __nanosleep(200);
  }
  return -1;
}

/// again = false: one item a CTA, of every group. Then again = true, any grid: the items of the groups that run again.
template <int D, int Quads>
__global__ __launch_bounds__(Summing<D, Quads>::kThreads,
                             Summing<D, Quads>::kCtas) void sum_kernel(const __grid_constant__ Step step,
                                                                       const bool again) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Summing<D, Quads>::Shared*>(shared_bytes);
  __shared__ int taken;
#pragma unroll 1
  do {
    if (threadIdx.x == 0) {
      taken = again ? take_item(step, step.rerun_splits * step.parts) : static_cast<int>(blockIdx.x);
      __threadfence();
    }
    __syncthreads();
    if (taken < 0) return;
    __shared__ RangeTask task;
    const Outcome outcome = run_item<D, Quads>(step, taken, again ? step.rerun_splits : step.splits, task, shared);
    unsigned* const open = &step.workspace.queue()->open;
    if (outcome == Outcome::kRunsAgain) {
      if (!again && threadIdx.x == 0) atomicAdd(open, 1u);
      enqueue(step, task.index);
    }
    __threadfence();
    __syncthreads();
    if (again && outcome == Outcome::kFinished && threadIdx.x == 0) atomicSub(open, 1u);
  } while (again);
}

constexpr int kRerunSplits = 128;  ///< few groups run again: cut fine, they keep the whole device busy

template <int D, int Quads>
void launch_step(Step step, int multiprocessors, cudaStream_t stream) {
  using How = Summing<D, Quads>;
  constexpr size_t kShared = sizeof(typename How::Shared);
  const int64_t wanted = How::kRanges * int64_t{multiprocessors} / (step.workspace.groups * step.parts);
  step.splits = step.params.splits > 0 ? step.params.splits : static_cast<int>(std::clamp<int64_t>(wanted, 1, 64));
  const int64_t items = step.workspace.groups * step.splits * step.parts;
  const bool few = step.workspace.groups <= multiprocessors;
  const int prepare_threads = few ? kMostPrepareThreads : kPrepareThreads;
  launch_kernel(prepare_kernel<D>, {step.workspace.groups, prepare_threads, sizeof(PrepareShared<D>), true}, stream,
                "decode, prepare", step);
  launch_kernel(sum_kernel<D, Quads>, {items, How::kThreads, kShared, true}, stream, "decode, sums", step, false);
  if (step.params.numerator != nullptr) return;
  launch_kernel(sum_kernel<D, Quads>, {int64_t{multiprocessors} * How::kCtas, How::kThreads, kShared, true}, stream,
                "decode, second runs", step, true);
}

template <int D>
void launch_for_rows(const Step& step, int multiprocessors, cudaStream_t stream) {
  if constexpr (D <= 128) {
    if (step.workspace.rows <= 4) return launch_step<D, 1>(step, multiprocessors, stream);
    if (step.workspace.rows <= 8) return launch_step<D, 2>(step, multiprocessors, stream);
  }
  launch_step<D, 0>(step, multiprocessors, stream);
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
  int device = 0, multiprocessors = 0;
  require_success(cudaGetDevice(&device), "decode");
  require_success(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "decode");
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
