#pragma once
#include "cuda/decode/scan_warp.cuh"
#include "cuda/decode/value_warps.cuh"

// The sums of a range of tiles for groups of up to 12 rows, D = 64 or 128, without the tail model (docs/numerics.md,
// sections 6 and 7).
//
// Scan warps take tiles one by one: level 0 of every key from bulk copies of K's h plane. A key that some row asks to
// read further joins the warp's list; sixteen at a time are fetched and weighed while the next tiles are scanned. What
// is read of V goes through two queues, for the nibble planes and for plane b, to the value warps, which fetch and add.
// Nobody waits for another's tile, and no memory access is waited for that could have been sent for earlier. Up to four
// rows leave room for two CTAs a multiprocessor, so that one starts or ends while the other scans.
namespace fold::cuda {

/// Waits for what was declared of the group: fragments and constants of its queries, and sums of zero. Everything is
/// loaded at once, before it is known which rows are active. Scan warps and value warps come from different places,
/// which __syncthreads does not allow, nor synccheck a named barrier of a whole CTA.
template <int D, int Quads>
__device__ __noinline__ void load_queries(RangeTask& task, StreamShared<D, Quads>& shared) {
  using Shared = StreamShared<D, Quads>;
  join_task(task);
  const int r = static_cast<int>(threadIdx.x), last = task.rows - 1;
  RowState state{};
  if (r < Shared::kRows) state = task.g.rows[min(r, last)];
#pragma unroll 1
  for (int i = r; i < Quads * Shared::kFragments * 32; i += Shared::kThreads) {
    const int lane = i % 32, fragment = i / 32 % Shared::kFragments, t = i / 32 / Shared::kFragments;
    shared.fragment[t][fragment][lane] = fragment_of<D>(task.g, min(4 * t + lane / 8, last), fragment, lane);
  }
  const auto meet = [&](uint32_t parity) {
    __syncwarp();
    if (r % 32 == 0) ptx::arrive(ptx::shared_address(&shared.met));
    ptx::wait_barrier(ptx::shared_address(&shared.met), parity);
  };
  meet(0);  // it is known now
  if (r < Shared::kRows) {
    const bool active = r <= last && (task.active >> r & 1) != 0;
    if (!active) state = quiet_row();
    shared.row[r] = query_row(state);
    shared.den[r] = shared.mass[r] = shared.half_mass[r] = shared.dropped[r] = 0;
    shared.peak[r] = ordered(-INFINITY);
    if (active && !(state.gates.v_h >= 5.0f)) shared.loud = 1;  // else a weight that is dropped is below 2^21
    if (active && state.gates.v_h == numerics::kOpen) shared.every = ~0u;
  }
  meet(1);
}

template <int D, int Quads>
class StreamSummer {
 public:
  using Shared = StreamShared<D, Quads>;
  static constexpr int kThreads = Shared::kThreads, kCtas = Shared::kCtas;
  static constexpr bool kTail = false;
  static constexpr bool kStartsEarly = true;  ///< before the references are declared
  static constexpr bool kFillsWaves = false;  ///< more groups than fit at once are cut further for full waves

  __device__ StreamSummer(const Step& step, RangeTask& task, Shared& shared) : step_(step), task_(task), s_(shared) {}

  __device__ void run() {
    init();
    const int warp = __shfl_sync(kWarp, threadIdx.x / 32, 0);
    if (warp < Shared::kScanWarps) {
      ScanWarp<D, Quads> scan(step_, task_, s_, warp);
      scan.run([&] { load_queries<D, Quads>(task_, s_); });
      close_queues();
    } else {
      load_queries<D, Quads>(task_, s_);
      run_value_warp<D, Quads>(step_, task_, s_, warp - Shared::kScanWarps);
    }
    __syncthreads();
    publish();
  }

 private:
  static constexpr int kBarriers = Shared::kScanWarps * (kStages + 1);

  /// What has to be there before anything is sent for.
  __device__ void init() {
    if (threadIdx.x == 0) {
      s_.offsets = head_sections<D>(step_.params.cache, task_.kv_head);
      s_.scanning = Shared::kScanWarps;
      s_.loud = 0;
      s_.every = 0;
      s_.values = s_.bytes = 0;
    }
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x < kBarriers) ptx::init_barrier(ptx::shared_address(s_.barrier[0] + threadIdx.x), 32);
    if (threadIdx.x == kBarriers) ptx::init_barrier(ptx::shared_address(&s_.met), kThreads / 32);
    if (warp == kBarriers / 32 + 1) s_.nibbles.init(lane, kMembers);
    if (warp == kBarriers / 32 + 2) s_.bytes_of_v.init(lane, kMembers);
    __syncthreads();
  }

  /// The last scan warp's.
  __device__ void close_queues() {
    const int lane = threadIdx.x % 32;
    int others = 0;
    __syncwarp();
    if (lane == 0) {
      __threadfence_block();
      others = atomicSub(&s_.scanning, 1) - 1;
      __threadfence_block();
    }
    __syncwarp();  // every lane sees what the other warps did
    if (__shfl_sync(kWarp, others, 0) != 0) return;
    s_.nibbles.close(lane);
    s_.bytes_of_v.close(lane);
  }

  /// Adds the CTA's sums to the group's.
  __device__ void publish() {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < task_.rows * D; i += kThreads) {
      const int r = i / D;
      add_numerator(task_, r, i, s_.num[0][r][i % D] + s_.num[1][r][i % D], s_.mass[r], s_.half_mass[r]);
    }
    if (const int r = static_cast<int>(threadIdx.x); r < task_.rows) {
      add_row_sums(task_, r, {s_.den[r], s_.mass[r], s_.dropped[r], s_.values, s_.peak[r]});
    }
    if (threadIdx.x == 0) ptx::add_global(&task_.g.head->bytes, s_.bytes);
    if (!step_.again) return;
    // Another item may follow, whose first tiles arrive in the place of the numerators.
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x < kBarriers) ptx::invalidate_barrier(ptx::shared_address(s_.barrier[0] + threadIdx.x));
    if (threadIdx.x == kBarriers) ptx::invalidate_barrier(ptx::shared_address(&s_.met));
    if (warp == kBarriers / 32 + 1) s_.nibbles.invalidate(lane);
    if (warp == kBarriers / 32 + 2) s_.bytes_of_v.invalidate(lane);
    __syncthreads();
  }

  const Step& step_;
  RangeTask& task_;
  Shared& s_;
};

}  // namespace fold::cuda
