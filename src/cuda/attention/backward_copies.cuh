#pragma once
#include "cuda/attention/backward_task.cuh"

// The third warpgroup of the main loop's CTA: what goes between global and shared memory.
namespace fold::cuda::backward {

/// One thread: copies the task's tiles of rows number begin .. end - 1 in the order in which they are multiplied, and
/// the tiles of keys with the first.
template <int D>
__device__ inline void copy_tiles(const Args& a, Shared<D>& sh, int begin, int end, const CUtensorMap& q_map,
                                  const CUtensorMap& k_map, const CUtensorMap& v_map, const CUtensorMap& dout_map) {
  using S = Shared<D>;
  const Task& task = sh.task;
  const int sequence = a.queries.cu_seqlens ? 0 : task.s.index;
  const auto copy_tile = [&](const uint8_t* to, const CUtensorMap& map, uint32_t barrier, int rows, int row, int head) {
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
      ptx::copy_box(ptx::shared_address(to + block * rows * ptx::kSwizzleRow), map, barrier, 64 * block, row, head,
                    sequence);
    }
  };
  const auto copy_keys = [&](const uint8_t* to, const CUtensorMap& map, uint64_t* full) {
    const uint32_t barrier = ptx::shared_address(full);
    ptx::expect_bytes(barrier, S::kKeyTile);
    copy_tile(to, map, barrier, S::kKeys, task.s.k_begin + task.key, task.head);
  };
  if (begin == 0) copy_keys(sh.k, k_map, &sh.k_full);
  TileWalk walk(a, task);
  int head = task.first_head;
  for (int step = 0; step < end; ++step, head += walk.advance()) {
    if (step < begin) continue;
    const int stage = step % kStages, row = task.s.q_begin + walk.tile * S::kRows;
    // The first tiles find the phase before the first over.
    ptx::wait_barrier(ptx::shared_address(&sh.empty[stage]), (step / kStages + 1) % 2);
    sh.tiles[stage] = {walk.tile * S::kRows, walk.row_tile, walk.tile < task.plain || walk.tile >= task.plain_end};
    const uint32_t q_full = ptx::shared_address(&sh.q_full[stage]);
    ptx::expect_bytes(q_full, S::kRowTile + sizeof(sh.rows[0]));
    copy_tile(sh.q[stage], q_map, q_full, S::kRows, row, head);
    ptx::bulk_copy(ptx::shared_address(sh.rows[stage]), a.rows + int64_t{walk.row_tile} * (kRowNumbers * S::kRows),
                   sizeof(sh.rows[0]), q_full);
    if (step == 0) copy_keys(sh.v, v_map, &sh.v_full);
    const uint32_t dout_full = ptx::shared_address(&sh.dout_full[stage]);
    ptx::expect_bytes(dout_full, S::kRowTile);
    copy_tile(sh.dout[stage], dout_map, dout_full, S::kRows, row, head);
  }
}

/// One warp: adds a warpgroup's pieces of dQ to their sums.
template <int D>
__device__ inline void send_pieces(const Args& a, Shared<D>& sh, int warpgroup) {
  constexpr int kPiecesOfGroup = kPieces / 2, kSums = kPiecesOfGroup * kPieceSums;
  const int32_t* pieces = sh.dq[kPiecesOfGroup * warpgroup];
  const uint32_t full = ptx::shared_address(&sh.dq_full[warpgroup]);
  const uint32_t empty = ptx::shared_address(&sh.dq_empty[warpgroup]);
  const int lane = threadIdx.x % 32, steps = sh.task.steps;
  TileWalk walk(a, sh.task);
  for (int step = 0; step < steps; ++step) {
    int32_t* sums = a.sums + int64_t{walk.row_tile} * kTileSums + warpgroup * kSums;
    ptx::sleep_on_barrier(full, step % 2);
#ifdef FOLD_COUNT_GRID_OVERFLOWS
    for (int i = lane; i < kSums; i += 32) {
      const int64_t before = atomicAdd(sums + i, pieces[i]), after = before + pieces[i];
      if (after != static_cast<int32_t>(after)) atomicAdd(&grid_overflows, 1ull);
    }
    __syncwarp();
#else
    if (lane == 0) {
      ptx::fence_async();  // the key warps told of plain stores, which the copy engine reads now
      ptx::bulk_add_i32(sums, ptx::shared_address(pieces), kSums * 4);
      ptx::commit_bulk();
      ptx::wait_bulk_read<0>();
    }
#endif
    if (lane == 0) ptx::arrive(empty);
    walk.advance();
  }
}

}  // namespace fold::cuda::backward
