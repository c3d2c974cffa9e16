#pragma once
#include "cuda/attention/backward_layout.cuh"
#include "cuda/ptx/launch_order.cuh"
#include "cuda/ptx/matrix_store.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/wgmma.cuh"

// The main loop of the backward. A CTA owns a tile of 128 keys of one KV head: it walks the group's query heads (or a
// part of them) and the tiles of query rows that see its keys, in order, so dK and dV are sums of its own; its shares
// of dQ are rounded onto the rows' grids and added as integers.
//
// One warp copies tiles, two warpgroups compute, 64 keys each. Scores are held transposed, so that P^T and dS^T are
// operands in registers for dV += P^T dO and dK += dS^T Q; for dQ = dS K, over all 128 keys, dS^T goes through shared
// memory. A tile's products are queued so that the tensor cores always have the next one while a warpgroup computes:
//   dP = V dO^T beside exp2, dV beside dS, dK beside the exchange of dS, and the next S = K Q^T beside the rounding of
//   dQ.
namespace fold::cuda::backward {

constexpr int kConsumers = 256, kConsumerWarps = kConsumers / 32, kMainThreads = kConsumers + 128, kStages = 2;

/// What a CTA has to do. In shared memory, as registers are scarce.
struct Task {
  Sequence s;
  int head, part;        // of K and V; of its query heads
  int key;               // first of its tile
  int tile, tile_end;    // of query rows that see a key
  int plain, plain_end;  // of those, where every row sees every key
  int steps;             // tiles of all query heads; -1: no task
  float scale2;          // Args::scale2: a register, not a load from constant memory for each element
  bool dirty;            // something of the KV head is not finite, or sees no key
};

template <int D>
struct Shared {
  static constexpr int kRows = Tiles<D>::kRows, kKeys = Tiles<D>::kKeys;
  static constexpr int kBlocks = (D + 63) / 64;  // of 64 channels: 128-byte rows, each block rows * 128 bytes
  static constexpr int kRowTile = kBlocks * kRows * ptx::kSwizzleRow, kKeyTile = kBlocks * kKeys * ptx::kSwizzleRow;

  alignas(1024) uint8_t k[kKeyTile];
  uint8_t v[kKeyTile];
  uint8_t q[kStages][kRowTile];
  uint8_t dout[kStages][kRowTile];
  uint8_t ds[2][kRows * kKeys * 2];  // dS^T: blocks of 64 query rows, of which a key has 128 bytes
  alignas(16) int32_t dq[kPieces][kPieceSums];
  alignas(16) float rows[kStages][kRowNumbers][kRows];
  Task task;
  uint64_t k_full, v_full, q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages], ds_full[2];
};

/// Tasks in the order of starting: sections of units whose rows share the L2 cache; in a section the tiles that the
/// most rows see first (causal: small keys).
template <int D>
__device__ Task find_task(const Args& a, int64_t number) {
  constexpr int kRows = Tiles<D>::kRows, kKeys = Tiles<D>::kKeys;
  Task task{};
  int unit, tile;
  if (!a.keys.cu_seqlens) {
    const int64_t tiles = (a.keys.length + kKeys - 1) / kKeys;
    const int section = static_cast<int>(min(number / (a.section * tiles), int64_t{a.sections - 1}));
    const int first = section * a.section, width = section + 1 < a.sections ? a.section : a.units - first;
    const int in_section = static_cast<int>(number - first * tiles);
    unit = first + in_section % width;
    tile = in_section / width;
    task.s = sequence<D>(a, unit / (a.kv_heads * a.parts));
    unit %= a.kv_heads * a.parts;
  } else {
    const int64_t at = number / a.units;
    unit = static_cast<int>(number % a.units);
    task.s = sequence<D>(a, sequence_of(a, a.keys, at, kKeys));
    tile = static_cast<int>(at - first_tile(a.keys, task.s.index, kKeys));
  }
  task.head = unit / a.parts;
  task.part = unit % a.parts;
  task.key = tile * kKeys;
  task.scale2 = a.scale2;
  if (task.key >= task.s.k_len) {  // behind the last packed sequence
    task.steps = -1;
    return task;
  }
  // Rows i with i - shift - left <= key <= i - shift + right.
  const int end = task.key + kKeys, shift = task.s.q_len - task.s.k_len;
  const int first = max(task.key + shift - a.window_right, 0);
  const int last = min(min(end, task.s.k_len) + shift + a.window_left, task.s.q_len);
  task.tile = first / kRows;
  task.tile_end = first < last ? (last + kRows - 1) / kRows : task.tile;
  task.steps = (task.tile_end - task.tile) * (a.group / a.parts);
  if (end <= task.s.k_len) {
    task.plain = (max(end - 1 + shift - a.window_right, 0) + kRows - 1) / kRows;
    task.plain_end = max(min(task.key + shift + a.window_left + 1, task.s.q_len), 0) / kRows;
  }
  task.dirty = a.dirty[int64_t{task.s.index} * a.kv_heads + task.head] != 0;
  return task;
}

/// The first of a task's query heads.
__device__ inline int first_head(const Args& a, const Task& task) {
  return task.head * a.group + task.part * (a.group / a.parts);
}

/// Which rows see a key: those of [first, first + count).
struct RowRange {
  int first;
  unsigned count;
  __device__ bool has(int row) const { return static_cast<unsigned>(row - first) < count; }
};
__device__ inline RowRange rows_seeing(const Args& a, const Sequence& s, int key) {
  const int diagonal = key + s.q_len - s.k_len;
  const int first = max(diagonal - a.window_right, 0), last = min(diagonal + a.window_left + 1, s.q_len);
  return {first, key < s.k_len && first < last ? static_cast<unsigned>(last - first) : 0u};
}

/// Zeroes what would spoil sums although its weight is zero: rows of the next sequence, and elements that are not
/// finite (rows that see one have lse NaN, so its own effect is not lost). By all consumers.
template <typename T, int Bytes>
__device__ inline void clean_tile(uint8_t* tile, int rows_of_tile, int rows) {
  constexpr uint32_t kExponent = std::is_same_v<T, __nv_bfloat16> ? 0x7f80 : 0x7c00;
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) * 16; at < Bytes; at += kConsumers * 16) {
    uint4& words = *reinterpret_cast<uint4*>(tile + at);
    const bool kept = at / ptx::kSwizzleRow % rows_of_tile < rows;
    uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (uint32_t& x : w) {
      if (!kept || (x & kExponent) == kExponent) x &= 0xffff0000;
      if (!kept || (x >> 16 & kExponent) == kExponent) x &= 0xffff;
    }
    words = {w[0], w[1], w[2], w[3]};
  }
}

/// One warp: copies the task's tiles, in the order in which they are multiplied.
template <int D>
__device__ inline void produce(const Args& a, Shared<D>& sh, const CUtensorMap& q_map, const CUtensorMap& k_map,
                               const CUtensorMap& v_map, const CUtensorMap& dout_map) {
  using S = Shared<D>;
  const Task task = sh.task;
  const int sequence = a.queries.cu_seqlens ? 0 : task.s.index;
  const auto copy_tile = [&](const uint8_t* to, const CUtensorMap& map, uint32_t barrier, int rows, int row, int head) {
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
      ptx::copy_box(ptx::shared_address(to + block * rows * ptx::kSwizzleRow), map, barrier, 64 * block, row, head,
                    sequence);
    }
  };
  const auto key_tile = [&](const uint8_t* to, const CUtensorMap& map, uint64_t* barrier) {
    ptx::expect_bytes(ptx::shared_address(barrier), S::kKeyTile);
    copy_tile(to, map, ptx::shared_address(barrier), S::kKeys, task.s.k_begin + task.key, task.head);
  };
  int stage = 0;
  uint32_t parity = 1;  // an empty stage's first phase counts as over
  key_tile(sh.k, k_map, &sh.k_full);
  const int head_begin = first_head(a, task);
  for (int head = head_begin; head < head_begin + a.group / a.parts; ++head) {
    for (int tile = task.tile; tile < task.tile_end; ++tile) {
      const int row = task.s.q_begin + tile * S::kRows;
      const uint32_t q_full = ptx::shared_address(&sh.q_full[stage]);
      ptx::wait_barrier(ptx::shared_address(&sh.q_empty[stage]), parity);
      ptx::expect_bytes(q_full, S::kRowTile + sizeof(sh.rows[0]));
      copy_tile(sh.q[stage], q_map, q_full, S::kRows, row, head);
      ptx::bulk_copy(ptx::shared_address(sh.rows[stage]),
                     a.rows + (head * a.tiles + task.s.first_tile + tile) * (kRowNumbers * S::kRows),
                     sizeof(sh.rows[0]), q_full);
      if (head == head_begin && tile == task.tile) key_tile(sh.v, v_map, &sh.v_full);
      const uint32_t dout_full = ptx::shared_address(&sh.dout_full[stage]);
      ptx::wait_barrier(ptx::shared_address(&sh.dout_empty[stage]), parity);
      ptx::expect_bytes(dout_full, S::kRowTile);
      copy_tile(sh.dout[stage], dout_map, dout_full, S::kRows, row, head);
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

/// x * scale (a power of two) rounded to an integer, for |x * scale| < 2^31: what __float2int_rn does at a quarter of
/// the rate. Near 1.5 * 2^33 an fp32 number is a multiple of 1024, near 1.5 * 2^23 an integer, and both have the
/// numbers in their last bits. So `high` takes the multiple of 1024 nearest to x * scale, `rest` takes it away again,
/// exactly, and `low` has what is left, at most 512, rounded once. (Of the bits of kHigh none remains in a shift
/// by 10.)
__device__ inline int32_t grid_integer(float x, float scale) {
  constexpr float kHigh = 0x1.8p33f, kLow = 0x1.8p23f;
  constexpr uint32_t kLowBits = 0x4b400000;
  const float high = fmaf(x, scale, kHigh), rest = kHigh + kLow - high, low = fmaf(x, scale, rest);
  return static_cast<int32_t>((__float_as_uint(high) << 10) + (__float_as_uint(low) - kLowBits));
}

/// Rounds a piece of dQ onto its rows' grids. scale: of the thread's rows g and g + 8.
template <int Channels>
__device__ inline void round_piece(const float (&dq)[32], float2 scale, int32_t* piece) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) ptx::wait_bulk_read<0>();  // the last piece has left
  __syncwarp();
#pragma unroll
  for (int i = 0; i < Channels / 8; ++i) {
    *reinterpret_cast<int4*>(piece + 128 * i + 4 * lane) =
        int4{grid_integer(dq[4 * i], scale.x), grid_integer(dq[4 * i + 1], scale.x),
             grid_integer(dq[4 * i + 2], scale.y), grid_integer(dq[4 * i + 3], scale.y)};
  }
}

/// Sends a rounded piece to its sums.
__device__ inline void add_piece(const int32_t* piece, int32_t* sums, int size) {
  const int lane = threadIdx.x % 32;
#ifdef FOLD_COUNT_GRID_OVERFLOWS
  __syncwarp();
  for (int i = lane; i < size; i += 32) {
    const int64_t before = atomicAdd(sums + i, piece[i]), after = before + piece[i];
    if (after != static_cast<int32_t>(after)) atomicAdd(&grid_overflows, 1ull);
  }
#else
  ptx::fence_async();
  __syncwarp();
  if (lane == 0) {
    ptx::bulk_add_i32(sums, ptx::shared_address(piece), static_cast<uint32_t>(size) * 4);
    ptx::commit_bulk();
  }
#endif
}

/// The thread's elements of dK and dV: rows g and g + 8 of its warp's 16 keys.
template <typename G, int D>
__device__ inline void store_keys(const Task& task, const plan::RowsView& dk_rows, const plan::RowsView& dv_rows,
                                  const float (&dk)[D / 2], const float (&dv)[D / 2], float scale) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = task.key + static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4 + 8 * half;
    if (key >= task.s.k_len) continue;
    G* const dk_row = row_address<G>(dk_rows, task.s, task.s.k_begin, key, task.head) + 2 * (lane % 4);
    G* const dv_row = row_address<G>(dv_rows, task.s, task.s.k_begin, key, task.head) + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      store_pair(dk_row + 8 * i, dk[4 * i + 2 * half] * scale, dk[4 * i + 2 * half + 1] * scale);
      store_pair(dv_row + 8 * i, dv[4 * i + 2 * half], dv[4 * i + 2 * half + 1]);
    }
  }
}

/// To the gradients, or to the part's own sums.
template <typename G, int D>
__device__ inline void store_keys(const Args& a, const Task& task, const float (&dk)[D / 2], const float (&dv)[D / 2]) {
  if (a.parts == 1) {
    store_keys<G, D>(task, a.dk, a.dv, dk, dv, a.scale);
  } else {
    const int64_t part = task.part * a.kv_heads * a.keys.total * D;
    const auto rows = [&](float* data) {
      return plan::RowsView{data + part, a.keys.cu_seqlens ? 0 : int64_t{a.keys.length} * D, D, a.keys.total * D};
    };
    store_keys<float, D>(task, rows(a.dk_parts), rows(a.dv_parts), dk, dv, a.scale);
  }
}

/// Two warpgroups: warpgroup w has keys 64 w .. 64 w + 63 of the task's.
template <typename T, typename G, int D>
__device__ inline void consume(const Args& a, Shared<D>& sh) {
  using S = Shared<D>;
  const Task& task = sh.task;
  using ptx::Major;
  constexpr int kRows = S::kRows, kRowBlock = kRows * ptx::kSwizzleRow, kKeyBlock = S::kKeys * ptx::kSwizzleRow;
  constexpr int kPart = 32;  // query rows whose weights are handled together
  // Broadcast, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0), warpgroup = warp / 4;
  const int lane = threadIdx.x % 32;
  const int columns = 2 * (lane % 4);  // of each 8, the thread's two

  float dk[D / 2] = {}, dv[D / 2] = {}, s[kRows / 2], dp[kRows / 2];

  // Operands are described by their first block of 16 k; further(bytes) leads to the others.
  const auto further = [](int bytes) { return static_cast<uint64_t>(bytes / 16); };
  // Products of the warpgroup's keys and all rows of a tile, over the channels.
  const auto multiply_rows = [&](float(&sums)[kRows / 2], const uint8_t* key_tile, const uint8_t* tile) {
    // The broadcast is done anew: what does not change in the loop would be kept in registers, of which there is none.
    const int keys_row = 64 * __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
    const uint64_t keys = ptx::operand<Major::k>(ptx::shared_address(key_tile) + keys_row * ptx::kSwizzleRow);
    const uint64_t rows = ptx::operand<Major::k>(ptx::shared_address(tile));
    ptx::wgmma_arrive();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const int at = i % 4 * 32;
      ptx::wgmma<T, kRows, Major::k, Major::k>(sums, keys + further(i / 4 * kKeyBlock + at),
                                               rows + further(i / 4 * kRowBlock + at), i > 0);
    }
    ptx::wgmma_commit();
  };

  ptx::wait_barrier(ptx::shared_address(&sh.k_full), 0);
  if (task.dirty || (a.keys.cu_seqlens && task.key + S::kKeys > task.s.k_len)) {
    clean_tile<T, S::kKeyTile>(sh.k, S::kKeys, task.s.k_len - task.key);
    ptx::fence_async();
    ptx::sync_named(1, kConsumers);
  }
  ptx::wait_barrier(ptx::shared_address(&sh.q_full[0]), 0);
  multiply_rows(s, sh.k, sh.q[0]);
  ptx::wait_barrier(ptx::shared_address(&sh.v_full), 0);

  // The thread's numbers of kPart query rows: of each 8, two.
  const auto load_numbers = [&](float2(&x)[kPart / 8], int stage, RowNumber number, int part) {
#pragma unroll
    for (int i = 0; i < kPart / 8; ++i) {
      x[i] = *reinterpret_cast<const float2*>(&sh.rows[stage][number][kPart * part + 8 * i + columns]);
    }
  };
  // From a tile's scores, on their way, and its dO: weights in s and dP in dp. Leaves no product unfinished.
  const auto weigh = [&](int tile, int stage, uint32_t parity, bool exists, const auto& meanwhile) {
    const int row = tile * kRows;
    const bool masked = exists && (tile < task.plain || tile >= task.plain_end);
    if (exists) ptx::wait_barrier(ptx::shared_address(&sh.dout_full[stage]), parity);
    if (masked && (task.dirty || (a.queries.cu_seqlens && row + kRows > task.s.q_len))) {
      clean_tile<T, S::kRowTile>(sh.q[stage], kRows, task.s.q_len - row);
      clean_tile<T, S::kRowTile>(sh.dout[stage], kRows, task.s.q_len - row);
      ptx::fence_async();
      ptx::sync_named(1, kConsumers);
    }
    multiply_rows(dp, sh.v, sh.dout[stage]);
    meanwhile();

    const float scale2 = task.scale2;
    float2 lse[kPart / 8];
    load_numbers(lse, stage, kLse, 0);
    ptx::wgmma_wait<1>();
    ptx::keep_registers(s);
#pragma unroll
    for (int part = 0; part < kRows / kPart; ++part) {
      if (part > 0) {
        __syncwarp();  // loads stay behind it: all of them at once would not fit the registers
        load_numbers(lse, stage, kLse, part);
      }
#pragma unroll
      for (int i = 0; i < kPart / 2; ++i) {
        float& x = s[part * (kPart / 2) + i];
        x = ptx::exp2_fast(fmaf(x, scale2, -(i % 2 ? lse[i / 4].y : lse[i / 4].x)));
      }
    }
    const auto mask = [&](float(&x)[kRows / 2]) {
      const int key = task.key + 16 * warp + lane / 4;
      const RowRange seen[2] = {rows_seeing(a, task.s, key), rows_seeing(a, task.s, key + 8)};
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        if (!seen[i / 2 % 2].has(row + i / 4 * 8 + columns + i % 2)) x[i] = 0.0f;
      }
    };
    if (masked) mask(s);  // a branch also keeps the compiler from putting exp2 behind the wait
    ptx::wgmma_wait<0>();
    ptx::keep_registers(dp);
    if (masked) mask(dp);  // zero weights must meet finite numbers
  };

  int tile = task.tile;
  int row_tile =
      static_cast<int>(first_head(a, task) * a.tiles + task.s.first_tile) + tile;  // among those of all heads
  weigh(tile, 0, 0, true, [] {});
  for (int step = 0; step < task.steps; ++step) {
    const int stage = step % kStages, buffer = step % 2;
    uint32_t p_rows[kRows / 16][4], ds_rows[kRows / 16][4];
    const uint32_t ds_tile = ptx::shared_address(sh.ds[buffer]);
    // Where a lane's row of 8 elements goes. Of 16 query rows, matrix m has rows 8 (m / 2).. and keys 8 (m % 2)..; the
    // swizzle adds the key to the number of 16 bytes, bit by bit.
    const uint32_t ds_matrices = ds_tile + (16 * warp + lane % 16) * ptx::kSwizzleRow + (lane / 16 ^ lane % 8) * 16;
    const uint64_t dout_columns = ptx::operand<Major::mn>(ptx::shared_address(sh.dout[stage]), kRowBlock);
#pragma unroll
    for (int part = 0; part < kRows / kPart; ++part) {
      float2 delta[kPart / 8];
      load_numbers(delta, stage, kDelta, part);
#pragma unroll
      for (int i = part * (kPart / 16); i < (part + 1) * (kPart / 16); ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) p_rows[i][e] = ptx::pair<T>(s[8 * i + 2 * e], s[8 * i + 2 * e + 1]);
      }
      ptx::wgmma_arrive();
#pragma unroll
      for (int i = part * (kPart / 16); i < (part + 1) * (kPart / 16); ++i) {
        ptx::wgmma<T, D, Major::mn>(dv, p_rows[i], dout_columns + further(i * 2048), true);
      }
      ptx::wgmma_commit();
#pragma unroll
      for (int i = 0; i < kPart / 2; ++i) {
        const int at = part * (kPart / 2) + i;
        s[at] *= dp[at] - (i % 2 ? delta[i / 4].y : delta[i / 4].x);
      }
#pragma unroll
      for (int i = part * (kPart / 16); i < (part + 1) * (kPart / 16); ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) ds_rows[i][e] = ptx::pair<T>(s[8 * i + 2 * e], s[8 * i + 2 * e + 1]);
        ptx::store_matrices((ds_matrices + i / 4 * S::kKeys * ptx::kSwizzleRow) ^ (i % 4 * 32), ds_rows[i]);
      }
    }
    ptx::fence_async();
    __syncwarp();
    if (lane == 0) ptx::arrive(ptx::shared_address(&sh.ds_full[buffer]));

    const uint64_t q_columns = ptx::operand<Major::mn>(ptx::shared_address(sh.q[stage]), kRowBlock);
    ptx::wgmma_arrive();
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      ptx::wgmma<T, D, Major::mn>(dk, ds_rows[i], q_columns + further(i * 2048), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();  // P's registers are free: dV is done

    ptx::wait_barrier(ptx::shared_address(&sh.ds_full[buffer]), step / 2 % 2);
    float dq[32];
    {
      // At head dim 64 a warpgroup has half the rows, else half the channels.
      const uint64_t rows = ptx::operand<Major::mn>(ds_tile + (D == 64 ? warpgroup * kKeyBlock : 0));
      const uint64_t columns_of_k =
          ptx::operand<Major::mn>(ptx::shared_address(sh.k) + (D == 64 ? 0 : warpgroup * kKeyBlock));
      ptx::wgmma_arrive();
#pragma unroll
      for (int i = 0; i < S::kKeys / 16; ++i) {
        ptx::wgmma<T, 64, Major::mn, Major::mn>(dq, rows + further(i * 2048), columns_of_k + further(i * 2048), i > 0);
      }
      ptx::wgmma_commit();
    }

    // After the last tile, products and weights of no tile follow, which nobody looks at: a loop without a way out in
    // the middle is what the compiler keeps products in flight through.
    const bool last = step + 1 == task.steps;
    const int next_stage = (step + 1) % kStages;
    const uint32_t next_parity = (step + 1) / kStages % 2;
    if (!last) ptx::wait_barrier(ptx::shared_address(&sh.q_full[next_stage]), next_parity);
    ptx::wgmma_wait<1>();  // those of dS, too: dK is done
    multiply_rows(s, sh.k, sh.q[next_stage]);

    const int piece_row = 16 * (D == 64 ? warp : warp % 4) + lane / 4;
    const float2 scale = {sh.rows[stage][kScale][piece_row], sh.rows[stage][kScale][piece_row + 8]};
    ptx::wgmma_wait<1>();
    ptx::keep_registers(dq);
    __syncwarp();
    if (lane == 0) {
      ptx::arrive(ptx::shared_address(&sh.q_empty[stage]));
      ptx::arrive(ptx::shared_address(&sh.dout_empty[stage]));
    }
    const bool half_piece = D == 96 && warpgroup == 1;
    if (half_piece) {
      round_piece<32>(dq, scale, sh.dq[warp]);
    } else {
      round_piece<64>(dq, scale, sh.dq[warp]);
    }
    int32_t* sums = a.sums + (int64_t{row_tile} * kPieces + warp) * kPieceSums;
    ++row_tile;
    if (++tile == task.tile_end) {
      tile = task.tile;
      row_tile += static_cast<int>(a.tiles) - (task.tile_end - task.tile);
    }
    // The piece is sent when its stores are long done, and dP is on its way.
    weigh(tile, next_stage, next_parity, !last,
          [&] { add_piece(sh.dq[warp], sums, half_piece ? kPieceSums / 2 : kPieceSums); });
  }
  ptx::keep_registers(dk);
  ptx::keep_registers(dv);
  store_keys<G, D>(a, task, dk, dv);
  if (lane == 0) ptx::wait_bulk();
}

/// T: of the inputs; G: of the gradients.
template <typename T, typename G, int D>
__global__ void __launch_bounds__(kMainThreads, 1)
    main_kernel(const Args a, const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap dout_map) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& sh = *reinterpret_cast<Shared<D>*>(memory);
  if (threadIdx.x == 0) {
    ptx::prefetch_map(q_map);
    ptx::prefetch_map(k_map);
    ptx::prefetch_map(v_map);
    ptx::prefetch_map(dout_map);
    ptx::init_barrier(ptx::shared_address(&sh.k_full), 1);
    ptx::init_barrier(ptx::shared_address(&sh.v_full), 1);
    for (int i = 0; i < kStages; ++i) {
      ptx::init_barrier(ptx::shared_address(&sh.q_full[i]), 1);
      ptx::init_barrier(ptx::shared_address(&sh.dout_full[i]), 1);
      ptx::init_barrier(ptx::shared_address(&sh.q_empty[i]), kConsumerWarps);
      ptx::init_barrier(ptx::shared_address(&sh.dout_empty[i]), kConsumerWarps);
    }
    for (uint64_t& barrier : sh.ds_full) ptx::init_barrier(ptx::shared_address(&barrier), kConsumerWarps);
    ptx::fence_barrier_init();
  }
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  if (threadIdx.x == 0) sh.task = find_task<D>(a, blockIdx.x);
  __syncthreads();
  if (sh.task.steps < 0) return;
  if (threadIdx.x >= kConsumers) {
    ptx::give_registers<24>();
    if (threadIdx.x == kConsumers && sh.task.steps > 0) produce<D>(a, sh, q_map, k_map, v_map, dout_map);
    return;
  }
  ptx::take_registers<240>();
  if (sh.task.steps > 0) {
    consume<T, G, D>(a, sh);
  } else {
    const float zeros[D / 2] = {};
    store_keys<G, D>(a, sh.task, zeros, zeros);
  }
}

}  // namespace fold::cuda::backward
