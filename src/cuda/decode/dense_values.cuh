#pragma once
#include "cuda/decode/dense_summer.cuh"
#include "numerics/block.h"

// DenseSummer: the weights of a tile's keys, and their products with its values.
namespace fold::cuda {

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::hide(unsigned unseen, int n) {
#pragma unroll 1
  for (int i = 0; i < kTile / 8; ++i) {
    if ((unseen >> i & 1) == 0) continue;
    for (int t = 0; t < Quads; ++t) w_.weight[4 * t + c_][8 * g_ + i] = __float_as_uint(-INFINITY);
    w_.scales[n % 2].v[8 * g_ + i] = 0;
  }
  __syncwarp();
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::weigh(const TileKeys& keys, bool settled, int n) {
  const unsigned may_low = p_.cache.layout.v_bits >= 8 ? 3 : 0, may_bytes = p_.cache.layout.v_bits == 16 ? 3 : 0;
  const unsigned bound_at = static_cast<unsigned>(s_.offsets.bound) / 2 + static_cast<unsigned>(now_.slot) / kTile;
  const float deeper = settled && task_.outliers != 0
                           ? numerics::outlier_depth(w_.scales[n % 2].bound[bound_at % 8], task_.typical)
                           : 0.0f;
  float v_l[Quads], v_b[Quads], per_e[Quads];
#pragma unroll
  for (int t = 0; t < Quads; ++t) {
    const QueryRow& row = s_.row[4 * t + c_];
    v_l[t] = -numerics::add(row.v_l, deeper);
    v_b[t] = -numerics::add(row.v_b, deeper);
    per_e[t] = row.per_e;
  }
  unsigned read_low = 0, read_bytes = 0;  // bit i: of key g + 8 i
  unsigned forced = keys.forced;
#pragma unroll kAtOnce
  for (int sub = 0; sub < 4; ++sub) {
    float x[2][Quads];
    bool asks_low[2] = {false, false}, asks_bytes[2] = {false, false};
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const float2 of = *reinterpret_cast<const float2*>(&w_.weight[4 * t + c_][8 * g_ + 2 * sub]);
      x[0][t] = of.x, x[1][t] = of.y;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        asks_low[j] |= x[j][t] >= v_l[t];
        asks_bytes[j] |= x[j][t] >= v_b[t];
      }
    }
    const unsigned l = (any_row(asks_low) | forced) & may_low, b = any_row(asks_bytes) & l & may_bytes;
    const uint32_t scales = *reinterpret_cast<const uint32_t*>(&w_.scales[n % 2].v[8 * g_ + 2 * sub]);
    const float e_v[2] = {__uint_as_float(scales << 16), __uint_as_float(scales & 0xFFFF0000u)};
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      unsigned d[2], w[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float scaled = scaled_exp2<numerics::kFraction>(fminf(x[j][t], numerics::kExp2Max), numerics::kExp2Min);
        d[j] = numerics::round_u32(scaled);
        w[j] = numerics::round_u32(numerics::mul(scaled, numerics::mul(e_v[j], per_e[t])));
        peak_[t] = fmaxf(peak_[t], x[j][t]);
      }
      den_[t] += static_cast<unsigned long long>(d[0]) + d[1];
      mass_[t] += static_cast<unsigned long long>(w[0]) + w[1];
      half_mass_[t] += static_cast<unsigned long long>((l & 1) != 0 ? 0 : w[0]) + ((l & 2) != 0 ? 0 : w[1]);
      *reinterpret_cast<uint2*>(&w_.weight[4 * t + c_][8 * g_ + 2 * sub]) = {w[0], w[1]};
    }
    prefetch(s_.offsets.v_b, b, sub);
    read_low = __funnelshift_r(read_low, l, 2);
    read_bytes = __funnelshift_r(read_bytes, b, 2);
    forced >>= 2;
  }
  read_low >>= 24, read_bytes >>= 24;
  if (c_ < 2) {  // of slots 8 g + 4 c and three more
    const unsigned four = read_low >> 4 * c_ & 15;
    w_.reads_low[2 * (g_ % 2) + c_][g_ / 2] = (four * 0x00204081u & 0x01010101u) * 0xFFu;
  }
  const int listed = list_keys(w_.bytes, read_bytes, lane_, [&](int i) { return static_cast<uint8_t>(8 * g_ + i); });
  if (lane_ == 0) {
    w_.v_b = now_.at(s_.offsets.v_b, D);
    w_.listed = listed;
  }
  keys_ += __popc(keys.seen);
  halves_ += __popc(read_low) + 2 * __popc(read_bytes);
  settled_ += settled ? 1 : 0;
  __syncwarp();
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::add_values() {
#pragma unroll 1
  for (int i = 0; i < kTeam; ++i) {
    const Warp& from = s_.warp[warp_ / kTeam * kTeam + i];
    if (from.v_b == nullptr) continue;
    uint32_t words[kMine][4];
    fetch_bytes(words, from, 0);
    add_nibbles(from);
    if (from.listed > 0) add_bytes(words, from, 0);
#pragma unroll 1
    for (int first = 16; first < from.listed; first += 16) {
      fetch_bytes(words, from, first);
      add_bytes(words, from, first);
    }
  }
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::fetch_bytes(uint32_t (&words)[kMine][4], const Warp& from, int first) const {
  const uint8_t* const channels = from.v_b + 32 * (warp_ % kTeam * kMine) + 4 * g_;
  const unsigned slots = *reinterpret_cast<const unsigned*>(from.bytes + first + 4 * c_);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (first + 4 * c_ + j >= from.listed) continue;  // what stands there counts nothing
    const uint8_t* const key = channels + numerics::scale_slot(slots >> 8 * j & 0xFF) * D;
#pragma unroll
    for (int p = 0; p < kMine; ++p) words[p][j] = __ldcg(reinterpret_cast<const uint32_t*>(key + 32 * p));
  }
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::add_nibbles(const Warp& from) {
  const unsigned pick = g_ % 2 == 0 ? 0x6240 : 0x7351;
  const uint4 packed = *reinterpret_cast<const uint4*>(from.reads_low[c_]);
  const uint32_t reads_low[4] = {packed.x, packed.y, packed.z, packed.w};
  const uint32_t rows = ptx::shared_address(from.v_h) + place_of_value<D>(named_key(lane_), warp_ % kTeam * kMine);
#pragma unroll
  for (int step = 0; step < 2; ++step) {  // 32 scale slots
    uint32_t weight[Quads][2][2];         // by half of them
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weight_columns(weight[t][half],
                       *reinterpret_cast<const uint4*>(&from.weight[4 * t + g_ / 2][32 * step + 16 * half + 4 * c_]),
                       pick);
      }
    }
#pragma unroll
    for (int p = 0; p < kMine; ++p) {
      const uint32_t place = (rows ^ 16 * p) + 4 * kHalf * step;
      uint32_t h[2][2], l[2][2];  // by byte of the pair
      load_pairs(place, h[0], h[1]);
      load_pairs(place + kTile * kHalf, l[0], l[1]);
#pragma unroll
      for (int byte = 0; byte < 2; ++byte) {
        uint32_t low[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t mask = reads_low[2 * step + half];
          low[half] = (l[byte][half] & mask) | (kNoLow & ~mask);
        }
        const uint32_t a0 = ptx::join_nibbles(h[byte][0], low[0] >> 4), a1 = ptx::join_nibbles(h[byte][0] << 4, low[0]);
        const uint32_t a2 = ptx::join_nibbles(h[byte][1], low[1] >> 4), a3 = ptx::join_nibbles(h[byte][1] << 4, low[1]);
#pragma unroll
        for (int t = 0; t < Quads; ++t) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            ptx::mma_u8u8(sums_[2 * p + byte][t][n], a0, a1, a2, a3, weight[t][0][n], weight[t][1][n]);
          }
        }
      }
    }
  }
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::add_bytes(const uint32_t (&words)[kMine][4], const Warp& from, int first) {
  const unsigned pick = g_ % 2 == 0 ? 0x6240 : 0x7351;
  const unsigned slots = *reinterpret_cast<const unsigned*>(from.bytes + first + 4 * c_);
  const int rest = from.listed - first - 4 * c_;
  uint32_t weight[Quads][2], units[kUnits] = {};
#pragma unroll
  for (int t = 0; t < Quads; ++t) {
    const unsigned* const of = from.weight[4 * t + g_ / 2];
    uint4 w;
    w.x = 0 < rest ? of[slots & 0xFF] : 0;
    w.y = 1 < rest ? of[slots >> 8 & 0xFF] : 0;
    w.z = 2 < rest ? of[slots >> 16 & 0xFF] : 0;
    w.w = 3 < rest ? of[slots >> 24] : 0;
    const uint32_t lowest = __byte_perm(__byte_perm(w.x, w.y, 0x0040), __byte_perm(w.z, w.w, 0x0040), 0x5410);
    const uint32_t of_column = __shfl_sync(kWarp, lowest, 8 * (g_ % 4) + c_);
    if (g_ / 4 == t % 2) units[t / 2] = of_column;
    weight_columns(weight[t], {w.x >> 8, w.y >> 8, w.z >> 8, w.w >> 8}, pick);
  }
#pragma unroll
  for (int p = 0; p < kMine; ++p) {
    uint32_t channel[4];
    transpose_bytes(channel, words[p]);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          ptx::mma_s8u8_k16(sums_[2 * p + m][t][n], channel[2 * m], channel[2 * m + 1], weight[t][n]);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        ptx::mma_s8u8_k16(units_[2 * p + m][u], channel[2 * m], channel[2 * m + 1], units[u]);
      }
    }
  }
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::clear() {
#pragma unroll
  for (int i = 0; i < 2 * kMine * Quads * 8; ++i) sums_[i / 8 / Quads][i / 8 % Quads][i / 4 % 2][i % 4] = 0;
#pragma unroll
  for (int i = 0; i < 2 * kMine * kUnits * 4; ++i) units_[i / 4 / kUnits][i / 4 % kUnits][i % 4] = 0;
#pragma unroll
  for (int t = 0; t < Quads; ++t) {
    den_[t] = mass_[t] = half_mass_[t] = 0;
    peak_[t] = -INFINITY;
  }
  keys_ = halves_ = settled_ = 0;
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::flush() {
  meet();  // the last weights have been read
  store_rows();
  __syncthreads();
  if (const int r = static_cast<int>(threadIdx.x); r < task_.rows) add_row(r);
  __syncthreads();
#pragma unroll 1
  for (int team = 0; team < kWarps / kTeam; ++team) {
    if (warp_ / kTeam == team) {
      const auto at = [&](int row, int m, int half) -> long long& {
        return s_.warp[row / Quads]
            .num[row % Quads][32 * (warp_ % kTeam * kMine + m / 2) + 4 * g_ + 2 * (m % 2) + half];
      };
#pragma unroll
      for (int i = 0; i < 2 * kMine * Quads * 2; ++i) {
        const int m = i / 2 / Quads, t = i / 2 % Quads, half = i % 2;
        long long& to = at(4 * t + c_, m, half);
        to = (team == 0 ? 0 : to) + 256 * joined(sums_[m][t], half);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2 * kMine * kUnits * 4; ++i) {
        const int m = i / 4 / kUnits, u = i / 4 % kUnits, row = 8 * u + 2 * c_ + i % 2;
        if (row < kRows) at(row, m, i % 4 / 2) += units_[m][u][i % 4];
      }
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < task_.rows * D; i += kThreads) {
    const int r = i / D;
    add_numerator(task_, r, i, s_.warp[r / Quads].num[r % Quads][i % D], s_.mass[r], s_.half_mass[r]);
  }
  __syncthreads();
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::store_rows() {
#pragma unroll
  for (int t = 0; t < Quads; ++t) {
    const unsigned long long den = sum_over_keys(den_[t]), mass = sum_over_keys(mass_[t]);
    const unsigned long long half_mass = sum_over_keys(half_mass_[t]);
    const int peak = max_over_keys(ordered(peak_[t]));
    if (g_ == 0) w_.of_warp[4 * t + c_] = {den, mass, half_mass, peak};
  }
  const unsigned keys = sum_over_keys(keys_);
  const uint64_t halves = sum_over_keys(halves_);
  if (lane_ != 0) return;
  w_.keys = keys;
  ptx::add_global(&task_.g.head->bytes, (2ull * keys + halves) * kHalf + 2 * (2ull * keys + settled_));
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::add_row(int r) {
  RowSums sums{0, 0, 0, 0, ordered(-INFINITY)};
  unsigned long long half_mass = 0;
#pragma unroll
  for (const Warp& warp : s_.warp) {
    const auto& row = warp.of_warp[r];
    sums.den += row.den;
    sums.mass += row.mass;
    sums.values_read += warp.keys;
    sums.peak = max(sums.peak, row.peak);
    half_mass += row.half_mass;
  }
  s_.mass[r] = sums.mass;
  s_.half_mass[r] = half_mass;
  add_row_sums(task_, r, sums);
}

}  // namespace fold::cuda
