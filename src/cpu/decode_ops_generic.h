#pragma once
#include "cpu/decode_tile.h"

// Plain loops, vectorised by the compiler for whatever set the including source is compiled for.
namespace fold::cpu {
namespace {

struct GenericOps {
  /// D0 of a tile's 64 keys. h: (64, D/2) plane rows; d0: (G, 64).
  static void scan(const uint8_t* h, const Group& g, int32_t* d0) {
    KeyRows rows;
    for (int k = 0; k < kTile; ++k) rows.h[k] = h + static_cast<int64_t>(k) * (g.head_dim / 2);
    dots_h(rows, kTile, g, d0);
  }

  /// sum (16 h + 8) qa of listed keys. d0: (G, 64).
  static void dots_h(const KeyRows& rows, int count, const Group& g, int32_t* d0) {
    const int half = g.head_dim / 2;
    for (int i = 0; i < count; ++i) {
      uint8_t even[kMaxHalf], odd[kMaxHalf];
      for (int j = 0; j < half; ++j) {
        even[j] = rows.h[i][j] >> 4;
        odd[j] = rows.h[i][j] & 15;
      }
      for (int r = 0; r < g.rows; ++r) {
        const size_t row = static_cast<size_t>(r) * half;
        const int32_t dot = dot_u8(even, &g.query.a_even[row], half) + dot_u8(odd, &g.query.a_odd[row], half);
        d0[r * kTile + i] = 16 * dot - 120 * g.query.sum_a[r];
      }
    }
  }

  /// sum a (256 qa + qb). d1: (G, 64).
  static void dots_a(const KeyRows& rows, int count, const Group& g, int32_t* d1) {
    const int half = g.head_dim / 2;
    const Query& q = g.query;
    for (int i = 0; i < count; ++i) {
      const uint8_t *h = rows.h[i], *l = rows.l[i];
      uint8_t even[kMaxHalf], odd[kMaxHalf];  // a + 128
      for (int j = 0; j < half; ++j) {
        even[j] = static_cast<uint8_t>((h[j] & 0xF0) | (l[j] >> 4));
        odd[j] = static_cast<uint8_t>((h[j] << 4) | (l[j] & 15));
      }
      for (int r = 0; r < g.rows; ++r) {
        const size_t row = static_cast<size_t>(r) * half;
        const int32_t high = dot_u8(even, &q.a_even[row], half) + dot_u8(odd, &q.a_odd[row], half) - 128 * q.sum_a[r];
        const int32_t low = dot_u8(even, &q.b_even[row], half) + dot_u8(odd, &q.b_odd[row], half) - 128 * q.sum_b[r];
        d1[r * kTile + i] = 256 * high + low;
      }
    }
  }

  /// sum b (256 qa + qb). d2: (G, 64).
  static void dots_b(const KeyRows& rows, int count, const Group& g, int32_t* d2) {
    const int d = g.head_dim;
    for (int i = 0; i < count; ++i) {
      for (int r = 0; r < g.rows; ++r) {
        const int8_t *qa = &g.query.a[static_cast<size_t>(r) * d], *qb = &g.query.b[static_cast<size_t>(r) * d];
        int32_t high = 0, low = 0;
        for (int c = 0; c < d; ++c) {
          high += rows.b[i][c] * qa[c];
          low += rows.b[i][c] * qb[c];
        }
        d2[r * kTile + i] = 256 * high + low;
      }
    }
  }

  /// Bit k: fma(margin, scale[k], x[k]) >= threshold. scale, x: (64,).
  static uint64_t at_least(float margin, const float* scale, const float* x, float threshold) {
    uint64_t mask = 0;
    for (int k = 0; k < kTile; ++k) {
      mask |= static_cast<uint64_t>(numerics::fma(margin, scale[k], x[k]) >= threshold) << k;
    }
    return mask;
  }

  /// scaled[k] = 2^x[k] in fixed point, unrounded; weights[k] = fix(x[k]) of the visible keys, else 0. Returns their
  /// sum.
  static int64_t weigh(const float* x, uint64_t visible, float* scaled, uint32_t* weights) {
    int64_t sum = 0;
    for (int k = 0; k < kTile; ++k) {
      const numerics::Exp2 e = numerics::exp2_parts(x[k]);
      scaled[k] = numerics::mul(e.mantissa, numerics::pow2(e.exponent + numerics::kFraction));
      weights[k] = (visible >> k & 1) != 0 ? numerics::round_u32(scaled[k]) : 0;
      sum += weights[k];
    }
    return sum;
  }

  /// codes[k] = c of section 7 for the keys in `gone`, else 0; code_mass their sum. Returns the weights' sum.
  static int64_t codes(const uint32_t* weights, uint64_t gone, int shift, uint8_t* codes, int64_t& code_mass) {
    const uint32_t half = (1u << shift) >> 1;
    int64_t mass = 0;
    for (int k = 0; k < kTile; ++k) {
      const uint32_t weight = (gone >> k & 1) != 0 ? weights[k] : 0;
      const uint32_t code = std::min(255u, (weight + half) >> shift);
      mass += weight;
      codes[k] = static_cast<uint8_t>(code);
      code_mass += code;
    }
    return mass;
  }

  /// out[k]: the scale of key k of a tile. scales: (64,) bf16 as stored.
  static void scales(const uint16_t* scales, float* out) {
    for (int k = 0; k < kTile; ++k) out[k] = numerics::from_bf16(scales[numerics::scale_slot(k)]);
  }

  /// x[k] = fma(float(dot[k]) * scale, key_scale[k], -z), 64 keys.
  static void weights_log2(const int32_t* dot, float scale, const float* key_scale, float z, float* x) {
    for (int k = 0; k < kTile; ++k)
      x[k] = numerics::fma(numerics::mul(static_cast<float>(dot[k]), scale), key_scale[k], -z);
  }

  /// packed[i] = values[k] for the i-th key k of `keys`; the rest of packed[64] is 0.
  static void pack(const float* values, uint64_t keys, float* packed) {
    int i = 0;
    for (; keys != 0; keys &= keys - 1) packed[i++] = values[std::countr_zero(keys)];
    for (; i < kTile; ++i) packed[i] = 0;
  }

  /// values[k] = packed[i] for the i-th key k of `keys`.
  static void unpack(const float* packed, uint64_t keys, float* values) {
    for (int i = 0; keys != 0; keys &= keys - 1) values[std::countr_zero(keys)] = packed[i++];
  }

  /// weights[k] = fix(x[k], share[k]) from the unrounded 2^x (scaling by a power of two commutes with rounding).
  static void value_weights(const float* scaled, const float* share, uint32_t* weights) {
    for (int k = 0; k < kTile; ++k) weights[k] = numerics::round_u32(numerics::mul(scaled[k], share[k]));
  }

  /// Plane a of a row from its nibbles: even channels, then odd ones. h, l: (half,); a: (2 half,).
  static void join_nibbles(const uint8_t* h, const uint8_t* l, int half, int8_t* a) {
    for (int i = 0; i < half; ++i) {
      a[i] = static_cast<int8_t>(((h[i] & 0xF0) | (l[i] >> 4)) - 128);
      a[half + i] = static_cast<int8_t>(((h[i] << 4 & 0xF0) | (l[i] & 15)) - 128);
    }
  }

  /// Weighted sums of rows of signed bytes.
  class Sums {
   public:
    Sums(int rows, int d) : rows_(rows), d_(d), sums_(static_cast<size_t>(rows) * d) {}

    /// rows: (count, D); weights: (G, 64)
    void add(const int8_t* rows, const uint32_t* weights, int count) {
      for (int i = 0; i < count; ++i) {
        for (int r = 0; r < rows_; ++r) {
          const int64_t w = weights[r * kTile + i];
          uint64_t* sum = &sums_[static_cast<size_t>(r) * d_];
          for (int c = 0; c < d_; ++c) sum[c] += static_cast<uint64_t>(w * rows[static_cast<size_t>(i) * d_ + c]);
        }
      }
    }
    std::vector<uint64_t> drain() { return std::move(sums_); }

   private:
    int rows_, d_;
    std::vector<uint64_t> sums_;  // (G, D), two's complement
  };

  /// sums[r][c] += sum_k weights[r][k] u_k[code_channel(c)]. h: (64, D/2); weights: (G, 64); sums: (G, D).
  static void code_sums(const uint8_t* h, const uint8_t* weights, int rows, int d, int32_t* sums) {
    const int half = d / 2;
    for (int r = 0; r < rows; ++r) {
      int32_t* sum = sums + static_cast<size_t>(r) * d;
      for (int k = 0; k < kTile; ++k) {
        const int w = weights[r * kTile + k];
        if (w == 0) continue;
        for (int j = 0; j < half; ++j) {
          sum[j] += w * (h[k * half + j] >> 4);
          sum[half + j] += w * (h[k * half + j] & 15);
        }
      }
    }
  }

  /// The channel that element c of a row of code_sums stands for.
  static int code_channel(int c, int d) { return c < d / 2 ? 2 * c : 2 * (c - d / 2) + 1; }

 private:
  static constexpr int kMaxHalf = numerics::kMaxHeadDim / 2;

  static int32_t dot_u8(const uint8_t* u, const int8_t* s, int count) {
    int32_t sum = 0;
    for (int j = 0; j < count; ++j) sum += static_cast<int32_t>(u[j]) * s[j];
    return sum;
  }
};

}  // namespace
}  // namespace fold::cpu
