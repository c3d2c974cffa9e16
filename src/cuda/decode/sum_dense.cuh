#pragma once
#include "cuda/decode/dense_keys.cuh"
#include "cuda/decode/dense_values.cuh"

// The sums of a range of tiles for groups of up to 16 rows (D = 256: 8) where every V is read (docs/numerics.md,
// sections 6 and 7): no key is dropped, so there is nothing for the tail model to do.
//
// Planes h and l of K and V are copied whole, ahead of time, and every product is taken over all of a tile's keys;
// plane l is masked where a key is not read to it. Only plane b is fetched key by key. So no list of keys leads from
// one plane to the next, and a warp does a tile alone, but for the sums of its values where it has no registers for all
// channels: then a team of warps shares them.
//
// Weights are summed byte by byte: byte j of a row's weight is a column of the product whose sum counts 2^(8 j).
namespace fold::cuda {

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::run() {
  start();
  const int rounds = (task_.tiles.end - task_.tiles.begin + kWarps - 1) / kWarps;
  int n = 0;
#pragma unroll 1
  do {
    clear();
    const int stop = min(rounds, n + kFlushRounds);
#pragma unroll 1
    for (; n < stop; ++n) add_tile(n);
    flush();
  } while (n < rounds);
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::start() {
  if (threadIdx.x == 0) s_.offsets = head_sections<D>(p_.cache, task_.kv_head);
  if (lane_ == 0) w_.v_b = nullptr;
  __syncthreads();
  if (exists(0)) {
    now_ = find(0);
    send_keys(now_, 0);
    ptx::commit_copies();
    send_values(now_);
    ptx::commit_copies();
  }
  join_task(task_);
  const int r = static_cast<int>(threadIdx.x), last = task_.rows - 1;
  RowState state = quiet_row();
  if (r <= last) state = task_.g.rows[r];  // asked for before it is known whether the row is active
#pragma unroll 1
  for (int i = r; i < Quads * 2 * Shared::kPairs * 32; i += kThreads) {
    const int lane = i % 32, fragment = i / 32 % (2 * Shared::kPairs), t = i / 32 / (2 * Shared::kPairs);
    s_.fragment[t][fragment][lane] = fragment_of<D>(task_.g, min(4 * t + lane / 8, last), 1 + fragment, lane);
  }
  __syncthreads();
  const bool active = (task_.active >> r & 1) != 0;
  if (r < kRows) s_.row[r] = query_row(active ? state : quiet_row());
  __syncthreads();
}

template <int D, int Quads>
__device__ unsigned DenseSummer<D, Quads>::look_up(int n) const {
  if (!exists(n)) return 0;
  const int64_t entry = task_.batch * p_.block_table_stride + column_of_tile(step_, tile(n));
  return static_cast<unsigned>(__ldcg(p_.block_table + entry));
}

template <int D, int Quads>
__device__ auto DenseSummer<D, Quads>::find(int n) -> Spot {
  if (n % 32 == 0) pages_ = look_up(n + lane_);
  const unsigned page = in_pool_or_any(p_.cache, __shfl_sync(kWarp, pages_, n % 32));
  const int in_page = tile(n) - column_of_tile(step_, tile(n)) * step_.tiles_of_page;
  return {p_.cache.pages + page * p_.cache.page_stride, in_page * kTile};
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::send_keys(const Spot& spot, int n) {
  const uint32_t to = ptx::shared_address(w_.k_h) + 16 * lane_;
  const uint8_t* const h = spot.at(s_.offsets.k_h, kHalf) + 16 * lane_;
#pragma unroll
  for (int i = 0; i < kTile * kHalf; i += 512) ptx::copy_16(to + i, h + i);
  if (p_.cache.layout.k_bits >= 8) {
    const uint8_t* const l = spot.at(s_.offsets.k_l, kHalf) + 16 * lane_;
#pragma unroll
    for (int i = 0; i < kTile * kHalf; i += 512) ptx::copy_16(to + kTile * kHalf + i, l + i);
  }
  // K's, V's, and the bounds of the page's blocks around this one.
  constexpr int kLanes = 2 * kTile / 16;
  const int section = lane_ < kLanes ? s_.offsets.k_scale : lane_ < 2 * kLanes ? s_.offsets.v_scale : s_.offsets.bound;
  const int from =
      lane_ < 2 * kLanes ? section + 2 * spot.slot + 16 * (lane_ % kLanes) : (section + 2 * (spot.slot / kTile)) & ~15;
  const bool wanted = lane_ < 2 * kLanes || (lane_ == 2 * kLanes && task_.visible.settled(tile(n)));
  ptx::copy_16_if(wanted, ptx::shared_address(&w_.scales[n % 2]) + 16 * lane_, spot.page + from);
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::send_values(const Spot& spot) {
  const uint32_t to = ptx::shared_address(w_.v_h);
  const auto send = [&](uint32_t plane, const uint8_t* from) {
#pragma unroll
    for (int i = 0; i < kTile * kPieces / 32; ++i) {
      const int piece = lane_ % kPieces, key = lane_ / kPieces + 32 / kPieces * i;
      ptx::copy_16(plane + place_of_value<D>(key, piece), from + 16 * lane_ + 512 * i);
    }
  };
  send(to, spot.at(s_.offsets.v_h, kHalf));
  if (p_.cache.layout.v_bits >= 8) send(to + kTile * kHalf, spot.at(s_.offsets.v_l, kHalf));
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::meet() const {
  if constexpr (kTeam == 1) {
    __syncwarp();
  } else {
    ptx::sync_named(1 + warp_ / kTeam, 32 * kTeam);
  }
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::add_tile(int n) {
  // Copies end in groups: a tile's keys, its values.
  const bool exists = this->exists(n), follows = this->exists(n + 1);
  Spot next{};
  if (exists) {
    const int tile = this->tile(n);
    const bool settled = task_.visible.settled(tile);
    const TileKeys keys =
        settled ? settled_keys(task_.visible.first, tile, g_) : keys_of_unsettled(task_.visible, tile, g_);
    ptx::wait_copies_but<1>();  // V may be on its way
    __syncwarp();
    const Deeper deeper = score(keys, n);
    const int total = list_keys(w_.bytes, deeper.bytes, lane_, [&](int i) { return static_cast<uint8_t>(g_ + 8 * i); });
    halves_ += __popc(deeper.low) + 2 * __popc(deeper.bytes);
    if (follows) {
      next = find(n + 1);
      send_keys(next, n + 1);
    }
    ptx::commit_copies();
    if (total > 0) level_2(total, n);
    if (!settled) hide(~keys.seen, n);
    weigh(keys, settled, n);
    ptx::wait_copies_but<1>();
    __syncwarp();
  } else if (lane_ == 0) {
    w_.v_b = nullptr;
  }
  meet();
  add_values();
  meet();  // the tile's values, weights and lists have been read
  if (follows) send_values(next);
  ptx::commit_copies();
  now_ = next;
}

}  // namespace fold::cuda
