#pragma once
#include <immintrin.h>

#include "cpu/decode_tile.h"

// Rows of bytes in AVX-512 registers, and their weighted sums.
namespace fold::cpu {
namespace {

/// Four bytes of memory in every lane.
__m512i broadcast(const void* bytes) {
  int32_t word;
  __builtin_memcpy(&word, bytes, sizeof(word));
  return _mm512_set1_epi32(word);
}

/// Calls f(first, integral_constant<R>) over `count` rows in runs of 4, 2 and 1.
template <class F>
void by_rows(int count, F f) {
  int r = 0;
  for (; r + 4 <= count; r += 4) f(r, std::integral_constant<int, 4>{});
  if (count - r >= 2) f(r, std::integral_constant<int, 2>{}), r += 2;
  if (count - r >= 1) f(r, std::integral_constant<int, 1>{});
}

/// Bytes of rows of D channels, 64 channels of a row (block `Block`) in a register.
template <int D, int Block>
struct RowBytes {
  static constexpr bool kEven = Block < D / 128;  // of a split row; D = 64: even channels below, odd ones above
  static constexpr int kAt = D == 64 ? 0 : 64 * (Block % (D / 128));  // in a nibble plane

  static __m512i flip(__m512i bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); }

  /// The row's values plus 128.
  static __m512i raised(const PlainRow& row) { return flip(_mm512_loadu_si512(row.bytes + 64 * Block)); }
  static __m512i raised(const CodeRow& row) { return _mm512_loadu_si512(row.bytes + 64 * Block); }
  static __m512i raised(const SplitRow& row) {
    const __m512i high = _mm512_set1_epi8(static_cast<char>(0xF0));
    constexpr int kSelect = 0xCA;  // first ? second : third
    __m512i h = nibbles(row.h), l = nibbles(row.l);
    if constexpr (D == 64) {
      h = _mm512_mask_slli_epi16(h, 0xFFFF0000, h, 4);
      l = _mm512_mask_srli_epi16(l, 0x0000FFFF, l, 4);
    } else if constexpr (kEven) {
      l = _mm512_srli_epi16(l, 4);
    } else {
      h = _mm512_slli_epi16(h, 4);
    }
    return _mm512_ternarylogic_epi64(high, h, l, kSelect);
  }

  /// The row's values.
  static __m512i plain(const PlainRow& row) { return _mm512_loadu_si512(row.bytes + 64 * Block); }
  template <class Row>
  static __m512i plain(const Row& row) {
    return flip(raised(row));
  }

  /// The codes of plane h in a block's bytes.
  static __m512i codes_of(__m512i bytes) {
    if constexpr (D == 64) bytes = _mm512_mask_srli_epi16(bytes, 0x0000FFFF, bytes, 4);
    if constexpr (D != 64 && kEven) bytes = _mm512_srli_epi16(bytes, 4);
    return _mm512_and_si512(bytes, _mm512_set1_epi8(15));
  }

  /// 64 bytes of a nibble plane that hold block Block.
  static __m512i nibbles(const uint8_t* plane) {
    if constexpr (D != 64) return _mm512_loadu_si512(plane + kAt);
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane)));
  }
};

/// Weighted sums of rows of signed bytes, as GenericOps::Sums. The bytes of four rows are interleaved so that one
/// channel's four stand in one 32-bit lane; vpdpbusd multiplies them by one byte of each of the four weights. Every
/// byte of a weight, a *column*, has its own 32-bit sums.
template <int D, int Bytes>
class Avx512Sums {
 public:
  explicit Avx512Sums(int rows)
      : rows_(rows),
        columns_(int64_t{rows} * Bytes * kStride),
        parts_(int64_t{rows} * Bytes * D),
        sums_(int64_t{rows} * D) {
    std::fill_n(parts_.data(), rows * Bytes * D, 0);
    std::fill_n(sums_.data(), rows * D, 0);
  }

  void put(int at, int r, uint32_t weight) {
    for (int b = 0; b < Bytes; ++b) column(r, b)[at] = static_cast<uint8_t>(weight >> (8 * b));
  }

  void put(int at, int r, const uint32_t* weights, uint64_t keys) {
    __m512i w[4];
    for (int i = 0; i < 4; ++i) w[i] = _mm512_loadu_si512(weights + kLanes * i);
    __m512i order = _mm512_setr_epi32(0x0C080400, 0x1C181410, 0x2C282420, 0x3C383430, 0x4C484440, 0x5C585450,
                                      0x6C686460, 0x7C787470, 0, 0, 0, 0, 0, 0, 0, 0);  // byte 0 of 32 words
    for (int b = 0; b < Bytes; ++b, order = _mm512_add_epi8(order, _mm512_set1_epi8(1))) {
      const __m256i low = _mm512_castsi512_si256(_mm512_permutex2var_epi8(w[0], order, w[1]));
      const __m256i high = _mm512_castsi512_si256(_mm512_permutex2var_epi8(w[2], order, w[3]));
      const __m512i bytes = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
      _mm512_storeu_si512(column(r, b) + at, _mm512_maskz_compress_epi8(keys, bytes));
    }
  }

  template <class Row>
  void add(const Row* rows, int count) {
    by_blocks([&](auto block, int first, auto parts) {
      for (int k = 0; k < count; k += 4) {
        const auto row = [&](int i) { return RowBytes<D, block>::plain(rows[k + i]); };
        parts.add(row(0), row(1), row(2), row(3), &columns_[first * kStride + k], kStride);
      }
      parts.store();
    });
    count_keys(count);
  }

  void add_tile(const uint8_t* h, const uint8_t* weights) {
    static_assert(Bytes == 1);
    __m512i any = _mm512_setzero_si512();
    for (int r = 0; r < rows_; ++r) any = _mm512_or_si512(any, _mm512_load_si512(weights + r * kTile));
    const unsigned quads = _mm512_test_epi32_mask(any, any);  // bit i: one of keys 4 i..4 i + 3
    if (quads == 0) return;
    for (int at = 0; at < D / 2; at += 64) {
      by_rows(rows_, [&](int first, auto size) {
        add_codes<size, false>(h + at, quads, weights + first * kTile, &parts_[first * D + at]);
        add_codes<size, true>(h + at, quads, weights + first * kTile, &parts_[first * D + at]);
      });
    }
    count_keys(kTile);
  }

  void drain(uint64_t factor, uint64_t* out) {
    if (!used_ && seen_ == 0) return;
    spill();
    used_ = false;
    for (int r = 0; r < rows_; ++r) {
      uint64_t* sum = &sums_[r * D];
      for (int i = 0; i < D; i += 4) {  // four bytes stay neighbours
        uint64_t* const to = &out[r * D + i / 64 * 64 + interleaved_byte(i % 64)];
        for (int j = 0; j < 4; ++j) to[j] += factor * sum[i + j];
      }
      std::fill_n(sum, D, 0);
    }
  }

 private:
  static constexpr int kStride = kBatch + 64;  // room for a whole vector behind the last weight
  static constexpr int kMaxKeys = 65536;       // 2^16 products of at most 255 * 128 stay below 2^31

  /// The sums of R columns over 64 channels, in registers while rows are added.
  template <int R>
  struct Parts {
    explicit Parts(int32_t* parts) : home(parts) {
#pragma GCC unroll 16
      for (int i = 0; i < 4 * R; ++i) sum[i] = _mm512_load_si512(home + i / 4 * D + i % 4 * kLanes);
    }
    void store() const {
#pragma GCC unroll 16
      for (int i = 0; i < 4 * R; ++i) _mm512_store_si512(home + i / 4 * D + i % 4 * kLanes, sum[i]);
    }

    /// Adds four rows; column r of their weights stands at weights + r * stride.
    void add(__m512i a, __m512i b, __m512i c, __m512i d, const uint8_t* weights, int stride) {
      const __m512i low_ab = _mm512_unpacklo_epi8(a, b), high_ab = _mm512_unpackhi_epi8(a, b);
      const __m512i low_cd = _mm512_unpacklo_epi8(c, d), high_cd = _mm512_unpackhi_epi8(c, d);
      const __m512i quad[4] = {_mm512_unpacklo_epi16(low_ab, low_cd), _mm512_unpackhi_epi16(low_ab, low_cd),
                               _mm512_unpacklo_epi16(high_ab, high_cd), _mm512_unpackhi_epi16(high_ab, high_cd)};
#pragma GCC unroll 16
      for (int i = 0; i < 4 * R; ++i)
        sum[i] = _mm512_dpbusd_epi32(sum[i], broadcast(weights + i / 4 * stride), quad[i % 4]);
    }

    __m512i sum[4 * R];
    int32_t* home;
  };

  /// Adds the codes in half of the interleaved bytes at `h` of a tile's rows of plane h. Bytes of four rows are
  /// interleaved before they are split into codes: fewer are.
  template <int R, bool Upper>
  static void add_codes(const uint8_t* h, unsigned quads, const uint8_t* weights, int32_t* parts) {
    constexpr int kSets = D == 64 ? 1 : 2;  // of 64 channels
    const auto home = [&](int i) {
      return parts + i / (2 * kSets) * D + i / 2 % kSets * (D / 2) + (i % 2 + 2 * Upper) * kLanes;
    };
    const auto interleave = [](__m512i a, __m512i b) {
      return Upper ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b);
    };
    __m512i sum[2 * kSets * R];
#pragma GCC unroll 16
    for (int i = 0; i < 2 * kSets * R; ++i) sum[i] = _mm512_load_si512(home(i));
    for (; quads != 0; quads &= quads - 1) {
      const int k = 4 * std::countr_zero(quads);
      const auto row = [&](int i) { return RowBytes<D, 0>::nibbles(h + (k + i) * D / 2); };
      const __m512i ab = interleave(row(0), row(1)), cd = interleave(row(2), row(3));
      const __m512i both[2] = {_mm512_unpacklo_epi16(ab, cd), _mm512_unpackhi_epi16(ab, cd)};
      __m512i codes[2 * kSets];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        codes[i] = RowBytes<D, 0>::codes_of(both[i]);
        if constexpr (kSets == 2) codes[2 + i] = RowBytes<D, D / 128>::codes_of(both[i]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < 2 * kSets * R; ++i)
        sum[i] = _mm512_dpbusd_epi32(sum[i], broadcast(weights + i / (2 * kSets) * kTile + k), codes[i % (2 * kSets)]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 2 * kSets * R; ++i) _mm512_store_si512(home(i), sum[i]);
  }

  /// The byte (0..63) whose sum is element i = 16 j + lane of Parts.
  static constexpr int interleaved_byte(int i) { return i % 16 / 4 * 16 + i / 16 * 4 + i % 4; }

  /// f(block, first, parts) for every block of 64 channels and run of columns.
  template <int Block = 0, class F>
  void by_blocks(F f) {
    by_rows(rows_ * Bytes, [&](int first, auto size) {
      f(std::integral_constant<int, Block>{}, first, Parts<size>(&parts_[first * D + 64 * Block]));
    });
    if constexpr (Block + 1 < D / 64) by_blocks<Block + 1>(f);
  }

  uint8_t* column(int r, int b) { return &columns_[(r * Bytes + b) * kStride]; }

  void count_keys(int count) {
    seen_ += count;
    if (seen_ > kMaxKeys - kBatch) spill();
  }

  void spill() {
    if (seen_ == 0) return;
    for (int r = 0; r < rows_; ++r) {
      for (int i = 0; i < D; i += 8) {
        __m512i sum = _mm512_load_si512(&sums_[r * D + i]);
        for (int b = 0; b < Bytes; ++b) {
          __m256i* part = reinterpret_cast<__m256i*>(&parts_[(r * Bytes + b) * D + i]);
          sum = _mm512_add_epi64(sum, _mm512_slli_epi64(_mm512_cvtepi32_epi64(_mm256_load_si256(part)), 8 * b));
          _mm256_store_si256(part, _mm256_setzero_si256());
        }
        _mm512_store_si512(&sums_[r * D + i], sum);
      }
    }
    used_ = true;
    seen_ = 0;
  }

  int rows_, seen_ = 0;      // query rows; keys in parts_
  bool used_ = false;        // sums_ is not all 0
  Buffer<uint8_t> columns_;  // (G, Bytes, kStride)
  Buffer<int32_t> parts_;    // (G, Bytes, D) interleaved channels
  Buffer<uint64_t> sums_;    // (G, D) interleaved channels, two's complement
};

}  // namespace
}  // namespace fold::cpu
