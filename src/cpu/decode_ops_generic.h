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

  /// Plane a of a row from its nibbles, split; `flip` is xor-ed to a + 128. h, l: (D/2,); out: (D,).
  static void join(const uint8_t* h, const uint8_t* l, uint8_t flip, uint8_t* out) {
    for (int i = 0; i < kHalf; ++i) {
      out[i] = static_cast<uint8_t>((h[i] & 0xF0) | (l[i] >> 4)) ^ flip;
      out[kHalf + i] = static_cast<uint8_t>((h[i] << 4) | (l[i] & 15)) ^ flip;
    }
  }

  /// out[i] = bytes[i] ^ 128. bytes, out: (D,).
  static void flip(const void* bytes, void* out) {
    for (int i = 0; i < D; ++i) static_cast<uint8_t*>(out)[i] = static_cast<const uint8_t*>(bytes)[i] ^ 128;
  }

  /// D0 of a tile's 64 keys. h: (64, D/2) plane rows; d0: (G, 64).
  static void scan(const uint8_t* h, const Query& q, int rows, int32_t* d0) {
    for (int k = 0; k < kTile; ++k) {
      uint8_t a[D];
      join(h + k * kHalf, kHalfPlane.bytes, 0, a);
      dots<false>(a, 1, q.a_split.data(), nullptr, q.offset_a, rows, d0 + k);
    }
  }

  /// Products of rows of unsigned bytes u with query planes: sum u qa, or with `Both` 256 sum u qa + sum u qb, less
  /// the row's offset. bytes: (count, D), count <= 64; qa, qb: (G, D); offset: (G,); out: (G, 64).
  template <bool Both>
  static void dots(const uint8_t* bytes, int count, const int8_t* qa, const int8_t* qb, const int32_t* offset, int rows,
                   int32_t* out) {
    for (int i = 0; i < count; ++i) {
      for (int r = 0; r < rows; ++r) {
        int32_t sum = dot(bytes + i * D, qa + r * D);  // 256 sums of a whole row stay below 2^31
        if constexpr (Both) sum = 256 * sum + dot(bytes + i * D, qb + r * D);
        out[r * kTile + i] = sum - offset[r];
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

  /// Bit k: x[k] >= threshold. x: (64,).
  static uint64_t at_least(const float* x, float threshold) {
    uint64_t mask = 0;
    for (int k = 0; k < kTile; ++k) mask |= static_cast<uint64_t>(x[k] >= threshold) << k;
    return mask;
  }

  /// Replaces x[k] by 2^x[k] in fixed point, unrounded. Returns the sum of the visible keys' fix(x[k]).
  static int64_t weigh(uint64_t visible, float* x) {
    int64_t sum = 0;
    for (int k = 0; k < kTile; ++k) {
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

  /// x[k] = fma(float(dot[k]) * scale, key_scale[k], -z), 64 keys.
  static void weights_log2(const int32_t* dot, float scale, const float* key_scale, float z, float* x) {
    for (int k = 0; k < kTile; ++k)
      x[k] = numerics::fma(numerics::mul(static_cast<float>(dot[k]), scale), key_scale[k], -z);
  }

  /// packed[i] = values[k] for the i-th key k of `keys`; what follows them, up to 16 elements, is undefined.
  template <typename T>
  static void pack(const T* values, uint64_t keys, T* packed) {
    for (; keys != 0; keys &= keys - 1) *packed++ = values[std::countr_zero(keys)];
  }

  /// values[k] = packed[i] for the i-th key k of `keys`.
  static void unpack(const float* packed, uint64_t keys, float* values) {
    for (int i = 0; keys != 0; keys &= keys - 1) values[std::countr_zero(keys)] = packed[i++];
  }

  /// weights[k] = fix(x[k], share[k]) from the unrounded 2^x (scaling by a power of two commutes with rounding).
  static void value_weights(const float* scaled, const float* share, uint32_t* weights) {
    for (int k = 0; k < kTile; ++k) weights[k] = numerics::round_u32(numerics::mul(scaled[k], share[k]));
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
    explicit Sums(int rows) : rows_(rows), sums_(int64_t{rows} * D) { std::fill_n(sums_.data(), rows * D, 0); }

    /// rows: (count,), a multiple of 4 up to 128; weights: (G, stride)
    template <class Row>
    void add(const Row* rows, int count, const uint32_t* weights, int stride) {
      for (int i = 0; i < count; ++i) load(rows[i], &row_bytes_[i * D]);
      for (int r = 0; r < rows_; ++r) {
        for (int shift = 0; shift < 8 * Bytes; shift += 16) {
          int32_t sum[D] = {};  // 128 products of 16 by 8 bits
          for (int i = 0; i < count; ++i) {
            const int32_t w = weights[r * stride + i] >> shift & 0xFFFF;
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
    static void load(const SplitRow& row, int8_t* out) { join(row.h, row.l, 128, reinterpret_cast<uint8_t*>(out)); }
    static void load(const PlainRow& row, int8_t* out) { std::copy_n(row.bytes, D, out); }
    static void load(const CodeRow& row, int8_t* out) { GenericOps::flip(row.bytes, out); }

    int rows_;
    int8_t row_bytes_[2 * kTile * D];
    Buffer<uint64_t> sums_;  // (G, D), two's complement
  };

 private:
  static int32_t dot(const uint8_t* u, const int8_t* s) {
    int32_t sum = 0;
    for (int i = 0; i < D; ++i) sum += u[i] * s[i];
    return sum;
  }
};

}  // namespace
}  // namespace fold::cpu
