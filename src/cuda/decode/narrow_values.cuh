#pragma once
#include "cuda/decode/narrow_summer.cuh"

// NarrowSummer: the products of a chunk's weights with its values, mean rows and codes, and what becomes of them.
namespace fold::cuda {

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::gather_values(const Spot& spot, int round) {
  __syncwarp();  // the tile's list and counts
  if (round == 0 && w_.slots > w_.live && lane_ < (w_.coded ? 2 : 1) * kLowChunks) {
    const uint8_t* const from =
        spot.at(0, 0) + spot.slot / kTile * D + (lane_ < kLowChunks ? s_.offsets.mean : s_.offsets.ubar - D);
    ptx::copy_16(ptx::shared_address(mean_row(warp_)) + 16 * lane_, from + 16 * lane_);
  }
  const int first = kSlots * round, first_low = kLowSlots * round;
  const int total = min(w_.live - first, kSlots), low = w_.low - first_low;
  const uint8_t* const v_h = spot.at(s_.offsets.v_h, kHalf);
  const uint8_t* const v_l = spot.at(s_.offsets.v_l, kHalf);
  uint8_t* const rows = s_.rows[warp_];
  const uint32_t to = ptx::shared_address(rows);
  const uint16_t* keys = w_.keys + first;
#pragma unroll 1
  for (int slot = lane_ / kPieces; slot < total; slot += 32 / kPieces) {
    const int piece = lane_ % kPieces, key = keys[slot] & 0xFF;
    ptx::copy_16(to + place_of_row<D>(slot, piece), v_h + key * kHalf + 16 * piece);
    const int l_at = place_of_row<D>(slot, kPieces + piece);
    if ((keys[slot] >> 8 & 1) != 0) {
      ptx::copy_16(to + l_at, v_l + key * kHalf + 16 * piece);
    } else {
      *reinterpret_cast<uint4*>(rows + l_at) = {kNoLow, kNoLow, kNoLow, kNoLow};
    }
  }
  if (low <= 0) return;
  const uint8_t* const v_b = spot.at(s_.offsets.v_b, D);
  keys = w_.keys + first_low;
#pragma unroll 1
  for (int slot = lane_ / kLowChunks; slot < kLowSlots; slot += 32 / kLowChunks) {
    const int piece = lane_ % kLowChunks, key = slot < low ? keys[slot] & 0xFF : 0;
    ptx::copy_16_or_zero(to + kSlots * D + place_of_row<D>(slot, piece), v_b + key * D + 16 * piece, slot < low);
  }
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::store_mean(int round) {
  __syncwarp();
  const int slot = w_.live - kSlots * round;
  if (w_.slots == w_.live || slot < 0 || slot >= kSlots) return;
#pragma unroll
  for (int word = lane_; word < D / 4; word += 32) {
    const uint32_t bytes = reinterpret_cast<const uint32_t*>(mean_row(warp_))[word] ^ 0x80808080u;
    const uint32_t even = __byte_perm(bytes, 0, 0x4420), odd = __byte_perm(bytes, 0, 0x4431);
    const auto store = [&](int first_piece, uint32_t nibbles) {
      const int at = place_of_row<D>(slot, first_piece + word / 8) + 2 * (word % 8);
      *reinterpret_cast<uint16_t*>(s_.rows[warp_] + at) = static_cast<uint16_t>(nibbles);
    };
    store(0, ptx::join_nibbles(even, odd >> 4));
    store(kPieces, ptx::join_nibbles(even << 4, odd));
  }
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::add_values(int round) {
  const int first = kSlots * round;
  const int slot = named_row(lane_);
  const int h_at = place_of_row<D>(slot, nibble_piece()), l_at = place_of_row<D>(slot, nibble_piece() + kHalf / 16);
  const unsigned pick = g_ % 2 == 0 ? 0x6240 : 0x7351;
#pragma unroll 1
  for (int from = 0; from < kChunkTiles; ++from) {
    if (s_.warp[from].slots > first) add_nibbles(from, first, h_at, l_at, pick);
    if (s_.warp[from].low > kLowSlots * round) add_low(from, kLowSlots * round, pick);
  }
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::load_weights(uint32_t (&columns)[2], int from, int t, int slot,
                                                     unsigned pick) const {
  const uint4 four = *reinterpret_cast<const uint4*>(&s_.warp[from].weight[4 * t + g_ / 2][slot + 4 * c_]);
  weight_columns(columns, four, pick);
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::add_nibbles(int from, int first, int h_at, int l_at, unsigned pick) {
  uint32_t weight[Quads][2][2];  // by half of the slots
#pragma unroll
  for (int t = 0; t < Quads; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) load_weights(weight[t][half], from, t, first + 16 * half, pick);
  }
  const uint32_t rows = ptx::shared_address(s_.rows[from]);
  uint32_t h[2][2], l[2][2];  // by byte of the pair
  load_pairs(rows + h_at, h[0], h[1]);
  load_pairs(rows + l_at, l[0], l[1]);
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
    const int byte = nibble_byte(m);
    const uint32_t h0 = byte == 0 ? h[0][0] : h[1][0], h1 = byte == 0 ? h[0][1] : h[1][1];
    const uint32_t l0 = byte == 0 ? l[0][0] : l[1][0], l1 = byte == 0 ? l[0][1] : l[1][1];
    const uint32_t a0 = ptx::join_nibbles(h0, l0 >> 4), a1 = ptx::join_nibbles(h0 << 4, l0);
    const uint32_t a2 = ptx::join_nibbles(h1, l1 >> 4), a3 = ptx::join_nibbles(h1 << 4, l1);
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        ptx::mma_u8u8(value_[m][t][n], a0, a1, a2, a3, weight[t][0][n], weight[t][1][n]);
      }
    }
  }
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::add_low(int from, int first, unsigned pick) {
  const int matrix = lane_ / 8, row = lane_ % 8;
  const int slot = 4 * (row / 2) + 2 * (matrix % 2) + row % 2, piece = warp_ * kTilesM + min(matrix / 2, kTilesM - 1);
  uint32_t pairs[4];
  ptx::load_transposed(pairs, ptx::shared_address(s_.rows[from]) + kSlots * D + place_of_row<D>(slot, piece));
#pragma unroll
  for (int t = 0; t < Quads; ++t) {
    uint32_t weight[2];
    load_weights(weight, from, t, first, pick);
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
      const uint32_t even = __byte_perm(pairs[2 * m], pairs[2 * m + 1], 0x6420);
      const uint32_t odd = __byte_perm(pairs[2 * m], pairs[2 * m + 1], 0x7531);
#pragma unroll
      for (int n = 0; n < 2; ++n) ptx::mma_s8u8_k16(low_value_[m][t][n], even, odd, weight[n]);
    }
  }
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::add_mean_codes() {
  const int channel = threadIdx.x % D, part = threadIdx.x / D;
  int sum[kRows] = {};
  bool any = false;
#pragma unroll
  for (int i = 0; i < kChunkTiles / kParts; ++i) {
    const int from = i * kParts + part;
    const Warp& tile = s_.warp[from];
    if (!tile.coded) continue;
    any = true;
    const int ubar = mean_row(from)[D + channel];
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const int4 codes = *reinterpret_cast<const int4*>(&tile.codes[4 * t]);
      sum[4 * t] += codes.x * ubar;
      sum[4 * t + 1] += codes.y * ubar;
      sum[4 * t + 2] += codes.z * ubar;
      sum[4 * t + 3] += codes.w * ubar;
    }
  }
  if (!any) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) s_.ubar[r][threadIdx.x] += sum[r];
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::add_codes() {
  const int matrix = lane_ / 8, row = lane_ % 8;
  // Key g + 8 i has its code at 32 (i / 4) + 4 g + i % 4, which the load has to match.
  const int key = 4 * (matrix / 2) + row / 2 + 8 * (2 * (matrix % 2) + row % 2);
  uint32_t rows = ptx::shared_address(s_.warp[0].k_h) + key * kHalf + 16 * nibble_piece();
#pragma unroll 1
  for (int from = 0; from < kChunkTiles; ++from, rows += sizeof(Warp)) {
    if (!s_.warp[from].coded) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!kWholePiece && half != warp_ % 2) continue;
      uint32_t even[2], odd[2];
      load_pairs(rows + 32 * half * kHalf, even, odd);
      constexpr uint32_t kOdd = 0x0F0F0F0Fu;
#pragma unroll
      for (int n = 0; n < kCodeColumns; ++n) {  // columns past the last row's count nowhere
        const auto* const code =
            reinterpret_cast<const uint32_t*>(s_.warp[from].code[(8 * n + g_) % kRows]) + (8 * half + c_);
        ptx::mma_u8u8(code_pair_[n], even[0], odd[0], even[1], odd[1], code[0], code[4]);
        ptx::mma_u8u8(code_odd_[n], even[0] & kOdd, odd[0] & kOdd, even[1] & kOdd, odd[1] & kOdd, code[0], code[4]);
      }
    }
  }
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::clear_accumulators() {
#pragma unroll
  for (int t = 0; t < Quads; ++t) {
    den_[t] = value_mass_[t] = half_mass_[t] = 0;
    peak_[t] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kTilesM * 2 * 4; ++i) {
      value_[i / 8][t][i / 4 % 2][i % 4] = 0;
      low_value_[i / 8][t][i / 4 % 2][i % 4] = 0;
    }
  }
#pragma unroll
  for (int i = 0; i < 4 * kCodeColumns; ++i) code_pair_[i / 4][i % 4] = code_odd_[i / 4][i % 4] = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) s_.ubar[r][threadIdx.x] = 0;
  if (lane_ == 0) w_.values = w_.bytes = 0;
  if (lane_ < kRows) w_.dropped[lane_] = 0;
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::flush() {
  // A sum has one owner at a time.
  long long *const num = s_.sums.num, *const code_sum = s_.sums.code;
  const auto for_values = [&](const int(&of)[kTilesM][Quads][2][4], auto channel, auto f) {
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          f(num[(4 * t + c_) * D + channel(m) + half], joined(of[m][t], half));
        }
      }
    }
  };
  __syncthreads();
  for_values(
      value_, [&](int m) { return 32 * nibble_piece() + 4 * g_ + 2 * nibble_byte(m); },
      [](long long& to, long long sum) { to = 256 * sum; });
  const bool second = !kWholePiece && warp_ % 2 != 0;  // two warps have a piece's codes
  if (!second) for_codes([&](int at, long long sum) { code_sum[at] = sum; });
#pragma unroll
  for (int t = 0; t < Quads; ++t) store_row(t);
  __syncthreads();
  for_values(
      low_value_, [&](int m) { return 16 * (warp_ * kTilesM + m) + 2 * g_; },
      [](long long& to, long long sum) { to += sum; });
  if (second) for_codes([&](int at, long long sum) { code_sum[at] += sum; });
  if (const int r = static_cast<int>(threadIdx.x); r < task_.rows) add_row(r);
  if (lane_ == 0) ptx::add_global(&task_.g.head->bytes, w_.bytes);
  __syncthreads();
  add_to_group();
  clear_accumulators();
}

template <int D, int Quads>
template <class F>
__device__ void NarrowSummer<D, Quads>::for_codes(F f) const {
#pragma unroll
  for (int i = 0; i < 4 * kCodeColumns; ++i) {  // byte columns g and g + 8 of the pairs, query rows 2 c and 2 c + 1
    const int r = 8 * (i / 4) + 2 * c_ + i % 2, byte = 16 * nibble_piece() + 2 * g_ + i % 4 / 2;
    if (r >= kRows) continue;
    const int odd = code_odd_[i / 4][i % 4];
    f(r * D + 2 * byte, static_cast<long long>(code_pair_[i / 4][i % 4]) - odd);
    f(r * D + 2 * byte + 1, 16ll * odd);
  }
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::store_row(int t) {
  const int r = 4 * t + c_;
  const uint64_t den = sum_over_keys(static_cast<uint64_t>(den_[t]));
  const uint64_t value_mass = sum_over_keys(static_cast<uint64_t>(value_mass_[t]));
  const uint64_t half_mass = sum_over_keys(static_cast<uint64_t>(half_mass_[t]));
  const int peak = max_over_keys(ordered(peak_[t]));
  if (g_ == 0) rows_of(w_)[r] = {den, value_mass, half_mass, peak};
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::add_row(int r) {
  RowSums sums{0, 0, 0, 0, ordered(-INFINITY)};
  unsigned long long half_mass = 0;
#pragma unroll
  for (Warp& of_warp : s_.warp) {
    const RowOfWarp& row = rows_of(of_warp)[r];
    sums.den += row.den + of_warp.dropped[r];
    sums.mass += row.value_mass;
    sums.dropped += of_warp.dropped[r];
    sums.values_read += of_warp.values;
    sums.peak = max(sums.peak, row.peak);
    half_mass += row.half_mass;
  }
  s_.value_mass[r] = sums.mass;
  s_.half_mass[r] = half_mass;
  add_row_sums(task_, r, sums);
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::add_to_group() {
  const GroupState& g = task_.g;
#pragma unroll 1
  for (int i = threadIdx.x; i < task_.rows * D; i += kThreads) {
    const int r = i / D;
    add_numerator(task_, r, i, s_.sums.num[i], s_.value_mass[r], s_.half_mass[r]);
  }
  if (task_.fit_mark > 0) {
    const plan::HeadPage page = page_of(step_, task_.batch, task_.kv_head, task_.fit_mark - 1);
    const int8_t* in = page.fit_in + plan::fit_slot(task_.fit_mark, layout_.page_size) * numerics::kRank * D;
    constexpr int kMine = numerics::kRank / kChunkTiles;  // directions of a warp
    int8_t direction[kMine][D / 32];
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
#pragma unroll
      for (int i = 0; i < D / 32; ++i) direction[j][i] = in[(warp_ * kMine + j) * D + lane_ + 32 * i];
    }
#pragma unroll 1
    for (int r = 0; r < task_.rows; ++r) {
      long long t[kMine] = {};
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        const int channel = lane_ + 32 * i;
        long long sum = s_.sums.code[r * D + channel];
#pragma unroll
        for (int part = 0; part < kParts; ++part) sum -= s_.ubar[r][channel + part * D];
#pragma unroll
        for (int j = 0; j < kMine; ++j) t[j] += direction[j][i] * sum;
      }
      long long mine = 0;  // lane j < kMine takes direction j's
#pragma unroll
      for (int j = 0; j < kMine; ++j) {
        const long long sum = warp_sum(t[j]);
        mine = lane_ == j ? sum : mine;
      }
      if (mine == 0) continue;
      ptx::add_global(&g.t[r * numerics::kRank + warp_ * kMine + lane_], static_cast<unsigned long long>(mine));
    }
  }
  __syncthreads();
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::end() {
  if (lane_ == 0) ptx::invalidate_barrier(ptx::shared_address(&w_.barrier));
  __syncthreads();
}

}  // namespace fold::cuda
