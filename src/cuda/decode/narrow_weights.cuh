#pragma once
#include "cuda/decode/narrow_summer.cuh"

// NarrowSummer: the weights of a tile's keys, and which of its values are read.
namespace fold::cuda {

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::weigh(const float (&x)[8][Quads], const TileKeys& keys, bool settled) {
  const unsigned seen = keys.seen, forced = keys.forced;
  const float deeper = settled ? numerics::outlier_depth(of_block(w_.place.bound), task_.typical) : 0.0f;
  unsigned quiet_h = 0, quiet_l = 0, quiet_b = 0;  // sign bits of x above the gate
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    float h, l, b;
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const typename Shared::Row& row = s_.row[4 * t + c_];
      const float above_h = numerics::add(x[i][t], numerics::add(row.v_h, deeper));
      const float above_l = numerics::add(x[i][t], numerics::add(row.v_l, deeper));
      const float above_b = numerics::add(x[i][t], numerics::add(row.v_b, deeper));
      h = t == 0 ? above_h : fmaxf(h, above_h);
      l = t == 0 ? above_l : fmaxf(l, above_l);
      b = t == 0 ? above_b : fmaxf(b, above_b);
    }
    quiet_h = __funnelshift_l(__float_as_uint(h), quiet_h, 1);
    quiet_l = __funnelshift_l(__float_as_uint(l), quiet_l, 1);
    quiet_b = __funnelshift_l(__float_as_uint(b), quiet_b, 1);
  }
  const unsigned asks = any_row(~(quiet_h | quiet_l << 8 | quiet_b << 16));
  const unsigned read = (asks | forced | s_.every) & seen;
  const unsigned read_l = layout_.v_bits >= 8 ? (asks >> 8 | forced) & read : 0;
  const unsigned read_b = layout_.v_bits == 16 ? asks >> 16 & read_l : 0;
  // Slots: keys whose b is read before the rest.
  const Slots slots =
      number(__popc(read_b) | __popc(read & ~read_b) << 8 | __popc(read_l) << 16 | __popc(seen) << 24, lane_);
  const int low = slots.total & 0xFF, live = low + (slots.total >> 8 & 0xFF), l_keys = slots.total >> 16 & 0xFF;
  const auto entry = [&](int i) { return static_cast<uint16_t>((g_ + 8 * i) | (read_l >> i & 1) << 8); };
  list(w_.keys, read_b, slots.before & 0xFF, entry);
  list(w_.keys, read & ~read_b, low + (slots.before >> 8 & 0xFF), entry);
  __syncwarp();
  const bool gone = __any_sync(kWarp, read != seen);
  unsigned mean_weight[Quads] = {}, coded = 0;
  if (gone) {
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      float of_row[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) of_row[i] = x[i][t];
      coded |= s_.loud != 0 ? weigh_dropped<uint64_t>(of_row, t, seen & ~read, mean_weight[t])
                            : weigh_dropped<unsigned>(of_row, t, seen & ~read, mean_weight[t]);
    }
  }
  const bool mean = gone && layout_.tail;
  weigh_values(live, mean, mean_weight);
  if (lane_ != 0) return;
  const int filled = live + mean;
  w_.live = live;
  w_.slots = filled;
  w_.low = low;
  w_.rounds = max((filled + kSlots - 1) / kSlots, (low + kLowSlots - 1) / kLowSlots);
  w_.coded = static_cast<int>(coded);
  w_.values += live;
  w_.bytes += (slots.total >> 24) * (kHalf + 2) + live * (kHalf + 2) + l_keys * kHalf + low * D + (settled ? 2 : 0) +
              (mean ? D + 2 + (task_.fit_mark > 0 ? D : 0) : 0);
}

template <int D, int Quads>
template <typename Sum>
__device__ bool NarrowSummer<D, Quads>::weigh_dropped(const float (&x)[8], int t, unsigned dropped,
                                                      unsigned& mean_weight) {
  const typename Shared::Row& row = s_.row[4 * t + c_];
  const unsigned half = (1u << row.fit_shift) >> 1;
  unsigned codes[2] = {0, 0};
  Sum sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned rounded =
        numerics::round_u32(scaled_exp2<numerics::kFraction>(fminf(x[i], numerics::kExp2Max), numerics::kExp2Min));
    const unsigned d = (dropped >> i & 1) != 0 ? rounded : 0;
    sum += d;
    const unsigned shifted = ((sizeof(Sum) == 8 ? min(d, 0xFF000000u) : d) + half) >> row.fit_shift;
    codes[i / 4] += min(255u, shifted) << (8 * (i % 4));
  }
  const Sum block_mass = sum_over_keys(sum);
  if (g_ == 0) w_.dropped[4 * t + c_] += block_mass;
  if (!layout_.tail) return false;
  if (const uint16_t mean_scale = of_block(w_.place.mean_scale); mean_scale != numerics::kBf16Nan) {
    const double share =  // exact
        __dmul_rn(static_cast<double>(numerics::from_bf16(mean_scale)), static_cast<double>(row.per_e));
    mean_weight = static_cast<unsigned>(fmin(rint(__dmul_rn(static_cast<double>(block_mass), share)), 4294967295.0));
  }
  if (task_.fit_mark == 0) return false;
  auto* const to = reinterpret_cast<uint32_t*>(w_.code[4 * t + c_]) + g_;
  to[0] = codes[0];
  to[8] = codes[1];
  const unsigned sum_codes = sum_over_keys(__dp4a(codes[0], 0x01010101u, __dp4a(codes[1], 0x01010101u, 0u)));
  if (g_ == 0) w_.codes[4 * t + c_] = static_cast<int>(sum_codes);
  return __any_sync(kWarp, sum_codes != 0);
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::weigh_values(int live, bool mean, const unsigned (&mean_weight)[Quads]) {
  const int filled = live + mean;
  int base = 0;
#pragma unroll 1
  for (; base < filled; base += 16) {  // slots base + g and 8 more
    bool read[2], only_h[2];
    float x[2][Quads], e_v[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int slot = base + g_ + 8 * j;
      read[j] = slot < live;
      const unsigned entry = read[j] ? w_.keys[slot] : 0;
      only_h[j] = read[j] && (entry >> 8 & 1) == 0;
      const int at = numerics::scale_slot(static_cast<int>(entry & 0xFF));
      e_v[j] = numerics::from_bf16(w_.v_scale[at]);
#pragma unroll
      for (int t = 0; t < Quads; ++t) x[j][t] = w_.x[4 * t + c_][at];
    }
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const float per_e = s_.row[4 * t + c_].per_e;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int slot = base + g_ + 8 * j;
        const float scaled = scaled_exp2<numerics::kFraction>(fminf(x[j][t], numerics::kExp2Max), numerics::kExp2Min);
        const unsigned weight = numerics::round_u32(numerics::mul(scaled, numerics::mul(e_v[j], per_e)));
        const unsigned w = read[j] ? weight : slot == live ? mean_weight[t] : 0;
        w_.weight[4 * t + c_][slot] = w;
        den_[t] += read[j] ? numerics::round_u32(scaled) : 0;
        value_mass_[t] += w;
        half_mass_[t] += only_h[j] ? w : 0;
        peak_[t] = read[j] ? fmaxf(peak_[t], x[j][t]) : peak_[t];
      }
    }
  }
  if (base % kSlots == 0) return;
#pragma unroll
  for (int r = lane_ / 16; r < kRows; r += 2) w_.weight[r][base + lane_ % 16] = 0;
}

}  // namespace fold::cuda
