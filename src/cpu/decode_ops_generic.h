#pragma once
#include <utility>

#include "cpu/decode_tile.h"

// Plain loops, vectorised by the compiler for whatever set the including source is compiled for.
namespace fold::cpu {
namespace {

/// The operations of an instruction set on rows of D channels. A row is *split* when its even channels stand before
/// its odd ones.
template <int D>
struct GenericOps {
  static constexpr int kDim = D, kHalf = D / 2;

  /// The channel of byte i of a split row.
  static int split_channel(int i) { return i < kHalf ? 2 * i : 2 * (i - kHalf) + 1; }

  // The values of a row, (D,).
  static void load(const SplitRow& row, int8_t* out) {
    for (int i = 0; i < kHalf; ++i) {
      out[i] = static_cast<int8_t>(((row.h[i] & 0xF0) | (row.l[i] >> 4)) - 128);
      out[kHalf + i] = static_cast<int8_t>(((row.h[i] << 4 & 0xF0) | (row.l[i] & 15)) - 128);
    }
  }
  static void load(const PlainRow& row, int8_t* out) { std::copy_n(row.bytes, D, out); }
  static void load(const CodeRow& row, int8_t* out) {
    for (int i = 0; i < D; ++i) out[i] = static_cast<int8_t>(row.bytes[i] - 128);
  }

  /// D0 of a tile's 64 keys. h: (64, D/2) plane rows; d0: (G, 64).
  static void scan(const uint8_t* h, const Query& q, int rows, int32_t* d0) {
    SplitRow keys[kTile];
    for (int k = 0; k < kTile; ++k) keys[k] = {h + k * kHalf, kHalfPlane.bytes};
    dots<false>(keys, kTile, q.a_split.data(), nullptr, q.sum_a, rows, d0);
    for (int r = 0; r < rows; ++r) {
      for (int k = 0; k < kTile; ++k) d0[r * kTile + k] = level_0(d0[r * kTile + k], q.sum_a[r]);
    }
  }

  /// Products of keys with query planes: sum key qa, or with `Both` 256 sum key qa + sum key qb. keys: (count,), count
  /// <= 64; qa, qb: (G, D); sums: (G,) qa's or both planes' channel sums; out: (G, 64).
  template <bool Both, class Row>
  static void dots(const Row* keys, int count, const int8_t* qa, const int8_t* qb, const int32_t* /*sums*/, int rows,
                   int32_t* out) {
    // 16-bit factors: pairs of products are added by one instruction nearly everywhere.
    int16_t a[kMaxRows * D], b[kMaxRows * D];
    std::copy_n(qa, rows * D, a);
    if constexpr (Both) std::copy_n(qb, rows * D, b);
    for (int i = 0; i < count; ++i) {
      int8_t bytes[D];
      int16_t key[D];
      load(keys[i], bytes);
      std::copy_n(bytes, D, key);
      for (int r = 0; r < rows; ++r) {
        const int32_t high = dot(key, a + r * D);
        out[r * kTile + i] = Both ? 256 * high + dot(key, b + r * D) : high;
      }
    }
  }

  /// x of `keys` from their dot products in order. Returns those that ask for more. key_scale, x: (64,).
  static uint64_t logits(const int32_t* dots, uint64_t keys, const RowScale& row, const float* key_scale, float* x) {
    uint64_t wanted = 0;
    for (; keys != 0; keys &= keys - 1) {
      const int k = std::countr_zero(keys);
      x[k] = numerics::fma(numerics::mul(static_cast<float>(*dots++), row.unit), key_scale[k], -row.z);
      wanted |= static_cast<uint64_t>(numerics::fma(row.margin, key_scale[k], x[k]) >= row.threshold) << k;
    }
    return wanted;
  }

  /// Keys that one of the rows asks planes of V of, its gates opened by `deeper`. x: (G, 64).
  static ValueKeys value_keys(const float* x, const numerics::Gates* gates, float deeper, int rows) {
    ValueKeys keys;
    for (int r = 0; r < rows; ++r) {
      const float h = -(gates[r].v_h + deeper), l = -(gates[r].v_l + deeper), b = -(gates[r].v_b + deeper);
      for (int k = 0; k < kTile; ++k) {
        const float value = x[r * kTile + k];
        keys.h |= static_cast<uint64_t>(value >= h) << k;
        keys.l |= static_cast<uint64_t>(value >= l) << k;
        keys.b |= static_cast<uint64_t>(value >= b) << k;
      }
    }
    return keys;
  }

  /// Replaces x[k] by 2^x[k] in fixed point, unrounded. Returns the sum of the visible keys' fix(x[k]). peak: (kLanes,)
  /// whose largest element is that of the x[k] of the keys `read` so far.
  static int64_t weigh(uint64_t visible, uint64_t read, float* x, float* peak) {
    int64_t sum = 0;
    for (int k = 0; k < kTile; ++k) {
      if ((read >> k & 1) != 0) peak[k % kLanes] = std::max(peak[k % kLanes], x[k]);
      const numerics::Exp2 e = numerics::exp2_parts(x[k]);
      x[k] = numerics::mul(e.mantissa, numerics::pow2(e.exponent + numerics::kFraction));
      sum += (visible >> k & 1) != 0 ? numerics::round_u32(x[k]) : 0;
    }
    return sum;
  }

  struct Mass {
    int64_t weights, codes;  // sums over keys
    uint64_t coded;          // keys whose code is not 0
  };

  /// codes[k] = c of section 7 for the keys in `gone`, else 0, from the unrounded 2^x.
  static Mass codes(const float* scaled, uint64_t gone, int shift, uint8_t* codes) {
    const uint32_t half = (1u << shift) >> 1;
    Mass mass{};
    for (int k = 0; k < kTile; ++k) {
      const uint32_t weight = (gone >> k & 1) != 0 ? numerics::round_u32(scaled[k]) : 0;
      codes[k] = static_cast<uint8_t>(std::min(255u, (weight + half) >> shift));
      mass.weights += weight;
      mass.codes += codes[k];
      mass.coded |= static_cast<uint64_t>(codes[k] != 0) << k;
    }
    return mass;
  }

  /// out[k]: the scale of key k of a tile. scales: (64,) bf16 as stored.
  static void scales(const uint16_t* scales, float* out) {
    for (int k = 0; k < kTile; ++k) out[k] = numerics::from_bf16(scales[numerics::scale_slot(k)]);
  }

  /// x of the keys read to level 2: `further`, of the keys `keys` read to level 1. first, second: the dot products of
  /// either, in order.
  static void level_2(const int32_t* first, uint64_t keys, const int32_t* second, uint64_t further, float scale,
                      const float* key_scale, float z, float* x) {
    for (; keys != 0; keys &= keys - 1, ++first) {
      const int k = std::countr_zero(keys);
      if ((further >> k & 1) != 0) x[k] = numerics::fma(logit_2(scale, *first, *second++), key_scale[k], -z);
    }
  }

  /// weights[k] = fix(x[k], scale[k] / E) from the unrounded 2^x (scaling by a power of two commutes with rounding) for
  /// the keys `read`, 0 for others. unit: 1 / E; half: those of the keys read to plane h alone.
  static ValueMass value_weights(const float* scaled, const float* scale, float unit, uint64_t read, uint64_t half,
                                 uint32_t* weights) {
    ValueMass mass;
    for (int k = 0; k < kTile; ++k) {
      const uint32_t w = numerics::round_u32(numerics::mul(scaled[k], numerics::mul(scale[k], unit)));
      weights[k] = (read >> k & 1) != 0 ? w : 0;
      mass.all += weights[k];
      mass.half += (half >> k & 1) != 0 ? weights[k] : 0;
    }
    return mass;
  }

  /// weights: (G, 64)
  static Widths widths(const uint32_t* weights, int rows) {
    Widths widths;
    for (int k = 0; k < kTile; ++k) {
      uint32_t any = 0;
      for (int r = 0; r < rows; ++r) any |= weights[r * kTile + k];
      const uint64_t bit = uint64_t{1} << k;
      if (any != 0) (any < 0x100 ? widths.one : any < 0x10000 ? widths.two : widths.four) |= bit;
    }
    return widths;
  }

  /// Weighted sums of rows of signed bytes; weights of at most `Bytes` bytes.
  template <int Bytes>
  class Sums {
   public:
    explicit Sums(int rows) : rows_(rows), weights_(int64_t{rows} * kBatch), sums_(int64_t{rows} * D) {
      std::fill_n(sums_.data(), rows * D, 0);
    }

    /// Query row r's weight of the row at place `at` of the next add().
    void put(int at, int r, uint32_t weight) { weights_[r * kBatch + at] = weight; }

    /// Its weights[k] for every key k of `keys`, from place `at` on. weights: (64,)
    void put(int at, int r, const uint32_t* weights, uint64_t keys) {
      for (; keys != 0; keys &= keys - 1) put(at++, r, weights[std::countr_zero(keys)]);
    }

    /// Adds the rows whose weights were put. rows: (count,), count a multiple of 4 up to kBatch.
    template <class Row>
    void add(const Row* rows, int count) {
      for (int i = 0; i < count; ++i) load(rows[i], &row_bytes_[i * D]);
      for (int r = 0; r < rows_; ++r) {
        for (int shift = 0; shift < 8 * Bytes; shift += 16) {
          int32_t sum[D] = {};  // 128 products of 16 by 8 bits
          for (int i = 0; i < count; ++i) {
            const int32_t w = weights_[r * kBatch + i] >> shift & 0xFFFF;
            for (int c = 0; c < D; ++c) sum[c] += w * row_bytes_[i * D + c];
          }
          for (int c = 0; c < D; ++c) sums_[r * D + c] += static_cast<uint64_t>(int64_t{sum[c]}) << shift;
        }
      }
    }

    /// The codes of a tile's plane h, split, as rows. h: (64, D/2); weights: (G, 64); keys: those of weight above 0.
    void add_tile(const uint8_t* h, const uint8_t* weights, uint64_t keys) {
      for (int r = 0; r < rows_; ++r) {
        int32_t sum[D] = {};
        for (uint64_t rest = keys; rest != 0; rest &= rest - 1) {
          const int k = std::countr_zero(rest), w = weights[r * kTile + k];
          for (int i = 0; i < kHalf; ++i) {
            sum[i] += w * (h[k * kHalf + i] >> 4);
            sum[kHalf + i] += w * (h[k * kHalf + i] & 15);
          }
        }
        for (int c = 0; c < D; ++c) sums_[r * D + c] += static_cast<uint64_t>(int64_t{sum[c]});
      }
    }

    /// As RowBatch::drain.
    template <class Channel>
    void drain(uint64_t factor, Channel channel, uint64_t* out) {
      for (int r = 0; r < rows_; ++r) {
        for (int c = 0; c < D; ++c) out[r * D + channel(c)] += factor * std::exchange(sums_[r * D + c], 0);
      }
    }

   private:
    int rows_;
    int8_t row_bytes_[kBatch * D];
    Buffer<uint32_t> weights_;  // (G, kBatch)
    Buffer<uint64_t> sums_;     // (G, D), two's complement
  };

 private:
  static int32_t dot(const int16_t* k, const int16_t* q) {
    int32_t sum = 0;
    for (int i = 0; i < D; ++i) sum += k[i] * q[i];
    return sum;
  }
};

}  // namespace
}  // namespace fold::cpu
