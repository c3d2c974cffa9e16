#include <algorithm>

#include "cuda/decode/decode.h"
#include "cuda/decode/finish.cuh"
#include "cuda/decode/sum_any.cuh"
#include "cuda/decode/sum_narrow.cuh"
#include "cuda/decode/sum_stream.cuh"
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

/// The tiles of one of `splits` ranges of a group.
__device__ TileRange share(const Visible& visible, const plan::DecodeParams& p, int split, int splits) {
  const TileRange range = tiles_within(visible, p.key_begin, p.key_end);
  const int tiles = range.end - range.begin, each = tiles / splits, more = tiles % splits;
  const int begin = range.begin + each * split + min(split, more);
  return {begin, begin + each + (split < more)};
}

/// What a CTA does at a time: the sums of a range of tiles and of rows of a group.
struct Item {
  int index;        // of the group
  int part, split;  // of how many rows and tiles
  bool again;
};

/// False: the token sees no key, or keys past the table.
__device__ bool start_task(const Step& step, const Item& item, RangeTask& task) {
  const plan::DecodeParams& p = step.params;
  const int kv_heads = static_cast<int>(p.cache.layout.n_kv_heads), token = item.index / kv_heads;
  task.g = step.workspace.group(item.index);
  const GroupHead& head = *task.g.head;
  if (head.seen == 0) return false;
  task.visible = head.visible;
  task.batch = token / static_cast<int>(p.tokens);
  task.token = token % static_cast<int>(p.tokens);
  task.kv_head = item.index % kv_heads;
  task.rows = step.workspace.rows;
  task.row_begin = step.workspace.rows * item.part / step.parts;
  task.row_end = step.workspace.rows * (item.part + 1) / step.parts;
  task.active = head.active;
  task.fit_mark = head.fit_mark;
  task.typical = head.typical;
  task.outliers = head.outliers;
  task.tiles = share(task.visible, p, item.split, item.again ? step.rerun_splits : step.splits);
  return true;
}

/// Puts a group into the queue of those that run again.
__device__ void enqueue(const Step& step, int index) {
  const unsigned at = atomicAdd(&step.workspace.queue()->entries, 1u);
  atomicExch(&step.workspace.queue_entries()[at], index);
}

/// Sums an item; the CTA that adds a group's last sums finishes it.
template <int D, class Summer, class Shared>
__device__ void run_item(const Step& step, const Item& item, RangeTask& task, Shared& shared) {
  __shared__ unsigned arrived;
  __shared__ uint64_t rows_again;
  __shared__ bool seen;
  if (threadIdx.x == 0) seen = start_task(step, item, task);
  __syncthreads();
  if (!seen) {
    const bool first = item.part == 0 && item.split == 0;
    if (first && threadIdx.x == 0) atomicAdd(&step.workspace.queue()->finished, 1u);
    return;
  }
  if (task.tiles.begin < task.tiles.end && task.active != 0) Summer(step, task, shared).run();
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    arrived = atomicAdd(&task.g.head->arrivals, 1u);
    __threadfence();
  }
  __syncthreads();
  if (static_cast<int>(arrived) + 1 != step.parts * (item.again ? step.rerun_splits : step.splits)) return;
  const bool again = finish_group<D>(step, item.index, rows_again);
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (again) {
    enqueue(step, item.index);
  } else {
    atomicAdd(&step.workspace.queue()->finished, 1u);
  }
}

/// The next item, if there is one before every group is finished. Waiting CTAs wait for running
/// ones only, since an item belongs to whoever took it: no CTA has to be resident for others to get on.
__device__ bool take_item(const Step& step, Item& item) {
  WorkQueue& queue = *step.workspace.queue();
  const int64_t items = step.workspace.groups * step.parts * step.splits;
  const auto nth = [&](unsigned n, int group, unsigned splits, bool again) {
    item = {group, static_cast<int>(n / splits) % step.parts, static_cast<int>(n % splits), again};
  };
  const auto per_first = static_cast<unsigned>(step.parts * step.splits);
  if (const unsigned n = atomicAdd(&queue.items, 1u); n < items) {
    nth(n, static_cast<int>(n / per_first), step.splits, false);
    return true;
  }
  if (step.params.numerator != nullptr) return false;  // partial sums never run again
  const unsigned ticket = atomicAdd(&queue.reruns, 1u);
  const auto per_group = static_cast<unsigned>(step.parts * step.rerun_splits);
  const int64_t entry = ticket / per_group;
  volatile unsigned* const finished = &queue.finished;
  volatile int* const entries = step.workspace.queue_entries();
  while (*finished < step.workspace.groups) {
    const int group = entry < step.workspace.groups * Workspace::kQueueEntries ? entries[entry] : -1;
    if (group >= 0) {
      nth(ticket % per_group, group, step.rerun_splits, true);
      __threadfence();  // what led to it is seen
      return true;
    }
    __nanosleep(100);
  }
  return false;
}

/// Whole groups, by as many CTAs as there may be.
template <int D, class Summing>
__global__ __launch_bounds__(Summing::Summer::kThreads,
                             Summing::Summer::kCtas) void step_kernel(const __grid_constant__ Step step) {
  using Summer = typename Summing::Summer;
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Summing::Shared*>(shared_bytes);
  __shared__ RangeTask task;
  __shared__ Item item;
  __shared__ bool more;
  while (true) {
    if (threadIdx.x == 0) more = take_item(step, item);
    __syncthreads();
    if (!more) return;
    run_item<D, Summer>(step, item, task, shared);
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

constexpr int kRerunSplits = 128;  ///< few groups run again: cut fine, they keep the whole device busy

template <int D, int Quads, bool Tail>
void launch_step(Step step, int multiprocessors, cudaStream_t stream) {
  using How = Summing<D, Quads, Tail>;
  using Summer = typename How::Summer;
  constexpr size_t kShared = sizeof(typename How::Shared);
  // Beside it the kernel's own variables and what CUDA keeps for itself.
  static_assert(Summer::kCtas * (kShared + 512 + 1024) <= 228 * 1024, "shared memory of a Hopper multiprocessor");
  const int64_t groups = step.workspace.groups, ctas = int64_t{multiprocessors} * Summer::kCtas;
  step.splits = step.params.splits > 0 ? step.params.splits
                                       : static_cast<int>(std::clamp<int64_t>(ctas / (groups * step.parts), 1, 64));
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
