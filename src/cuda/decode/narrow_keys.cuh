#pragma once
#include "cuda/decode/narrow_summer.cuh"

// NarrowSummer: the logits of a tile's keys, as deeply as its rows ask.
namespace fold::cuda {

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::score() {
  float x[8][Quads];
  if (w_.place.tile != kNoTile) {
    ptx::wait_copies();
    __syncwarp();
    ptx::wait_barrier(ptx::shared_address(&w_.barrier), (w_.place.chunk - task_.tiles.begin) / kChunkTiles % 2);
  }
  unsigned wanted = scan(x);
  __syncthreads();  // the values of the chunk before are done with what the rest overwrites
  if (w_.place.tile == kNoTile) {
    if (lane_ == 0) w_.slots = w_.low = w_.live = w_.rounds = w_.coded = 0;
    return;
  }
  store_x(x);
  const auto find_keys = [&] {  // twice, as they are not to take up registers in between
    const Visible& visible = task_.visible;
    const int tile = w_.place.tile;
    return w_.place.settled ? settled_keys(visible.first, tile, g_) : keys_of_unsettled(visible, tile, g_);
  };
  const TileKeys keys = find_keys();
  wanted = layout_.k_bits >= 8 ? (any_row(wanted) | keys.forced) & keys.seen : 0;
  const Slots level_1 = number(__popc(wanted), lane_);
  if (level_1.total > 0) {
    read_deeper(wanted, level_1);
    load_x(x);
  }
  weigh(x, find_keys(), w_.place.settled);
  gather_values(w_.place.spot, 0);
}

template <int D, int Quads>
__device__ unsigned NarrowSummer<D, Quads>::scan(float (&x)[8][Quads]) {
  const uint4 packed = *reinterpret_cast<const uint4*>(&w_.k_scale[8 * g_]);
  const uint32_t scales[4] = {packed.x, packed.y, packed.z, packed.w};
  unsigned quiet = 0;  // sign bits of x above the gate
#pragma unroll
  for (int sub = 3; sub >= 0; --sub) {
    __syncwarp();  // nothing moves across: all at once would take too many registers
    uint32_t low_key[kWords], high_key[kWords];
    load_words(low_key, w_.k_h + (16 * sub + g_) * kHalf + c_ * (D / 8));
    load_words(high_key, w_.k_h + (16 * sub + 8 + g_) * kHalf + c_ * (D / 8));
    float most[2] = {-INFINITY, -INFINITY};  // a NaN does not ask
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const typename Shared::Row& row = s_.row[4 * t + c_];
      int dot[4] = {row.first_sum, 0, row.first_sum, 0};
#pragma unroll
      for (int w = 0; w < kWords; w += 2) {
        const uint4 q = s_.scan[t][w / 2][lane_];
        ptx::mma_u8s8(dot, low_key[w], high_key[w], low_key[w + 1], high_key[w + 1], q.x, q.y);
        constexpr uint32_t kOdd = 0x0F0F0F0Fu;
        ptx::mma_u8s8(dot, low_key[w] & kOdd, high_key[w] & kOdd, low_key[w + 1] & kOdd, high_key[w + 1] & kOdd, q.z,
                      q.w);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 2 * sub + half;
        const float e_k = __uint_as_float(half == 0 ? scales[sub] << 16 : scales[sub] & 0xFFFF0000u);
        // 16 sum (u - 7.5) qa, exact in a mantissa; then D0.
        const float centred = numerics::sub(__int_as_float(dot[2 * half] + 16 * dot[2 * half + 1]), kRoundMagicFloat);
        const float d0 = numerics::fma(centred, 2.0f, -row.sum_a);
        x[i][t] = numerics::fma(numerics::mul(d0, row.unit_0), e_k, row.neg_z);
        const float above = numerics::add(numerics::fma(row.margin, e_k, x[i][t]), row.k_l);
        most[half] = fmaxf(most[half], above);
      }
    }
    quiet = __funnelshift_l(__float_as_uint(most[1]), quiet, 1);
    quiet = __funnelshift_l(__float_as_uint(most[0]), quiet, 1);
  }
  return ~quiet;
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::store_x(const float (&x)[8][Quads]) {
#pragma unroll
  for (int t = 0; t < Quads; ++t) {
    auto* to = reinterpret_cast<float4*>(&w_.x[4 * t + c_][8 * g_]);
    to[0] = {x[0][t], x[1][t], x[2][t], x[3][t]};
    to[1] = {x[4][t], x[5][t], x[6][t], x[7][t]};
  }
  __syncwarp();
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::load_x(float (&x)[8][Quads]) {
  __syncwarp();
#pragma unroll
  for (int t = 0; t < Quads; ++t) {
    const auto* from = reinterpret_cast<const float4*>(&w_.x[4 * t + c_][8 * g_]);
    const float4 a = from[0], b = from[1];
    const float all[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i][t] = all[i];
  }
}

template <int D, int Quads>
template <typename T, class F>
__device__ void NarrowSummer<D, Quads>::list(T* to, unsigned bits, int before, F entry) const {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int i = 2 * c_ + j;
    if ((bits >> i & 1) != 0) to[before + __popc(bits & ((1u << i) - 1))] = entry(i);
  }
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::read_deeper(unsigned wanted, const Slots& slots) {
  const uint8_t* const keys = this->keys();
  list(this->keys(), wanted, slots.before, [&](int i) { return static_cast<uint8_t>(g_ + 8 * i); });
  __syncwarp();
  uint8_t* const rows = s_.rows[warp_];
  const uint32_t to = ptx::shared_address(rows);
  const uint8_t* const k_l = w_.place.spot.at(s_.offsets.k_l, kHalf);
  constexpr int kAtOnce = 32 / kPieces;
#pragma unroll 1
  for (int slot = lane_ / kPieces; slot < slots.total; slot += kAtOnce) {
    const int piece = lane_ % kPieces;
    ptx::copy_16(to + slot * kHalf + 16 * piece, k_l + keys[slot] * kHalf + 16 * piece);
  }
  ptx::wait_copies();
  __syncwarp();
  int further = 0;
#pragma unroll 1
  for (int first = 0; first < slots.total; first += 16) further = level_1(rows, first, slots.total, further);
  __syncwarp();
  if (further > 0) level_2(further);
  if (lane_ == 0) w_.bytes += slots.total * kHalf + further * D;
}

template <int D, int Quads>
__device__ int NarrowSummer<D, Quads>::level_1(const uint8_t* rows, int first, int total, int further) {
  const int slot[2] = {first + g_, first + 8 + g_};
  int key[2];
  uint32_t h[2][kWords], l[2][kWords];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    key[j] = slot[j] < total ? keys()[slot[j]] : 0;
    load_words(h[j], w_.k_h + key[j] * kHalf + c_ * (D / 8));
    load_words(l[j], rows + slot[j] * kHalf + c_ * (D / 8));
  }
  const float e_k[2] = {key_scale(key[0]), key_scale(key[1])};
  int d1[2][Quads];
  float x[2][Quads];
  unsigned asks = 0;
#pragma unroll
  for (int t = 0; t < Quads; ++t) {
    const typename Shared::Row& row = s_.row[4 * t + c_];
    const uint8_t* const q = query(task_.g.a_split, task_.g.b_split, t) + c_ * 4 * kWords;
    uint32_t even[kWords], odd[kWords];
    load_words(even, q);
    load_words(odd, q + D / 2);
    int dot[4] = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      multiply_nibbles(dot, {h[0][w], h[1][w]}, {l[0][w], l[1][w]}, {even[w], odd[w]});
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      d1[j][t] = 256 * dot[2 * j] + dot[2 * j + 1] - row.sum_128;
      x[j][t] = numerics::fma(logit(d1[j][t], row.unit_1), e_k[j], row.neg_z);
      asks |= static_cast<unsigned>(numerics::fma(row.margin_16, e_k[j], x[j][t]) >= -row.k_b) << j;
    }
  }
  asks = layout_.k_bits == 16 ? any_row(asks) : 0;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const bool listed = slot[j] < total, deeper = listed && (asks >> j & 1) != 0;
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      if (!listed) continue;
      w_.x[4 * t + c_][numerics::scale_slot(key[j])] = deeper ? __int_as_float(d1[j][t]) : x[j][t];
    }
    const unsigned who = __ballot_sync(kWarp, deeper && c_ == 0);
    if (deeper && c_ == 0) {
      low_keys()[further + __popc(who & ((1u << lane_) - 1))] = static_cast<uint8_t>(key[j]);
    }
    further += __popc(who);
  }
  return further;
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::level_2(int total) {
#pragma unroll 1
  for (int first = 0; first < total; first += kSlots) {
    __syncwarp();  // what stood there has been read
    level_2(low_keys() + first, min(total - first, kSlots));
  }
}

template <int D, int Quads>
__device__ void NarrowSummer<D, Quads>::level_2(const uint8_t* keys, int total) {
  uint8_t* const rows = s_.rows[warp_];
  const uint32_t to = ptx::shared_address(rows);
  const uint8_t* const k_b = w_.place.spot.at(s_.offsets.k_b, D);
#pragma unroll 1
  for (int slot = lane_ / kLowChunks; slot < total; slot += 32 / kLowChunks) {
    const int piece = lane_ % kLowChunks;
    ptx::copy_16(to + swizzled<D>(slot, piece), k_b + keys[slot] * D + 16 * piece);
  }
  ptx::wait_copies();
  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < total; first += 16) {
    const int slot[2] = {first + g_, first + 8 + g_};
    int key[2];
    uint32_t b[2][2 * kWords];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      key[j] = slot[j] < total ? keys[slot[j]] : 0;
#pragma unroll
      for (int i = 0; i < kWords / 2; ++i) {
        const uint4 v = *reinterpret_cast<const uint4*>(rows + swizzled<D>(slot[j], c_ * (kWords / 2) + i));
        b[j][4 * i] = v.x, b[j][4 * i + 1] = v.y, b[j][4 * i + 2] = v.z, b[j][4 * i + 3] = v.w;
      }
    }
    const float e_k[2] = {key_scale(key[0]), key_scale(key[1])};
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const typename Shared::Row& row = s_.row[4 * t + c_];
      int dot[4] = {0, 0, 0, 0};
      const uint8_t* const q = query(task_.g.a, task_.g.b, t) + c_ * 8 * kWords;
      uint32_t words[2][kWords];
      load_words(words[0], q);
      load_words(words[1], q + 4 * kWords);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t(&of)[kWords] = words[2 * w / kWords];
        ptx::mma_s8s8(dot, b[0][2 * w], b[1][2 * w], b[0][2 * w + 1], b[1][2 * w + 1], of[2 * w % kWords],
                      of[2 * w % kWords + 1]);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (slot[j] >= total) continue;
        float& x = w_.x[4 * t + c_][numerics::scale_slot(key[j])];
        const float f = logit_2(__float_as_int(x), 256 * dot[2 * j] + dot[2 * j + 1], row.e_q);
        x = numerics::fma(f, e_k[j], row.neg_z);
      }
    }
  }
}

}  // namespace fold::cuda
