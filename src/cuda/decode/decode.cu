#include <algorithm>
#include <type_traits>

#include "cuda/decode/decode.h"
#include "cuda/decode/finish.cuh"
#include "cuda/decode/share_out.cuh"
#include "cuda/decode/sum_any.cuh"
#include "cuda/decode/sum_dense.cuh"
#include "cuda/decode/sum_narrow.cuh"
#include "cuda/decode/sum_stream.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/ptx/launch_order.cuh"

namespace fold::cuda {
namespace {

/// An item's sums are in; the CTA that adds a group's last ones finishes it.
template <int D, bool Tail>
__device__ void end_item(const Step& step, const Item& item, RangeTask& task) {
  __shared__ bool last;
  __shared__ uint64_t rows_again;
  __syncthreads();
  if (threadIdx.x == 0) {
    const auto items = static_cast<unsigned>(step.parts * task.splits);
    last = items == 1;
    if (!last) {  // else what is to be seen is the CTA's own
      __threadfence();
      last = atomicAdd(&task.g.head->arrivals, 1u) + 1 == items;
      __threadfence();
    }
    rows_again = 0;
  }
  __syncthreads();
  if (!last) return;
  bool again;
  if constexpr (Tail) {
    again = finish_group_apart<D, Tail>(step, task, rows_again);
  } else {  // whose parameters are then constants
    again = finish_group<D, Tail>(step, task, rows_again);
  }
  __syncthreads();
  if (threadIdx.x != 0 || (!again && task.run == 0)) return;
  __threadfence();
  WorkQueue& queue = *step.workspace.queue();
  if (task.run == 0) atomicAdd(&queue.open, 1u);
  if (again) {
    atomicExch(&step.workspace.queue_entries()[atomicAdd(&queue.entries, 1u)], item.group);
  } else {
    atomicSub(&queue.open, 1u);
  }
}

/// Sums an item. What prepare_kernel wrote is there from join_task() on.
template <int D, class Summer>
__device__ void run_item(const Step& step, const Item& item, RangeTask& task, typename Summer::Shared& shared) {
  __shared__ bool sees;
  if (threadIdx.x == 0) sees = start_task(step, item, task);
  __syncthreads();
  if (!sees) return ptx::wait_for_earlier_kernels();
  if (!Summer::kStartsEarly || task.tiles.begin == task.tiles.end) {
    join_task(task);
    __syncthreads();
  }
  if (task.tiles.begin < task.tiles.end && (Summer::kStartsEarly || task.active != 0)) {
    Summer(step, task, shared).run();
  }
  if (task.seen != 0) end_item<D, Summer::kTail>(step, item, task);
}

/// The next item of a group that runs again, if there is one before all of those are finished. Waiting CTAs wait for
/// running ones only, since an item belongs to whoever took it: no CTA has to be resident for others to get on.
__device__ bool take_item(const Step& step, Item& item) {
  WorkQueue& queue = *step.workspace.queue();
  const volatile unsigned* const open = &queue.open;
  if (*open == 0) return false;
  const unsigned n = atomicAdd(&queue.items, 1u);
  const auto per_group = static_cast<unsigned>(step.parts * step.splits);
  const volatile int* const entries = step.workspace.queue_entries();
  const int64_t entry = n / per_group;
  while (*open != 0) {
    const int group = entry < step.workspace.groups * Workspace::kReruns ? entries[entry] : -1;
    if (group >= 0) {
      const int of_group = static_cast<int>(n % per_group);
      item = {group, of_group / step.splits, of_group % step.splits, step.splits};
      __threadfence();  // what led to it is seen
      return true;
    }
    __nanosleep(100);
  }
  return false;
}

/// All items, a CTA each (if there are more CTAs, the rest end); launched once more, what is to be summed again, by as
/// many CTAs as there may be. The first starts beside prepare_kernel, which lets it do so when all that came before has
/// finished: lengths, the block table and the keys are there.
template <int D, class Summer>
__global__ __launch_bounds__(Summer::kThreads, Summer::kCtas) void step_kernel(const __grid_constant__ Step step) {
  ptx::let_next_kernel_start();
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Summer::Shared*>(shared_bytes);
  __shared__ RangeTask task;
  __shared__ ShareOut given;
  __shared__ bool more;
  if (step.again) {
    ptx::wait_for_earlier_kernels();
  } else {
    const auto number = static_cast<int>(blockIdx.x);
    auto* const scratch = reinterpret_cast<int*>(shared_bytes);
    constexpr int kRoom = sizeof(shared) / sizeof(int);
    if constexpr (Summer::kTail) {
      share_out_apart(step, number, scratch, kRoom, given);
    } else {
      share_out(step, number, scratch, kRoom, given);
    }
    ptx::fence_async();  // the copy engine may write where the scratch was
  }
  while (true) {
    if (threadIdx.x == 0) more = step.again ? take_item(step, given.item) : given.item.splits > 0;
    __syncthreads();
    if (!more) return ptx::wait_for_earlier_kernels();
    run_item<D, Summer>(step, given.item, task, shared);
    if (!step.again) return;
    __syncthreads();
  }
}

/// Before step_kernel: one CTA a group. Whatever came before has finished once it lets the next kernel start.
template <int D, int Warps>
__global__ __launch_bounds__(32 * Warps, 24 / Warps) void prepare_kernel(const __grid_constant__ Step step) {
  if (!step.appends) {
    ptx::wait_for_earlier_kernels();
    ptx::let_next_kernel_start();
  }
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  const int index = static_cast<int>(blockIdx.x);
  clear_group(step, index);
  if (prepare_group(step, index, *reinterpret_cast<PrepareShared<D, Warps>*>(shared_bytes))) return;
  ptx::wait_for_earlier_kernels();
  if (threadIdx.x == 0) step.workspace.group(index).head->seen = 0;
  write_unseen<D>(step, index);
}

constexpr int kMostSplits = 64;
constexpr int kShort = 64;  ///< tiles of a range: what even the longest request may have is not worth sharing out
constexpr int kFine = 8;    ///< ranges of a group from which on one more or less makes little difference
constexpr int kRerunSplits = 128;  ///< few groups run again: cut fine, they keep the whole device busy

/// A range of fewer tiles is not worth its start and end where groups are cut to fill waves.
constexpr int kLeast = 8;

/// Into how many ranges to cut each of so many entries, of as many tiles as they may have, where there is no place for
/// two ranges of each: for the last of several waves not to be nearly empty.
int64_t ranges_for_waves(int64_t places, int64_t entries, int64_t tiles) {
  constexpr double kStart = 5;  // what an item costs beside its tiles, in tiles; the estimate is rough
  const auto time = [&](int64_t cut) {
    const int64_t waves = (entries * cut + places - 1) / places;
    return static_cast<double>(waves) * (static_cast<double>(tiles) / static_cast<double>(cut) + kStart);
  };
  int64_t best = 1;
  for (int64_t cut = 2; cut <= 4; ++cut) {
    if (time(cut) < time(best)) best = cut;
  }
  return best;
}

template <int D, class Summer>
void launch_step(Step step, int multiprocessors, cudaStream_t stream) {
  constexpr size_t kShared = sizeof(typename Summer::Shared);
  // Beside it the kernel's own variables and what CUDA keeps for itself.
  static_assert(Summer::kCtas * (kShared + 512 + 1024) <= 228 * 1024, "shared memory of a Hopper multiprocessor");
  const int64_t groups = step.workspace.groups, ctas = int64_t{multiprocessors} * Summer::kCtas;
  const auto tiles = std::max<int64_t>(step.max_pages * step.params.cache.layout.page_size / kTile, 1);
  const auto splits = [&](int64_t wanted, int most) {
    return static_cast<int>(std::clamp<int64_t>(wanted, 1, std::min<int64_t>(most, tiles)));
  };
  const int64_t lanes = step.params.cache.layout.n_kv_heads * step.parts, entries = groups * step.parts / lanes;
  // Where prepare_kernel's CTAs stand others start when those are done: too late, if a group is cut fine.
  const bool fine = (ctas - groups) / (entries * lanes) >= kFine;
  const int64_t places = std::max<int64_t>((fine ? ctas - groups : ctas) / lanes, 1);
  const int fitting = splits(places / entries, kMostSplits);
  const bool all_short = entries == 1 || tiles <= int64_t{kShort} * fitting;
  const bool waves = Summer::kFillsWaves && fitting == 1 && step.params.splits == 0;
  const int equal = waves ? splits(ranges_for_waves(places, entries, tiles), kMostSplits) : fitting;
  step.places = static_cast<int>(std::max(places, equal * entries));
  step.least = waves ? kLeast : 1;
  step.splits = step.params.splits > 0 ? splits(step.params.splits, kMostSplits) : all_short ? equal : 0;
  const int64_t items = entries * step.splits + (step.splits > 0 ? 0 : entries + step.places);
  const auto prepare = [&](auto warps) {
    constexpr int kWarps = warps();
    launch_kernel(prepare_kernel<D, kWarps>, {groups, 32 * kWarps, sizeof(PrepareShared<D, kWarps>), true}, stream,
                  "decode, prepare", step);
  };
  // A group is done sooner by more warps, more groups than then fit at once by fewer (which would have too few
  // registers for head dim 256).
  if (D == 256 || groups <= 2 * int64_t{multiprocessors}) {
    prepare(std::integral_constant<int, 12>());
  } else if constexpr (D != 256) {
    prepare(std::integral_constant<int, 4>());
  }
  launch_kernel(step_kernel<D, Summer>, {items * lanes, Summer::kThreads, kShared, true}, stream, "decode", step);
  if (step.params.numerator != nullptr) return;  // partial sums never run again
  step.again = true;
  step.least = 1;
  step.splits = splits(kRerunSplits, kRerunSplits);
  launch_kernel(step_kernel<D, Summer>, {ctas, Summer::kThreads, kShared, true}, stream, "decode, second runs", step);
}

constexpr int64_t kShortKeys = 2560;  ///< a request with room for no more has most of its values read
constexpr int64_t kManyGroups = 3;    ///< of such requests, a multiprocessor

/// By a Summer of 4, 8, 12 or 16 rows. False: there are more than `Most`.
template <int D, template <int, int> class Summer, int Most>
bool launch_few_rows(const Step& step, int multiprocessors, cudaStream_t stream) {
  const auto launch = [&](auto quads) {
    if constexpr (4 * quads() <= Most) launch_step<D, Summer<D, quads()>>(step, multiprocessors, stream);
    return 4 * quads() <= Most;
  };
  switch ((step.workspace.rows + 3) / 4) {
    case 1:
      return launch(std::integral_constant<int, 1>());
    case 2:
      return launch(std::integral_constant<int, 2>());
    case 3:
      return launch(std::integral_constant<int, 3>());
    case 4:
      return launch(std::integral_constant<int, 4>());
    default:
      return false;
  }
}

/// Up to 16 rows (head dim 256: 8) are summed by DenseSummer where every value is read, else by NarrowSummer where
/// there is a tail model, head dim 256, more than 12 rows, or many short requests, most of whose values are read, else
/// by StreamSummer; any number by RangeSummer.
template <int D>
void launch_for_rows(const Step& step, int multiprocessors, cudaStream_t stream) {
  constexpr int kMost = D == 256 ? 8 : 16;  // what registers and shared memory hold
  if (step.params.depth == nullptr && step.params.gates == nullptr) {
    if (launch_few_rows<D, DenseSummer, kMost>(step, multiprocessors, stream)) return;
  } else {
    if constexpr (D <= 128) {
      const CacheLayout& layout = step.params.cache.layout;
      const bool many_short =
          step.workspace.groups > kManyGroups * multiprocessors && step.max_pages * layout.page_size <= kShortKeys;
      if (!layout.tail && !many_short && launch_few_rows<D, StreamSummer, 12>(step, multiprocessors, stream)) return;
    }
    if (launch_few_rows<D, NarrowSummer, kMost>(step, multiprocessors, stream)) return;
  }
  launch_step<D, RangeSummer<D>>(step, multiprocessors, stream);
}

Workspace workspace_of(const plan::DecodeParams& p, void* base) {
  const int rows = static_cast<int>(p.heads / p.cache.layout.n_kv_heads);
  const int head_dim = static_cast<int>(p.cache.layout.head_dim);
  return {static_cast<uint8_t*>(base), p.batch * p.tokens * p.cache.layout.n_kv_heads,
          Workspace::bytes_of_group(rows, head_dim), rows, head_dim};
}

}  // namespace

int64_t decode_workspace(const plan::DecodeParams& params) { return workspace_of(params, nullptr).bytes(); }

void decode(const plan::DecodeParams& params, const plan::DecodeBounds& bounds, const plan::StepParams* written,
            void* workspace, cudaStream_t stream) {
  Step step{.params = params,
            .gates = {},
            .workspace = workspace_of(params, workspace),
            .splits = 0,
            .places = 0,
            .parts = 1,
            .least = 1,
            .again = false,
            .max_pages = bounds.max_pages,
            .tiles_of_page = static_cast<int>(params.cache.layout.page_size / kTile),
            .per_page = 0,
            .appends = written != nullptr,
            .bringing = {}};
  const auto tiles = static_cast<unsigned>(step.tiles_of_page);
  step.per_page = (0x80000000u + tiles - 1) / tiles;
  if (step.appends) step.bringing = cache::bringing_of(*written);
  if (step.workspace.groups == 0) return;
  if (params.gates != nullptr) {
    step.gates = {params.gates[0], params.gates[1], params.gates[2], params.gates[3], params.gates[4]};
  }
  const int multiprocessors = cuda::multiprocessors();
  step.parts = (step.workspace.rows + kPartRows - 1) / kPartRows;
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
