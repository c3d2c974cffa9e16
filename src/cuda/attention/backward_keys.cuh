#pragma once
#include "cuda/attention/backward_task.cuh"
#include "cuda/ptx/matrix_store.cuh"

// The key warpgroups of the main loop's CTA. Scores are held transposed, so that P^T and dS^T are operands in registers
// for dV += P^T dO and dK += dS^T Q; for dQ = dS K, over all 128 keys, dS^T goes through shared memory. A tile's dQ is
// multiplied a tile later, so neither warpgroup waits for the other's dS, unless that one is more than a tile behind.
// Products are queued so that the tensor cores have the next one while a warpgroup computes: dP = V dO^T beside exp2,
// dV and dK beside dS, the next S = K Q^T beside the rounding of dQ.
namespace fold::cuda::backward {

/// x * scale (a power of two) rounded to an integer, for |x * scale| < 2^31: what __float2int_rn does at a quarter of
/// the rate. Near kHigh an fp32 number is a multiple of 1024, near kLow = 1.5 * 2^23 an integer, and both have the
/// numbers in their last bits. So `high` takes the multiple of 1024 nearest to x * scale, `rest` takes it away again,
/// exactly, and `low` has what is left, at most 512, rounded once. Of the bits of kHigh a shift by 10 leaves what takes
/// kLow's from the sum.
__device__ inline int32_t grid_integer(float x, float scale) {
  constexpr float kHigh = 11350016.0f * 1024.0f, kLow = 0x1.8p23f;
  constexpr uint32_t kHighBits = 0x50000000 + 11350016 - 0x800000, kLowBits = 0x4b400000;
  static_assert((kHighBits << 10) + kLowBits == 0);
  const float high = fmaf(x, scale, kHigh), rest = kHigh + kLow - high, low = fmaf(x, scale, rest);
  return static_cast<int32_t>((__float_as_uint(high) << 10) + __float_as_uint(low));
}

/// Rounds a warp's piece of dQ onto its rows' grids. scale: of the thread's rows g and g + 8.
__device__ inline void round_piece(const float (&dq)[32], float2 scale, int32_t* piece) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    *reinterpret_cast<int4*>(piece + 128 * i + 4 * (threadIdx.x % 32)) =
        int4{grid_integer(dq[4 * i], scale.x), grid_integer(dq[4 * i + 1], scale.x),
             grid_integer(dq[4 * i + 2], scale.y), grid_integer(dq[4 * i + 3], scale.y)};
  }
}

/// The thread's elements of dK or dV: rows g and g + 8 of its warp's 16 keys.
template <typename G, int D>
__device__ inline void store_keys(const Task& task, const plan::RowsView& view, const float (&x)[D / 2], float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = task.key + static_cast<int>(threadIdx.x) / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
    float row[D / 4];
#pragma unroll
    for (int i = 0; i < D / 4; ++i) row[i] = x[4 * (i / 2) + 2 * half + i % 2] * scale;
    store_row(row_address<G>(view, task.s, task.s.k_begin, key, task.head), row, key < task.s.k_len ? D : 0);
  }
}

/// To the gradients, or to the part's own sums.
template <typename G, int D>
__device__ inline void store_keys(const Args& a, const Task& task, const float (&dk)[D / 2], const float (&dv)[D / 2]) {
  if (task.parts == 1) {
    store_keys<G, D>(task, a.dk, dk, a.scale);
    store_keys<G, D>(task, a.dv, dv, 1.0f);
  } else {
    const int64_t part = task.part * a.kv_heads * a.keys.total * D;
    const auto rows = [&](float* data) {
      return plan::RowsView{data + part, a.keys.cu_seqlens ? 0 : int64_t{a.keys.length} * D, D, a.keys.total * D};
    };
    store_keys<float, D>(task, rows(a.dk_parts), dk, a.scale);
    store_keys<float, D>(task, rows(a.dv_parts), dv, 1.0f);
  }
}

/// Warpgroup w has keys 64 w .. 64 w + 63 of the task's.
template <typename T, typename G, int D>
__device__ inline void sum_keys(const Args& a, Shared<D>& sh) {
  using S = Shared<D>;
  const Task& task = sh.task;
  using ptx::Major;
  constexpr int kRows = S::kRows, kGroups = kRows / 16;  // of 16 rows, which a product sums over
  // Broadcast, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0), warpgroup = warp / 4;
  const int lane = threadIdx.x % 32;
  const int columns = 2 * (lane % 4);  // of each 8, the thread's two

  float dk[D / 2] = {}, dv[D / 2] = {}, s[kRows / 2], dp[kRows / 2];
  // Whether something of the KV head is not finite, or a row sees no key.
  const bool dirty = a.dirty[int64_t{task.s.index} * a.kv_heads + task.head] != 0;

  // Operands are described by their first block of 16 k; further(bytes) leads to the others.
  const auto further = [](int bytes) { return static_cast<uint64_t>(bytes / 16); };
  // Products of the warpgroup's keys and all rows of a tile, over the channels.
  const auto multiply_rows = [&](float(&sums)[kRows / 2], const uint8_t* key_tile, const uint8_t* tile) {
    const int keys_row = 64 * ptx::anew(warpgroup);
    const uint64_t keys = ptx::operand<Major::k>(ptx::shared_address(key_tile) + keys_row * ptx::kSwizzleRow);
    const uint64_t rows = ptx::operand<Major::k>(ptx::shared_address(tile));
    ptx::wgmma_arrive();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const int at = i % 4 * 32;
      ptx::wgmma<T, kRows, Major::k, Major::k>(sums, keys + further(i / 4 * S::kKeyBlock + at),
                                               rows + further(i / 4 * S::kRowBlock + at), i > 0);
    }
    ptx::wgmma_commit();
  };
  // The warpgroup's part of dQ: half the rows at head dim 64, else half the channels.
  const auto multiply_ds = [&](float(&dq)[32], int buffer) {
    const uint64_t rows =
        ptx::operand<Major::mn>(ptx::shared_address(sh.ds[buffer]) + (D == 64 ? warpgroup * S::kKeyBlock : 0));
    const uint64_t channels =
        ptx::operand<Major::mn>(ptx::shared_address(sh.k) + (D == 64 ? 0 : warpgroup * S::kKeyBlock));
    ptx::wgmma_arrive();
#pragma unroll
    for (int i = 0; i < S::kKeys / 16; ++i) {
      ptx::wgmma<T, 64, Major::mn, Major::mn>(dq, rows + further(i * 2048), channels + further(i * 2048), i > 0);
    }
    ptx::wgmma_commit();
  };
  // The thread's log-sum-exps and Deltas, four of each 16 rows; number n + kAhead is loaded when number n was used, as
  // a load waits long behind the operands that products read.
  constexpr int kAhead = D == 64 ? 6 : 4;
  float4 lse[kGroups], delta[kGroups];
  const auto load = [&](int n, int stage) {
    if (n >= 2 * kGroups) return;
    const RowNumber number = n < kGroups ? kLse : kDelta;
    (number == kLse ? lse : delta)[n % kGroups] =
        *reinterpret_cast<const float4*>(&sh.rows[stage][number][16 * (n % kGroups) + 4 * (lane % 4)]);
  };
  const auto load_first = [&](int stage) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(n, stage);
  };
  // Tells of what the warp has done.
  const auto tell = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) ptx::arrive(ptx::shared_address(&barrier));
  };
  const auto mask = [&](float(&x)[kRows / 2], int row) {
    const int key = task.key + 16 * warp + lane / 4;
    const RowRange seen[2] = {rows_seeing(a, task.s, key), rows_seeing(a, task.s, key + 8)};
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      if (!seen[i / 2 % 2].has(row + i / 4 * 8 + columns + i % 2)) x[i] = 0.0f;
    }
  };
  // The warpgroups take turns from the issue of dP to the end of exp2. Left alone they would compute at the same time,
  // and multiply at the same time.
  const auto take_turn = [&] { warpgroup == 0 ? ptx::sync_named(2, kKeyThreads) : ptx::sync_named(3, kKeyThreads); };
  const auto give_turn = [&] {
    warpgroup == 0 ? ptx::arrive_named(3, kKeyThreads) : ptx::arrive_named(2, kKeyThreads);
  };
  // From a tile's scores, on their way, and its dO: weights in s and dP in dp. Leaves no product unfinished. `later`
  // runs behind exp2.
  const auto weigh = [&](int row, bool masked, int stage, const auto& later) {
    // By both warpgroups together, so by neither within its turn.
    if (masked && (dirty || (a.queries.cu_seqlens && row + kRows > task.s.q_len))) {
      clean_tile<T, S::kRowTile>(sh.q[stage], kRows, task.s.q_len - row);
      clean_tile<T, S::kRowTile>(sh.dout[stage], kRows, task.s.q_len - row);
      ptx::fence_async();
      ptx::sync_named(1, kKeyThreads);
    }
    const float scale2 = task.scale2;
    take_turn();
    multiply_rows(dp, sh.v, sh.dout[stage]);
    ptx::wgmma_wait<1>();
    ptx::keep_registers(s);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float4& l = lse[group];
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        float* x = s + 8 * group + i;
        x[0] = ptx::exp2_fast(fmaf(x[0], scale2, i == 0 ? -l.x : -l.z));
        x[1] = ptx::exp2_fast(fmaf(x[1], scale2, i == 0 ? -l.y : -l.w));
        x[2] = ptx::exp2_fast(fmaf(x[2], scale2, i == 0 ? -l.x : -l.z));
        x[3] = ptx::exp2_fast(fmaf(x[3], scale2, i == 0 ? -l.y : -l.w));
      }
      __syncwarp();  // later loads stay behind it: all of them at once would not fit the registers
      load(group + kAhead, stage);
    }
    give_turn();
    later();
    if (masked) mask(s, row);  // a branch also keeps the compiler from putting exp2 behind the wait
    ptx::wgmma_wait<0>();
    ptx::keep_registers(dp);
    if (masked) mask(dp, row);  // zero weights must meet finite numbers
  };

  if (warpgroup == 1) give_turn();
  ptx::wait_barrier(ptx::shared_address(&sh.k_full), 0);
  if (dirty || (a.keys.cu_seqlens && task.key + S::kKeys > task.s.k_len)) {
    clean_tile<T, S::kKeyTile>(sh.k, S::kKeys, task.s.k_len - task.key);
    ptx::fence_async();
    ptx::sync_named(1, kKeyThreads);
  }
  ptx::wait_barrier(ptx::shared_address(&sh.q_full[0]), 0);
  multiply_rows(s, sh.k, sh.q[0]);
  ptx::wait_barrier(ptx::shared_address(&sh.v_full), 0);

  const int steps = task.steps;
  float2 scale{};
  int buffer = 0, last_buffer = kDsBuffers - 1;  // of the tile, of the one before
  uint32_t buffer_parity = 0, last_parity = 1;
  ptx::wait_barrier(ptx::shared_address(&sh.dout_full[0]), 0);
  int row_tile = sh.tiles[0].row_tile;
  load_first(0);
  weigh(sh.tiles[0].row, sh.tiles[0].masked, 0, [] {});
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kStages;
    // The last tile comes once more after itself, for scores and weights that nobody looks at: a loop without a way out
    // in the middle is what the compiler keeps products in flight through.
    const int next_step = min(step + 1, steps - 1), next_stage = next_step % kStages;
    const uint32_t next_parity = next_step / kStages % 2;
    uint32_t p_rows[kGroups][4], ds_rows[kGroups][4];
    // The buffer had dS of three tiles before. The other warpgroup multiplied that before its turn at the tile before,
    // which was before this one's turn.
    const uint32_t ds_tile = ptx::shared_address(sh.ds[buffer]);
    // Where a lane's row of 8 elements goes. Of 16 query rows, matrix m has rows 8 (m / 2).. and keys 8 (m % 2)..; the
    // swizzle adds the key to the number of 16 bytes, bit by bit.
    const uint32_t ds_matrices = ds_tile + (16 * warp + lane % 16) * ptx::kSwizzleRow + (lane / 16 ^ lane % 8) * 16;
    const uint64_t dout_columns = ptx::operand<Major::mn>(ptx::shared_address(sh.dout[stage]), S::kRowBlock);
    constexpr int kPortion = 2;  // groups whose dS is made while their dV is multiplied
#pragma unroll
    for (int begin = 0; begin < kGroups; begin += kPortion) {
      const int end = begin + kPortion;
#pragma unroll
      for (int i = begin; i < end; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) p_rows[i][e] = ptx::pair<T>(s[8 * i + 2 * e], s[8 * i + 2 * e + 1]);
      }
      ptx::wgmma_arrive();
#pragma unroll
      for (int i = begin; i < end; ++i) {
        ptx::wgmma<T, D, Major::mn>(dv, p_rows[i], dout_columns + further(i * 2048), true);
      }
      ptx::wgmma_commit();
#pragma unroll
      for (int i = begin; i < end; ++i) {
        const float4& d = delta[i];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at = 8 * i + 2 * e;
          ds_rows[i][e] =
              ptx::pair<T>(s[at] * (dp[at] - (e < 2 ? d.x : d.z)), s[at + 1] * (dp[at + 1] - (e < 2 ? d.y : d.w)));
        }
        ptx::store_matrices((ds_matrices + i / 4 * S::kKeyBlock) ^ (i % 4 * 32), ds_rows[i]);
        load(i + kGroups + kAhead, stage);
      }
    }
    // Barriers are asked before the answers are needed, as that takes a while.
    const uint32_t q_full = ptx::shared_address(&sh.q_full[next_stage]);
    const uint32_t ds_full = ptx::shared_address(&sh.ds_full[last_buffer]);
    const bool q_there = ptx::phase_is_over(q_full, next_parity);
    const bool ds_there = ptx::phase_is_over(ds_full, last_parity);  // before the first tile the phase before counts
    const uint64_t q_columns = ptx::operand<Major::mn>(ptx::shared_address(sh.q[stage]), S::kRowBlock);
    ptx::wgmma_arrive();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      ptx::wgmma<T, D, Major::mn>(dk, ds_rows[i], q_columns + further(i * 2048), true);
    }
    ptx::wgmma_commit();
    ptx::fence_async();
    tell(sh.ds_full[buffer]);

    if (!ds_there) ptx::wait_barrier(ds_full, last_parity);
    float dq[32];  // of the tile before; before the first, of what nobody looks at
    multiply_ds(dq, last_buffer);
    if (!q_there) ptx::wait_barrier(q_full, next_parity);
    ptx::wgmma_wait<1>();  // dV and dK are done
    multiply_rows(s, sh.k, sh.q[next_stage]);
    load_first(next_stage);
    tell(sh.empty[stage]);
    const uint32_t dq_empty = ptx::shared_address(&sh.dq_empty[warpgroup]);
    const uint32_t dout_full = ptx::shared_address(&sh.dout_full[next_stage]);
    const bool dq_free = ptx::phase_is_over(dq_empty, step % 2);
    const bool dout_there = ptx::phase_is_over(dout_full, next_parity);
    ptx::wgmma_wait<1>();
    ptx::keep_registers(dq);
    const Tile next = sh.tiles[next_stage];
    if (step > 0) {
      if (!dq_free) ptx::wait_barrier(dq_empty, step % 2);
      round_piece(dq, scale, sh.dq[warp]);
    }
    last_buffer = buffer;
    last_parity = buffer_parity;
    if (++buffer == kDsBuffers) {
      buffer = 0;
      buffer_parity ^= 1;
    }
    if (!dout_there) ptx::wait_barrier(dout_full, next_parity);
    weigh(next.row, next.masked, next_stage, [&] {
      if (step > 0) tell(sh.dq_full[warpgroup]);
      const float* scales =
          a.rows + (int64_t{row_tile} * kRowNumbers + kScale) * kRows + 16 * (D == 64 ? warp : warp % 4) + lane / 4;
      scale = {scales[0], scales[8]};
      row_tile = next.row_tile;
    });
  }
  ptx::wait_barrier(ptx::shared_address(&sh.ds_full[last_buffer]), last_parity);
  float dq[32];
  multiply_ds(dq, last_buffer);
  ptx::wgmma_wait<0>();
  ptx::keep_registers(dq);
  ptx::wait_barrier(ptx::shared_address(&sh.dq_empty[warpgroup]), steps % 2);
  round_piece(dq, scale, sh.dq[warp]);
  tell(sh.dq_full[warpgroup]);
  ptx::keep_registers(dk);
  ptx::keep_registers(dv);
  store_keys<G, D>(a, task, dk, dv);
}

}  // namespace fold::cuda::backward
