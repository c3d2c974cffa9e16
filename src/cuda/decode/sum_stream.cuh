#pragma once
#include "cuda/decode/scan_warp.cuh"
#include "cuda/decode/value_warps.cuh"

// The sums of a range of tiles for groups of up to 12 rows, D = 64 or 128, without the tail model (docs/numerics.md,
// sections 6 and 7).
//
// Scan warps take tiles one by one: level 0 of every key from bulk copies of K's h plane. A key that some row asks to
// read further joins the warp's list; sixteen at a time are fetched and weighed while the next tiles are scanned. What
// is read of V goes through two queues to the value warps, four for the nibble planes and four for plane b, which fetch
// and add. Nobody waits for another's tile, and no memory access is waited for that could have been sent for earlier.
namespace fold::cuda {

/// A group's rows, (G,), and their planes, (G, D).
struct Queries {
  const RowState* rows;
  const int8_t *a_split, *b_split, *a, *b;  // as in GroupState
};

/// The lane's `word` of every level's query fragments, of rows 4 t ..
template <int D, int Quads>
__device__ void load_fragment(uint64_t active, const Queries& g, StreamShared<D, Quads>& shared, int t, int word,
                              int lane) {
  const int c = lane % 4, row = 4 * t + lane / 8;
  const bool low_plane = lane / 4 % 2 != 0;
  uint2 level_0{}, level_1{}, level_2{};
  if ((active >> row & 1) != 0) {
    const auto word_of = [&](const int8_t* plane, int at) {
      return reinterpret_cast<const uint32_t*>(plane + row * D)[at];
    };
    const int at = c * (D / 32) + word;
    const int8_t *const split = low_plane ? g.b_split : g.a_split, *const whole = low_plane ? g.b : g.a;
    // Code pairs 16 u_even + u_odd times even channels, less what u_odd adds to that; u_odd times odd ones.
    level_0 = low_plane ? uint2{0, word_of(g.a_split, D / 8 + at)}
                        : uint2{word_of(g.a_split, at), __vneg4(word_of(g.a_split, at))};
    level_1 = {word_of(split, at), word_of(split, D / 8 + at)};
    level_2 = {word_of(whole, 2 * at), word_of(whole, 2 * at + 1)};
  }
  auto* const to_0 =
      reinterpret_cast<uint32_t*>(&shared.level_0[t][word / 2][lane]);  // whole words' two, odd ones' two
  to_0[word % 2] = level_0.x;
  to_0[2 + word % 2] = level_0.y;
  reinterpret_cast<uint2*>(&shared.level_1[t][word / 2][lane])[word % 2] = level_1;
  reinterpret_cast<uint2*>(&shared.level_2[t][word / 2][lane])[word % 2] = level_2;
}

/// Constants and fragments of the queries, and sums of zero.
template <int D, int Quads>
__device__ __noinline__ void load_queries(const RangeTask& task, const Queries queries,
                                          StreamShared<D, Quads>& shared) {
  constexpr int kRows = 4 * Quads, kWords = D / 32;
  for (int r = threadIdx.x; r < kRows; r += StreamShared<D, Quads>::kThreads) {
    const bool active = (task.active >> r & 1) != 0;
    const RowState state = active ? queries.rows[r] : RowState{.z = INFINITY};
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
#pragma unroll 1
  for (int i = threadIdx.x; i < Quads * kWords * 32; i += StreamShared<D, Quads>::kThreads) {
    load_fragment(task.active, queries, shared, i / (kWords * 32), i / 32 % kWords, i % 32);
  }
  __syncthreads();
}

template <int D, int Quads>
class StreamSummer {
 public:
  using Shared = StreamShared<D, Quads>;

  __device__ StreamSummer(const Step& step, const RangeTask& task, Shared& shared)
      : step_(step), task_(task), s_(shared), warp_(__shfl_sync(kWarp, threadIdx.x / 32, 0)) {}

  static constexpr bool kPrepares = true;  ///< each of its CTAs prepares the group
  static constexpr int kThreads = Shared::kThreads, kCtas = 1;
  using Prepared = PrepareShared<D, Shared::kRows>;
  /// Where the group's references are prepared between start() and run().
  __device__ static Prepared& prepare_space(Shared& shared) {
    static_assert(sizeof(Prepared) <= sizeof(shared.nibble_rows) + sizeof(shared.byte_rows));
    return *reinterpret_cast<Prepared*>(shared.nibble_rows);
  }

  /// Sends for the first tiles.
  __device__ void start() {
    init();
    if (warp_ < Shared::kScanWarps) ScanWarp<D, Quads>(step_, task_, s_, warp_).start();
  }

  /// In place of run(): what was sent for is not wanted.
  __device__ void abandon() {
    if (warp_ < Shared::kScanWarps) ScanWarp<D, Quads>(step_, task_, s_, warp_).abandon();
    __syncthreads();
    if (threadIdx.x == 0) invalidate();
    __syncthreads();
  }

  /// Once the task is complete. again: what was prepared has been corrected since.
  __device__ void run(bool again) {
    const bool scans = warp_ < Shared::kScanWarps;
    const GroupState& g = task_.g;
    const Prepared& prepared = prepare_space(s_);
    load_queries<D, Quads>(task_,
                           again ? Queries{g.rows, g.a_split, g.b_split, g.a, g.b}
                                 : Queries{prepared.rows, prepared.a_split, prepared.b_split, prepared.a, prepared.b},
                           s_);
    const int value_warp = warp_ - Shared::kScanWarps;
    if (scans) {
      ScanWarp<D, Quads>(step_, task_, s_, warp_).run();
      close_queues();
    } else if (value_warp < kValueWarps) {
      ValueWarps<D, Quads, Plane::kNibbles>(step_, task_, s_, value_warp).run();
    } else {
      ValueWarps<D, Quads, Plane::kBytes>(step_, task_, s_, value_warp - kValueWarps).run();
    }
    __syncthreads();
    publish();
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
      s_.next_tile = task_.tiles.begin;
      s_.scanning = Shared::kScanWarps;
      s_.loud = 0;
      s_.values = s_.bytes = 0;
      s_.nibbles.init(Shared::kMembers);
      s_.bytes_of_v.init(Shared::kMembers);
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
    s_.nibbles.close(lane, Shared::kTeams);
    s_.bytes_of_v.close(lane, Shared::kTeams);
  }

  __device__ void invalidate() {
    s_.nibbles.invalidate();
    s_.bytes_of_v.invalidate();
    for (auto& of_warp : s_.barrier) {
      for (uint64_t& barrier : of_warp) ptx::invalidate_barrier(ptx::shared_address(&barrier));
    }
  }

  /// Adds the CTA's sums to the group's, but for the numerators.
  __device__ void publish() {
    if (const int r = static_cast<int>(threadIdx.x); r < task_.rows) {
      add_row_sums(task_, r, {s_.den[r], s_.mass[r], s_.dropped[r], s_.values, s_.peak[r]});
    }
    if (threadIdx.x == 0) {
      atomicAdd(&task_.g.head->bytes, s_.bytes);
      invalidate();
    }
    __syncthreads();
  }

  const Step& step_;
  const RangeTask& task_;
  Shared& s_;
  const int warp_;
};

}  // namespace fold::cuda
