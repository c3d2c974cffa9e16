#pragma once
#include "cuda/decode/dense_summer.cuh"

// DenseSummer: the logits of a tile's keys.
namespace fold::cuda {

template <int D, int Quads>
__device__ auto DenseSummer<D, Quads>::score(const TileKeys& keys, int n) -> Deeper {
  const unsigned may_low = p_.cache.layout.k_bits >= 8 ? 3 : 0, may_bytes = p_.cache.layout.k_bits == 16 ? 3 : 0;
  Deeper deeper{0, 0};
  unsigned seen = keys.seen, forced = keys.forced;
#pragma unroll kAtOnce
  for (int sub = 0; sub < 4; ++sub) {  // keys g + 16 sub and 8 more
    uint32_t h[2][kWords], l[2][kWords];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int key = (16 * sub + 8 * j + g_) * kHalf + c_ * (D / 8);
      load_words(h[j], w_.k_h + key);
      load_words(l[j], w_.k_l + key);
    }
    const uint32_t scales = *reinterpret_cast<const uint32_t*>(&w_.scales[n % 2].k[8 * g_ + 2 * sub]);
    const float e_k[2] = {__uint_as_float(scales << 16), __uint_as_float(scales & 0xFFFF0000u)};
    float x[2][Quads];
    bool asks_low[2] = {false, false}, asks_bytes[2] = {false, false};
    int d1[2][Quads];
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const QueryRow& row = s_.row[4 * t + c_];
      constexpr uint32_t kHigh = 0xF0F0F0F0u, kLow = 0x0F0F0F0Fu;
      int of_h[4] = {0, 0, 0, 0}, of_l[4] = {0, 0, 0, 0};
      const auto multiply = [&](int(&dot)[4], int w, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
        const uint4 q = s_.fragment[t][w / 2][lane_];
        ptx::mma_u8s8(dot, a0, a1, a2, a3, w % 2 == 0 ? q.x : q.z, w % 2 == 0 ? q.y : q.w);
      };
#pragma unroll
      for (int w = 0; w < kWords; ++w) {  // 16 u
        multiply(of_h, w, h[0][w] & kHigh, h[1][w] & kHigh, h[0][w] << 4 & kHigh, h[1][w] << 4 & kHigh);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int magic_d0 = 2 * of_h[2 * j] + row.first_sum;
        // Up to head dim 128 below 2^22: exact beside the magic number.
        const float d0 = D <= 128 ? numerics::sub(__int_as_float(magic_d0), kRoundMagicFloat)
                                  : static_cast<float>(magic_d0 - kRoundMagic);
        x[j][t] = numerics::fma(numerics::mul(d0, row.unit_0), e_k[j], row.neg_z);
        asks_low[j] |= numerics::fma(row.margin, e_k[j], x[j][t]) >= -row.k_l;
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        multiply(of_l, w, l[0][w] >> 4 & kLow, l[1][w] >> 4 & kLow, l[0][w] & kLow, l[1][w] & kLow);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        d1[j][t] = 256 * (of_h[2 * j] + of_l[2 * j]) + (of_h[2 * j + 1] + of_l[2 * j + 1] - row.sum_128);
      }
    }
    const unsigned low = (any_row(asks_low) | forced) & seen & may_low;
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const QueryRow& row = s_.row[4 * t + c_];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float x1 = numerics::fma(logit(d1[j][t], row.unit_1), e_k[j], row.neg_z);
        asks_bytes[j] |= numerics::fma(row.margin_16, e_k[j], x1) >= -row.k_b;
        x[j][t] = (low >> j & 1) != 0 ? x1 : x[j][t];
      }
    }
    const unsigned bytes = any_row(asks_bytes) & low & may_bytes;
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      float2 to;
      to.x = (bytes & 1) != 0 ? __int_as_float(d1[0][t]) : x[0][t];
      to.y = (bytes & 2) != 0 ? __int_as_float(d1[1][t]) : x[1][t];
      *reinterpret_cast<float2*>(&w_.weight[4 * t + c_][8 * g_ + 2 * sub]) = to;
    }
    prefetch(s_.offsets.k_b, bytes, sub);
    deeper.low = __funnelshift_r(deeper.low, low, 2);
    deeper.bytes = __funnelshift_r(deeper.bytes, bytes, 2);
    seen >>= 2;
    forced >>= 2;
  }
  return {deeper.low >> 24, deeper.bytes >> 24};
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::prefetch(int section, unsigned wanted, int sub) const {
  if constexpr (D >= 128) {
    const uint8_t* const rows = now_.at(section, D) + (16 * sub + g_) * D;
    ptx::prefetch_if(c_ == 0 && (wanted & 1) != 0, rows);
    ptx::prefetch_if(c_ == 0 && (wanted & 2) != 0, rows + 8 * D);
  }
}

template <int D, int Quads>
__device__ void DenseSummer<D, Quads>::level_2(int total, int n) {
  const uint8_t* const k_b = now_.at(s_.offsets.k_b, D) + c_ * (D / 4);
#pragma unroll 1
  for (int first = 0; first < total; first += 16) {
    int at[2];
    uint32_t b[2][2 * kWords];
    float e_k[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int slot = first + g_ + 8 * j, key = w_.bytes[slot < total ? slot : first];
      fetch_words(b[j], k_b + key * D);
      at[j] = numerics::scale_slot(key);
      e_k[j] = numerics::from_bf16(w_.scales[n % 2].k[at[j]]);
    }
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      int dot[4] = {0, 0, 0, 0};
#pragma unroll
      for (int w = 0; w < kWords; w += 2) {
        const uint4 q = s_.fragment[t][Shared::kPairs + w / 2][lane_];
        ptx::mma_s8s8(dot, b[0][2 * w], b[1][2 * w], b[0][2 * w + 1], b[1][2 * w + 1], q.x, q.y);
        ptx::mma_s8s8(dot, b[0][2 * w + 2], b[1][2 * w + 2], b[0][2 * w + 3], b[1][2 * w + 3], q.z, q.w);
      }
      const QueryRow& row = s_.row[4 * t + c_];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (first + g_ + 8 * j >= total) continue;
        unsigned& x = w_.weight[4 * t + c_][at[j]];
        const float f = logit_2(static_cast<int>(x), 256 * dot[2 * j] + dot[2 * j + 1], row.e_q);
        x = __float_as_uint(numerics::fma(f, e_k[j], row.neg_z));
      }
    }
  }
  __syncwarp();
}

}  // namespace fold::cuda
