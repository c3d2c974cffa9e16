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

/// The lane's words 2 pair and 2 pair + 1 of levels 1 and 2's query fragments, of rows 4 t ..
template <int D, int Quads>
__device__ void load_fragment(uint64_t active, const GroupState& g, StreamShared<D, Quads>& shared, int t, int pair,
                              int lane) {
  const int c = lane % 4, row = 4 * t + lane / 8;
  const bool low_plane = lane / 4 % 2 != 0;
  uint4 level_1{}, level_2{};
  if ((active >> row & 1) != 0) {
    const auto word = [&](const int8_t* plane, int at) {
      return reinterpret_cast<const uint32_t*>(plane + row * D)[at];
    };
    const int at = c * (D / 32) + 2 * pair;
    const int8_t *const split = low_plane ? g.b_split : g.a_split, *const whole = low_plane ? g.b : g.a;
    level_1 = {word(split, at), word(split, D / 8 + at), word(split, at + 1), word(split, D / 8 + at + 1)};
    level_2 = {word(whole, 2 * at), word(whole, 2 * at + 1), word(whole, 2 * at + 2), word(whole, 2 * at + 3)};
  }
  shared.level_1[t][pair][lane] = level_1;
  shared.level_2[t][pair][lane] = level_2;
}

/// The lane's words of level 0's: of even channels, then of odd ones; even words in even columns.
template <int D>
__device__ uint4 level_0_fragment(uint64_t active, const GroupState& g, int t, int lane) {
  const int row = 4 * t + lane / 8;
  if ((active >> row & 1) == 0) return {};
  const auto* const split = reinterpret_cast<const uint32_t*>(g.a_split + row * D);
  const int at = lane % 4 * (D / 32) + lane / 4 % 2, second = D == 128 ? at + 2 : at;
  return {split[at], split[second], split[D / 8 + at], split[D / 8 + second]};
}

/// Constants and fragments of the queries, and sums of zero.
template <int D, int Quads>
__device__ __noinline__ void load_queries(const RangeTask& task, StreamShared<D, Quads>& shared) {
  constexpr int kRows = 4 * Quads, kPairs = D / 64;
  for (int r = threadIdx.x; r < kRows; r += StreamShared<D, Quads>::kThreads) {
    const bool active = (task.active >> r & 1) != 0;
    const RowState state = active ? task.g.rows[r] : RowState{.z = INFINITY};
    shared.row[r] = {.sum_a = static_cast<float>(state.sum_a),
                     .unit_0 = unit_of_level(state.e_q, 0),
                     .neg_z = -state.z,
                     .margin = state.margin,
                     .k_l = state.gates.k_l,
                     .k_b = state.gates.k_b,
                     .v_h = state.gates.v_h,
                     .v_l = state.gates.v_l,
                     .v_b = state.gates.v_b,
                     .e_q = state.e_q,
                     .unit_1 = unit_of_level(state.e_q, 1),
                     .margin_16 = numerics::mul(state.margin, 0x1p-4f),
                     .per_e = numerics::pow2(-state.e_exponent),
                     .first_sum = kRoundMagic - 120 * state.sum_a,
                     .sum_128 = 128 * state.sum,
                     .sum_255 = 255 * state.sum_a};
    shared.den[r] = shared.mass[r] = shared.half_mass[r] = shared.dropped[r] = 0;
    shared.peak[r] = ordered(-INFINITY);
    if (active && !(state.gates.v_h >= 5.0f)) shared.loud = 1;  // else a weight that is dropped is below 2^21
  }
  for (int i = threadIdx.x; i < Quads * 32; i += StreamShared<D, Quads>::kThreads) {
    shared.level_0[i / 32][i % 32] = level_0_fragment<D>(task.active, task.g, i / 32, i % 32);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < Quads * kPairs * 32; i += StreamShared<D, Quads>::kThreads) {
    load_fragment(task.active, task.g, shared, i / (kPairs * 32), i / 32 % kPairs, i % 32);
  }
  __syncthreads();
}

template <int D, int Quads>
class StreamSummer {
 public:
  using Shared = StreamShared<D, Quads>;
  static constexpr int kThreads = Shared::kThreads, kCtas = Shared::kCtas;
  static constexpr bool kTakesTiles = true;
  static constexpr int kWarps = Shared::kScanWarps;  ///< that take tiles

  __device__ StreamSummer(const Step& step, const RangeTask& task, Shared& shared)
      : step_(step), task_(task), s_(shared), warp_(__shfl_sync(kWarp, threadIdx.x / 32, 0)) {}

  /// Returns how many tiles it has summed, to thread 0.
  __device__ unsigned run() {
    init();
    if (warp_ < Shared::kScanWarps) {
      ScanWarp<D, Quads> scan(step_, task_, s_, warp_);
      scan.start();
      load_queries<D, Quads>(task_, s_);
      scan.run();
      close_queues();
    } else {
      load_queries<D, Quads>(task_, s_);
      run_value_warp<D, Quads>(step_, task_, s_, warp_ - Shared::kScanWarps);
    }
    __syncthreads();
    publish();
    return s_.done;
  }

 private:
  /// What has to be there before anything is sent for.
  __device__ void init() {
    if (threadIdx.x == 0) {
      const PageSections& from = step_.params.cache.sections;
      const int page_size = static_cast<int>(step_.params.cache.layout.page_size);
      const int row = task_.kv_head * page_size, block = row / kTile;
      const auto offset = [](int64_t section, int before) { return static_cast<int>(section) + before; };
      s_.offsets = {.k_h = offset(from.k_h, row * D / 2),
                    .k_l = offset(from.k_l, row * D / 2),
                    .k_b = offset(from.k_b, row * D),
                    .k_scale = offset(from.k_scale, 2 * row),
                    .v_h = offset(from.v_h, row * D / 2),
                    .v_l = offset(from.v_l, row * D / 2),
                    .v_b = offset(from.v_b, row * D),
                    .v_scale = offset(from.v_scale, 2 * row),
                    .bound = offset(from.bound, 2 * block)};
      s_.tiles_of_page = page_size / kTile;
      s_.per_page =
          (0x80000000u + static_cast<unsigned>(s_.tiles_of_page) - 1) / static_cast<unsigned>(s_.tiles_of_page);
      s_.scanning = Shared::kScanWarps;
      s_.loud = 0;
      s_.done = 0;
      s_.values = s_.bytes = 0;
      s_.nibbles.init(kMembers);
      s_.bytes_of_v.init(kMembers);
      for (auto& of_warp : s_.barrier) {
        for (uint64_t& barrier : of_warp) ptx::init_barrier(ptx::shared_address(&barrier));
      }
      ptx::fence_barrier_init();
    }
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

  /// Adds the CTA's sums to the group's. What the nibbles' products left out is made up for: their bytes are 128 above
  /// the values, and those of plane h alone half below.
  __device__ void publish() {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < task_.rows * D; i += kThreads) {
      const int r = i / D;
      const unsigned long long sum =
          s_.num[0][r][i % D] + s_.num[1][r][i % D] + (s_.half_mass[r] << 7) - (s_.mass[r] << 15);
      if ((task_.active >> r & 1) != 0 && sum != 0) atomicAdd(&task_.g.num[i], sum << 8);
    }
    if (const int r = static_cast<int>(threadIdx.x); r < task_.rows) {
      add_row_sums(task_, r, {s_.den[r], s_.mass[r], s_.dropped[r], s_.values, s_.peak[r]});
    }
    if (threadIdx.x == 0) {
      atomicAdd(&task_.g.head->bytes, s_.bytes);
      s_.nibbles.invalidate();
      s_.bytes_of_v.invalidate();
      for (auto& of_warp : s_.barrier) {
        for (uint64_t& barrier : of_warp) ptx::invalidate_barrier(ptx::shared_address(&barrier));
      }
    }
    ptx::fence_async();  // the next visit's first tiles arrive in the place of the numerators
    __syncthreads();
  }

  const Step& step_;
  const RangeTask& task_;
  Shared& s_;
  const int warp_;
};

}  // namespace fold::cuda
