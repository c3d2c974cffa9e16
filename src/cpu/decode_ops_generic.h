#pragma once
#include <limits>
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
  static void scan(const uint8_t* h, const Coming& coming, const Query& q, int rows, int32_t* d0) {
    int32_t products[kQuadProducts];
    for (int k = 0; k < kTile; k += 4) {
      SplitRow keys[4];
      for (int i = 0; i < 4; ++i) {
        keys[i] = {h + (k + i) * kHalf, kHalfPlane.bytes};
        coming.send((k + i) * kHalf);
      }
      dots<false>(keys, q.a_split.data(), nullptr, q.sum_a, rows, products);
      for (int i = 0; i < 4 * rows; ++i)
        d0[i / 4 * kTile + k + i % 4] = fold::cpu::level_0(products[i], q.sum_a[i / 4]);
    }
  }

  /// Products of four keys with query planes: sum key qa, or with `Both` 256 sum key qa + sum key qb. qa, qb: (G, D);
  /// sums: (G,) qa's or both planes' channel sums; out: (G, 4).
  template <bool Both, class Row>
  static void dots(const Row* keys, const int8_t* qa, const int8_t* qb, const int32_t* /*sums*/, int rows,
                   int32_t* out) {
    for (int i = 0; i < 4; ++i) {
      int8_t bytes[D];
      int16_t key[D];  // pairs of products of 16 bits are added by one instruction nearly everywhere
      load(keys[i], bytes);
      std::copy_n(bytes, D, key);
      for (int r = 0; r < rows; ++r) {
        const int32_t high = dot(key, qa + r * D);
        out[4 * r + i] = Both ? 256 * high + dot(key, qb + r * D) : high;
      }
    }
  }

  /// x of a tile's keys at level 0. Returns those that ask for level 1. d0: (G, 64); key_scale: (64,); x: (G, 64), rows
  /// kChunk apart.
  static uint64_t level_0(const int32_t* d0, int rows, const RowScales& scales, const float* key_scale, float* x) {
    uint64_t wanted = 0;
    for (int r = 0; r < rows; ++r) {
      for (int k = 0; k < kTile; ++k) {
        const float product = static_cast<float>(d0[r * kTile + k]);
        x[r * kChunk + k] = log2_weight(product, scales.row[r], key_scale[k]);
        wanted |= uint64_t{asks(x[r * kChunk + k], scales.row[r], key_scale[k])} << k;
      }
    }
    return wanted;
  }

  /// The same of four keys at level 1, with the products themselves. key_scale: (4,); d1, x: (G, 4).
  static unsigned level_1(const SplitRow* keys, const Query& q, int rows, const RowScales& scales,
                          const float* key_scale, int32_t* d1, float* x) {
    dots<true>(keys, q.a_split.data(), q.b_split.data(), q.sum, rows, d1);
    unsigned wanted = 0;
    for (int i = 0; i < 4 * rows; ++i) {
      const RowScale& row = scales.row[i / 4];
      x[i] = log2_weight(static_cast<float>(d1[i]), row, key_scale[i % 4]);
      wanted |= unsigned{asks(x[i], row, key_scale[i % 4])} << i % 4;
    }
    return wanted;
  }

  /// x of four keys at level 2. scales: level 1's; d1: (G, 4) the products there.
  static void level_2(const PlainRow* keys, const Query& q, int rows, const RowScales& scales, const float* key_scale,
                      const int32_t* d1, float* x) {
    int32_t d2[kQuadProducts];
    dots<true>(keys, q.a.data(), q.b.data(), q.sum, rows, d2);
    for (int i = 0; i < 4 * rows; ++i) x[i] = log2_weight(product_2(d1[i], d2[i]), scales.row[i / 4], key_scale[i % 4]);
  }

  /// Keys of a tile that one of the rows asks planes of V of. x: (G, 64), rows kChunk apart.
  static ValueKeys value_keys(const float* x, const ValueGates* gates, int rows) {
    ValueKeys keys;
    for (int r = 0; r < rows; ++r) {
      for (int k = 0; k < kTile; ++k) {
        const float value = x[r * kChunk + k];
        keys.h |= uint64_t{value >= gates[r].h} << k;
        keys.l |= uint64_t{value >= gates[r].l} << k;
        keys.b |= uint64_t{value >= gates[r].b} << k;
      }
    }
    return keys;
  }

  struct LaneSum {
    int64_t total() const { return sum; }
    int64_t sum = 0;
  };

  /// Adds fix(x[k]) of the keys in `gone`. x: (64,).
  static void drop(const float* x, uint64_t gone, LaneSum& sum) {
    for (int k = 0; k < kTile; ++k) sum.sum += (gone >> k & 1) != 0 ? numerics::fix(x[k]) : 0;
  }

  /// The same, and codes[k] = c of section 7 for those keys, 0 for others.
  static DroppedMass drop(const float* x, uint64_t gone, int shift, uint8_t* codes) {
    const uint32_t half = (1u << shift) >> 1;
    DroppedMass mass{};
    for (int k = 0; k < kTile; ++k) {
      const uint32_t weight = (gone >> k & 1) != 0 ? numerics::fix(x[k]) : 0;
      codes[k] = static_cast<uint8_t>(std::min(255u, (std::min(weight, kMostCoded) + half) >> shift));
      mass.weights += weight;
      mass.codes += codes[k];
    }
    return mass;
  }

  /// Places of the keys in `set` in a chunk, `base` the first key's. out: room for 64.
  static void list(uint64_t set, int base, uint8_t* out) {
    for (; set != 0; set &= set - 1) *out++ = static_cast<uint8_t>(base + std::countr_zero(set));
  }

  /// One row's sums over the keys whose V is read: of fix(x), of the weights of their values, and of those again where
  /// plane h alone is read; and the largest x.
  struct ReadSums {
    int64_t den() const { return den_; }
    int64_t mass() const { return mass_; }
    int64_t half() const { return half_; }
    float peak() const { return peak_; }

    int64_t den_ = 0, mass_ = 0, half_ = 0;
    float peak_ = -std::numeric_limits<float>::infinity();
  };

  /// weights[i] = fix(x, scale / E) of the keys of a list (scaling by a power of two commutes with rounding), and the
  /// sums that grow by them. x: (G, kChunk); scale: (kChunk,); unit: 1 / E; weights: (G, 64).
  static void read(const ReadList& list, const float* x, const float* scale, const float* unit, int rows,
                   ReadSums* sums, uint32_t* weights) {
    for (int r = 0; r < rows; ++r) {
      ReadSums& sum = sums[r];
      for (int i = 0; i < list.count; ++i) {
        const int k = list.key[i];
        const numerics::Exp2 e = numerics::exp2_parts(x[r * kChunk + k]);
        const uint32_t w = numerics::fix(e, numerics::mul(scale[k], unit[r]));
        weights[r * kTile + i] = w;
        sum.den_ += numerics::fix(e, 1.0f);
        sum.mass_ += w;
        sum.half_ += (list.l >> i & 1) != 0 ? 0 : w;
        sum.peak_ = std::max(sum.peak_, x[r * kChunk + k]);
      }
    }
  }

  /// out[k]: the scale of key k of a tile. scales: (64,) bf16 as stored.
  static void scales(const uint16_t* scales, float* out) {
    for (int k = 0; k < kTile; ++k) out[k] = numerics::from_bf16(scales[numerics::scale_slot(k)]);
  }

  /// weights: (G, 64), the first `count` of a row
  static Widths widths(const uint32_t* weights, int count, int rows) {
    Widths widths;
    for (int k = 0; k < count; ++k) {
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

    /// The codes of a tile's plane h, split, as rows. h: (64, D/2); weights: (G, 64).
    void add_tile(const uint8_t* h, const uint8_t* weights) {
      for (int r = 0; r < rows_; ++r) {
        int32_t sum[D] = {};
        for (int k = 0; k < kTile; ++k) {
          const int w = weights[r * kTile + k];
          if (w == 0) continue;
          for (int i = 0; i < kHalf; ++i) {
            sum[i] += w * (h[k * kHalf + i] >> 4);
            sum[kHalf + i] += w * (h[k * kHalf + i] & 15);
          }
        }
        for (int c = 0; c < D; ++c) sums_[r * D + c] += static_cast<uint64_t>(int64_t{sum[c]});
      }
    }

    /// As RowBatch::drain.
    void drain(uint64_t factor, uint64_t* out) {
      for (int i = 0; i < rows_ * D; ++i) out[i] += factor * std::exchange(sums_[i], 0);
    }

   private:
    int rows_;
    int8_t row_bytes_[kBatch * D];
    Buffer<uint32_t> weights_;  // (G, kBatch)
    Buffer<uint64_t> sums_;     // (G, D), two's complement
  };

 private:
  static int32_t dot(const int16_t* k, const int8_t* q) {
    int32_t sum = 0;
    for (int i = 0; i < D; ++i) sum += k[i] * q[i];
    return sum;
  }

  static float log2_weight(float product, const RowScale& row, float key_scale) {
    return numerics::fma(numerics::mul(product, row.unit), key_scale, -row.z);
  }

  static bool asks(float x, const RowScale& row, float key_scale) {
    return numerics::fma(row.margin, key_scale, x) >= row.threshold;
  }
};

}  // namespace
}  // namespace fold::cpu
