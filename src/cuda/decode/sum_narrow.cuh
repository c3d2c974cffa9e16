#pragma once
#include "cuda/decode/narrow_keys.cuh"
#include "cuda/decode/narrow_values.cuh"
#include "cuda/decode/narrow_weights.cuh"

// The sums of a range of tiles for groups of up to 16 rows (D = 256: 8), with the tail model or without
// (docs/numerics.md, sections 6 and 7).
//
// A CTA of four (or eight) warps takes a chunk of as many tiles at a time. Each warp scores a tile alone: level 0 of
// every key from a bulk copy of K's h plane, the deeper levels of those that ask from gathered rows, then every weight;
// it sends for the V rows that are read. Then all warps add the chunk's values, each for its share of the channels:
// what is weighted lies in shared memory with keys as rows, and a transposed load makes keys the products' inner
// dimension. A tile's mean row stands in for its dropped keys as one more V row.
//
// Weights are summed byte by byte: byte j of a row's weight is a column of the product whose sum counts 2^(8 j).
namespace fold::cuda {

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::run() {
  start();
  bool more = true;
  while (more) {
    score();
    __syncthreads();  // what was scored is in shared memory
    add_codes();
    ptx::wait_copies();
    store_mean(0);
    __syncthreads();  // the V rows are there, K's tiles are free
    if (lane_ == 0) w_.before = w_.place.spot;
    send<false>();
    add_mean_codes();
    int rounds = 0;
#pragma unroll
    for (const Warp& warp : s_.warp) rounds = max(rounds, warp.rounds);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      if (round > 0) {
        __syncthreads();
        gather_values(w_.before, round);
        ptx::wait_copies();
        store_mean(round);
        __syncthreads();
      }
      add_values(round);
    }
    more = w_.place.chunk < task_.tiles.end;
    if (!more || (w_.place.chunk - task_.tiles.begin) % kFlushTiles == 0) flush();
  }
  end();
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::start() {
  const uint32_t barrier = ptx::shared_address(&w_.barrier);
  if (lane_ == 0) {
    ptx::init_barrier(barrier);
    ptx::fence_barrier_init();
  }
  if (threadIdx.x == 0) {
    s_.offsets = head_sections<D>(p_.cache, task_.kv_head);
    s_.loud = 0;
    s_.every = 0;
  }
  if (lane_ == 0) w_.place.chunk = task_.tiles.begin - kChunkTiles;
  if (const int tile = task_.tiles.begin + warp_; lane_ == 0 && tile < task_.tiles.end) {
    const int page_size = static_cast<int>(layout_.page_size), key = tile * kTile;
    w_.place.next_slot = key % page_size;
    w_.place.next_index = key / page_size;
    w_.place.next_page = __ldcg(page_entry(key / page_size));
  }
  __syncthreads();
  send<true>();
  join_task(task_);
  __syncthreads();
  const GroupState& g = task_.g;
  for (int r = threadIdx.x; r < kRows; r += kThreads) {
    typename Shared::Row& row = s_.row[r];
    const bool active = (task_.active >> r & 1) != 0;
    const RowState state = active ? g.rows[r] : quiet_row();
    row = {.sum_a = static_cast<float>(state.sum_a),
           .unit_0 = unit_of_level(state.e_q, 0),
           .neg_z = -state.z,
           .margin = state.margin,
           .k_l = state.gates.k_l,
           .e_q = state.e_q,
           .unit_1 = unit_of_level(state.e_q, 1),
           .margin_16 = numerics::mul(state.margin, 0x1p-4f),
           .k_b = state.gates.k_b,
           .v_h = state.gates.v_h,
           .v_l = state.gates.v_l,
           .v_b = state.gates.v_b,
           .per_e = numerics::pow2(-state.e_exponent),
           .first_sum = kRoundMagic - 120 * state.sum_a,
           .sum_128 = 128 * state.sum,
           .fit_shift = state.fit_shift};
    if (active && !(state.gates.v_h >= 1.0f)) s_.loud = 1;
    if (active && state.gates.v_h == numerics::kOpen) s_.every = ~0u;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < Quads * kWords * 32; i += kThreads) {
    const int t = i / (kWords * 32), w = i / 32 % kWords, lane = i % 32;
    const int row = 4 * t + lane / 8, c = lane % 4, low_plane = lane / 4 % 2;
    uint2 scan{};
    if ((task_.active >> row & 1) != 0) {
      const auto* a = reinterpret_cast<const uint32_t*>(g.a_split + row * D);
      const int word = c * kWords + w;
      // Level 0: code pairs 16 u_even + u_odd times even channels, less what u_odd adds to that; u_odd times odd
      // ones.
      scan = low_plane ? uint2{0, a[D / 8 + word]} : uint2{a[word], __vneg4(a[word])};
    }
    auto* const pairs = reinterpret_cast<uint32_t*>(&s_.scan[t][w / 2][lane]);  // whole words' two, odd ones' two
    pairs[w % 2] = scan.x;
    pairs[2 + w % 2] = scan.y;
  }
  clear_accumulators();
  __syncthreads();
}

template <int D, int Quads>
template <bool Early>
__device__ void NarrowSummer<D, Quads>::send() {
  Place& place = w_.place;
  const int chunk = place.chunk + kChunkTiles, tile = chunk + warp_, tile_end = task_.tiles.end;
  if (tile >= tile_end) {
    __syncwarp();  // every lane has what stood there
    if (lane_ == 0) {
      place.chunk = chunk;
      place.tile = kNoTile;
    }
    __syncwarp();
    return;
  }
  const uint8_t* const page =
      p_.cache.pages + in_pool_or_any(p_.cache, static_cast<unsigned>(place.next_page)) * p_.cache.page_stride;
  const int slot = place.next_slot, page_size = static_cast<int>(layout_.page_size);
  int next_slot = slot + kChunkTiles * kTile, next_index = place.next_index;
  while (next_slot >= page_size) {
    next_slot -= page_size;
    ++next_index;
  }
  const bool settled = task_.visible.settled(tile);
  __syncwarp();  // every lane has what stood there
  if (lane_ == 0) {
    place.spot = {page, slot};
    place.chunk = chunk;
    place.tile = tile;
    place.settled = settled;
    place.of_pair = 8 * ((s_.offsets.bound + 2 * (slot / kTile)) & 2);  // of mean_scale the same
    place.next_slot = next_slot;
    place.next_index = next_index;
    const uint32_t barrier = ptx::shared_address(&w_.barrier);
    ptx::expect_bytes(barrier, kTile * kHalf);
    ptx::bulk_copy(ptx::shared_address(w_.k_h), page + (s_.offsets.k_h + slot * kHalf), kTile * kHalf, barrier);
  }
  if (lane_ < 16) {
    const int from = (lane_ < 8 ? s_.offsets.k_scale : s_.offsets.v_scale) + 2 * slot + 16 * (lane_ % 8);
    ptx::copy_16(ptx::shared_address(lane_ < 8 ? w_.k_scale : w_.v_scale) + 16 * (lane_ % 8), page + from);
  } else if (lane_ < 19) {  // the next page, the block's scales
    const bool bound = lane_ == 17;
    const int pair = (bound ? s_.offsets.bound : s_.offsets.mean_scale) + 2 * (slot / kTile);
    const void* const from = lane_ == 16 ? static_cast<const void*>(page_entry(next_index)) : page + (pair & ~3);
    void* const to = lane_ == 16 ? static_cast<void*>(&place.next_page) : bound ? &place.bound : &place.mean_scale;
    const bool exists = lane_ == 16 ? tile + kChunkTiles < tile_end : settled && (bound || layout_.tail);
    if constexpr (Early) {  // past L1
      if (exists) *static_cast<unsigned*>(to) = __ldcg(static_cast<const unsigned*>(from));
    } else {
      if (exists) ptx::copy_4(ptx::shared_address(to), from);
    }
  }
  __syncwarp();
}

}  // namespace fold::cuda
