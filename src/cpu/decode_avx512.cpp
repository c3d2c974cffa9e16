#if defined(__x86_64__)
// g++ 12 takes the deliberately undefined operands inside its own AVX-512 header for mistakes (GCC bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <array>

#include "cpu/decode_ops_generic.h"
#include "cpu/decode_worker.h"

namespace fold::cpu {
namespace {

constexpr int kLanes = 16;

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

/// Sums of neighbouring unsigned 32-bit lanes.
__m512i pair_sums(__m512i v) {
  return _mm512_add_epi64(_mm512_and_si512(v, _mm512_set1_epi64(0xFFFFFFFF)), _mm512_srli_epi64(v, 32));
}

/// Weighted sums of rows of signed bytes, as GenericOps::Sums. The bytes of four rows are interleaved so that one
/// channel's four stand in one 32-bit lane; vpdpbusd multiplies them by one byte of each of the four weights. Every
/// byte of a weight, a *column*, has its own 32-bit sums.
template <int D, int Bytes>
class Avx512Sums {
 public:
  explicit Avx512Sums(int rows)
      : rows_(rows),
        columns_(int64_t{rows} * Bytes * kRoom),
        parts_(int64_t{rows} * Bytes * D),
        sums_(int64_t{rows} * D) {
    std::fill_n(parts_.data(), rows * Bytes * D, 0);
    std::fill_n(sums_.data(), rows * D, 0);
  }

  template <class Row>
  void add(const Row* rows, int count, const uint32_t* weights, int stride) {
    for (int r = 0; r < rows_; ++r) split(weights + r * stride, count, &columns_[r * Bytes * kRoom]);
    by_blocks([&](auto block, int first, auto parts) {
      for (int k = 0; k < count; k += 4) {
        const auto row = [&](int i) { return load<block>(rows[k + i]); };
        parts.add(row(0), row(1), row(2), row(3), &columns_[first * kRoom + k], kRoom);
      }
      parts.store();
    });
    count_keys(count);
  }

  void add_tile(const uint8_t* h, const uint8_t* weights, uint64_t keys) {
    static_assert(Bytes == 1);
    uint64_t quads = keys | keys >> 1;
    quads = (quads | quads >> 2) & 0x1111111111111111;  // bit 4 k: one of keys 4 k..4 k + 3
    by_blocks([&](auto block, int first, auto parts) {
      for (uint64_t rest = quads; rest != 0; rest &= rest - 1) {
        const int k = std::countr_zero(rest);
        const auto row = [&](int i) { return codes<block>(h + (k + i) * D / 2); };
        parts.add(row(0), row(1), row(2), row(3), weights + first * kTile + k, kTile);
      }
      parts.store();
    });
    count_keys(kTile);
  }

  template <class Channel>
  void drain(uint64_t factor, Channel channel, uint64_t* out) {
    if (!used_ && seen_ == 0) return;
    spill();
    used_ = false;
    for (int r = 0; r < rows_; ++r) {
      uint64_t* sum = &sums_[r * D];
      for (int i = 0; i < D; ++i) out[r * D + channel(i / 64 * 64 + interleaved_byte(i % 64))] += factor * sum[i];
      std::fill_n(sum, D, 0);
    }
  }

 private:
  static constexpr int kRoom = 2 * kTile;
  static constexpr int kMaxKeys = 65536;  // 2^16 products of at most 255 * 128 stay below 2^31

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

  /// f(block, first, parts) for every block of 64 channels and run of columns.
  template <int Block = 0, class F>
  void by_blocks(F f) {
    by_rows(rows_ * Bytes, [&](int first, auto size) {
      f(std::integral_constant<int, Block>{}, first, Parts<size>(&parts_[first * D + 64 * Block]));
    });
    if constexpr (Block + 1 < D / 64) by_blocks<Block + 1>(f);
  }

  // 64 bytes of a row.
  template <int block>
  static __m512i load(const PlainRow& row) {
    return _mm512_loadu_si512(row.bytes + 64 * block);
  }
  template <int block>
  static __m512i load(const CodeRow& row) {
    return _mm512_xor_si512(_mm512_loadu_si512(row.bytes + 64 * block), _mm512_set1_epi8(-128));
  }
  template <int block>
  static __m512i load(const SplitRow& row) {
    const __m512i high = _mm512_set1_epi8(static_cast<char>(0xF0)), sign = _mm512_set1_epi8(-128);
    constexpr int kSelect = 0xCA;  // first ? second : third
    if constexpr (D == 64) {
      const __m512i h = twice(row.h), l = twice(row.l);  // even channels below, odd ones above
      const __m512i shifted_h = _mm512_mask_slli_epi16(h, 0xFFFF0000, h, 4);
      const __m512i shifted_l = _mm512_mask_srli_epi16(l, 0x0000FFFF, l, 4);
      return _mm512_xor_si512(_mm512_ternarylogic_epi64(high, shifted_h, shifted_l, kSelect), sign);
    } else {
      const int at = 64 * (block % (D / 128));
      const __m512i h = _mm512_loadu_si512(row.h + at), l = _mm512_loadu_si512(row.l + at);
      const __m512i a = block < D / 128 ? _mm512_ternarylogic_epi64(high, h, _mm512_srli_epi16(l, 4), kSelect)
                                        : _mm512_ternarylogic_epi64(high, _mm512_slli_epi16(h, 4), l, kSelect);
      return _mm512_xor_si512(a, sign);
    }
  }

  /// The codes of a row of plane h, split.
  template <int block>
  static __m512i codes(const uint8_t* h) {
    const __m512i low = _mm512_set1_epi8(15);
    if constexpr (D == 64) {
      const __m512i both = twice(h);
      return _mm512_and_si512(_mm512_mask_srli_epi16(both, 0x0000FFFF, both, 4), low);
    } else {
      const __m512i bytes = _mm512_loadu_si512(h + 64 * (block % (D / 128)));
      return _mm512_and_si512(block < D / 128 ? _mm512_srli_epi16(bytes, 4) : bytes, low);
    }
  }

  static __m512i twice(const uint8_t* bytes) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
  }

  /// The byte (0..63) whose sum is element i = 16 j + lane of Parts.
  static constexpr int interleaved_byte(int i) { return i % 16 / 4 * 16 + i / 16 * 4 + i % 4; }

  /// The bytes of a query row's weights. columns: (Bytes, kRoom)
  static void split(const uint32_t* weights, int count, uint8_t* columns) {
    for (int k = 0; k < count; k += kLanes) {
      __m512i w = _mm512_loadu_si512(weights + k);
      for (int b = 0; b < Bytes; ++b, w = _mm512_srli_epi32(w, 8)) {
        _mm_store_si128(reinterpret_cast<__m128i*>(columns + b * kRoom + k), _mm512_cvtepi32_epi8(w));
      }
    }
  }

  void count_keys(int count) {
    seen_ += count;
    if (seen_ > kMaxKeys - kRoom) spill();
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
  Buffer<uint8_t> columns_;  // (G, Bytes, kRoom)
  Buffer<int32_t> parts_;    // (G, Bytes, D) interleaved channels
  Buffer<uint64_t> sums_;    // (G, D) interleaved channels, two's complement
};

template <int D>
struct Avx512Ops : GenericOps<D> {
  using typename GenericOps<D>::Mass;
  static constexpr int kHalf = D / 2;
  template <int Bytes>
  using Sums = Avx512Sums<D, Bytes>;

  static void join(const uint8_t* h, const uint8_t* l, uint8_t flip, uint8_t* out) {
    constexpr int kNibbles = std::min(kHalf, 64);  // D = 64: half a register
    const __mmask64 part = ~uint64_t{0} >> (64 - kNibbles);
    const __m512i high = _mm512_set1_epi8(static_cast<char>(0xF0)), sign = _mm512_set1_epi8(static_cast<char>(flip));
    for (int i = 0; i < kHalf; i += kNibbles) {
      const __m512i vh = _mm512_maskz_loadu_epi8(part, h + i), vl = _mm512_maskz_loadu_epi8(part, l + i);
      constexpr int kSelect = 0xCA;  // first ? second : third
      const __m512i even = _mm512_ternarylogic_epi64(high, vh, _mm512_srli_epi16(vl, 4), kSelect);
      const __m512i odd = _mm512_ternarylogic_epi64(high, _mm512_slli_epi16(vh, 4), vl, kSelect);
      _mm512_mask_storeu_epi8(out + i, part, _mm512_xor_si512(even, sign));
      _mm512_mask_storeu_epi8(out + kHalf + i, part, _mm512_xor_si512(odd, sign));
    }
  }

  /// 16 keys stand in the 16 lanes of a register: rows are transposed into words of 4 bytes, once for all the query
  /// rows, and a query word is broadcast to meet the four registers of the tile.
  static void scan(const uint8_t* h, const Query& q, int rows, int32_t* d0) {
    constexpr int kWords = kHalf / 4;
    __m512i words[kWords][4];  // [w][g] lane i: bytes 4w..4w+3 of key 16 g + i
    for (int g = 0; g < 4; ++g) {
      for (int w = 0; w < kWords; w += 4) transpose(h + g * kLanes * kHalf + 4 * w, &words[w][g]);
    }
    by_rows(rows, [&](int first, auto size) {
      constexpr int R = decltype(size)::value;
      const __m512i low = _mm512_set1_epi8(15);
      __m512i sum[R][4];
#pragma GCC unroll 16
      for (int i = 0; i < 4 * R; ++i) sum[i / 4][i % 4] = _mm512_setzero_si512();
      const int8_t* plane = &q.a_split[static_cast<size_t>(first) * D];
      for (int w = 0; w < kWords; ++w) {
        __m512i even[4], odd[4];
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
          even[g] = _mm512_and_si512(_mm512_srli_epi16(words[w][g], 4), low);
          odd[g] = _mm512_and_si512(words[w][g], low);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m512i q_even = broadcast(plane + r * D + 4 * w);
#pragma GCC unroll 4
          for (int g = 0; g < 4; ++g) sum[r][g] = _mm512_dpbusd_epi32(sum[r][g], even[g], q_even);
          const __m512i q_odd = broadcast(plane + r * D + kHalf + 4 * w);
#pragma GCC unroll 4
          for (int g = 0; g < 4; ++g) sum[r][g] = _mm512_dpbusd_epi32(sum[r][g], odd[g], q_odd);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {  // codes times 16, and 8 more; offset_a / 128 is the sum of qa
        const __m512i offset = _mm512_set1_epi32(q.offset_a[first + r] / 128 * 120);
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
          const __m512i product = _mm512_sub_epi32(_mm512_slli_epi32(sum[r][g], 4), offset);
          _mm512_store_si512(d0 + (first + r) * kTile + kLanes * g, product);
        }
      }
    });
  }

  /// words[4 j] lane i = 4 bytes of row i from 4 j on. rows: the first 16 bytes of 16 plane rows.
  static void transpose(const uint8_t* rows, __m512i* words) {
    __m512i part[4];  // row i of each of the four 4-row groups, 16 bytes a group
    for (int i = 0; i < 4; ++i) {
      const auto quad = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + row * kHalf)); };
      part[i] = _mm512_inserti32x4(
          _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(quad(i)), quad(i + 4), 1), quad(i + 8), 2),
          quad(i + 12), 3);
    }
    const __m512i ab_low = _mm512_unpacklo_epi32(part[0], part[1]), ab_high = _mm512_unpackhi_epi32(part[0], part[1]);
    const __m512i cd_low = _mm512_unpacklo_epi32(part[2], part[3]), cd_high = _mm512_unpackhi_epi32(part[2], part[3]);
    words[0] = _mm512_unpacklo_epi64(ab_low, cd_low);
    words[4] = _mm512_unpackhi_epi64(ab_low, cd_low);
    words[8] = _mm512_unpacklo_epi64(ab_high, cd_high);
    words[12] = _mm512_unpackhi_epi64(ab_high, cd_high);
  }

  /// Few keys: every key's products are summed along its row, and 16 keys' sums are then gathered in one register.
  template <bool Both>
  static void dots(const uint8_t* bytes, int count, const int8_t* qa, const int8_t* qb, const int32_t* offset, int rows,
                   int32_t* out) {
    for (int i = 0; i < count; i += kLanes) {
      const int quads = (std::min(count - i, kLanes) + 3) / 4;
      for (int r = 0; r < rows; ++r) {
        __m512i a[D / 64], b[D / 64];
        for (int c = 0; c < D / 64; ++c) {
          a[c] = _mm512_loadu_si512(qa + r * D + 64 * c);
          if constexpr (Both) b[c] = _mm512_loadu_si512(qb + r * D + 64 * c);
        }
        const auto dot = [&](int key) {
          __m512i high = _mm512_setzero_si512(), low = high;
          for (int c = 0; c < D / 64; ++c) {
            const __m512i u = _mm512_loadu_si512(bytes + key * D + 64 * c);
            high = _mm512_dpbusd_epi32(high, u, a[c]);
            if constexpr (Both) low = _mm512_dpbusd_epi32(low, u, b[c]);
          }
          return Both ? _mm512_add_epi32(_mm512_slli_epi32(high, 8), low) : high;
        };
        __m512i part[4] = {};  // lane 4 j + i: the part of key i that 128 bits j of its row make
        for (int k = 0; k < quads; ++k) {
          const int key = i + 4 * k;
          part[k] = add_lanes(dot(key), dot(key + 1), dot(key + 2), dot(key + 3));
        }
        const __m512i ab = _mm512_add_epi32(_mm512_shuffle_i32x4(part[0], part[1], 0x88),
                                            _mm512_shuffle_i32x4(part[0], part[1], 0xDD));
        const __m512i cd = _mm512_add_epi32(_mm512_shuffle_i32x4(part[2], part[3], 0x88),
                                            _mm512_shuffle_i32x4(part[2], part[3], 0xDD));
        const __m512i sum = _mm512_add_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xDD));
        _mm512_store_si512(out + r * kTile + i, _mm512_sub_epi32(sum, _mm512_set1_epi32(offset[r])));
      }
    }
  }

  /// Within each 128 bits: the sums of a's lanes, of b's, c's and d's.
  static __m512i add_lanes(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  }

  static uint64_t at_least(float margin, const float* scale, const float* x, float threshold) {
    const __m512 m = _mm512_set1_ps(margin), limit = _mm512_set1_ps(threshold);
    uint64_t mask = 0;
    for (int k = 0; k < kTile; k += kLanes) {
      const __m512 value = _mm512_fmadd_ps(m, _mm512_loadu_ps(scale + k), _mm512_loadu_ps(x + k));
      mask |= static_cast<uint64_t>(_mm512_cmp_ps_mask(value, limit, _CMP_GE_OQ)) << k;
    }
    return mask;
  }

  static uint64_t at_least(const float* x, float threshold) {
    const __m512 limit = _mm512_set1_ps(threshold);
    uint64_t mask = 0;
    for (int k = 0; k < kTile; k += kLanes)
      mask |= static_cast<uint64_t>(_mm512_cmp_ps_mask(_mm512_loadu_ps(x + k), limit, _CMP_GE_OQ)) << k;
    return mask;
  }

  /// The same operations as GenericOps::weigh, 16 keys at a time (numerics/exp2.h).
  static int64_t weigh(uint64_t visible, float* x) {
    const auto constant = [](float c) { return _mm512_set1_ps(c); };
    __m512i sum = _mm512_setzero_si512();
    for (int k = 0; k < kTile; k += kLanes) {
      __m512 v = _mm512_max_ps(_mm512_loadu_ps(x + k), constant(numerics::kExp2Min));  // a NaN becomes the minimum
      v = _mm512_min_ps(v, constant(numerics::kExp2Max));
      const __m512 n = _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      const __m512 f = _mm512_sub_ps(v, n);
      __m512 p = constant(numerics::kExp2C5);
      p = _mm512_fmadd_ps(p, f, constant(numerics::kExp2C4));
      p = _mm512_fmadd_ps(p, f, constant(numerics::kExp2C3));
      p = _mm512_fmadd_ps(p, f, constant(numerics::kExp2C2));
      p = _mm512_fmadd_ps(p, f, constant(numerics::kExp2C1));
      p = _mm512_fmadd_ps(p, f, constant(1.0f));
      const __m512 value = _mm512_scalef_ps(p, _mm512_add_ps(n, constant(numerics::kFraction)));
      _mm512_storeu_ps(x + k, value);
      sum = _mm512_add_epi64(sum, pair_sums(_mm512_maskz_cvtps_epu32(static_cast<__mmask16>(visible >> k), value)));
    }
    return _mm512_reduce_add_epi64(sum);
  }

  static Mass codes(const float* scaled, uint64_t gone, int shift, uint8_t* codes) {
    const __m512i half = _mm512_set1_epi32(static_cast<int>((1u << shift) >> 1)), most = _mm512_set1_epi32(255);
    const __m128i bits = _mm_cvtsi32_si128(shift);
    __m512i weights = _mm512_setzero_si512(), code_sum = weights;
    Mass mass{};
    for (int k = 0; k < kTile; k += kLanes) {
      const __m512i w = _mm512_maskz_cvtps_epu32(static_cast<__mmask16>(gone >> k), _mm512_loadu_ps(scaled + k));
      const __m512i code = _mm512_min_epu32(_mm512_srl_epi32(_mm512_add_epi32(w, half), bits), most);
      weights = _mm512_add_epi64(weights, pair_sums(w));
      code_sum = _mm512_add_epi32(code_sum, code);
      mass.coded |= static_cast<uint64_t>(_mm512_test_epi32_mask(code, code)) << k;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + k), _mm512_cvtepi32_epi8(code));
    }
    mass.weights = _mm512_reduce_add_epi64(weights);
    mass.codes = _mm512_reduce_add_epi32(code_sum);
    return mass;
  }

  static void scales(const uint16_t* scales, float* out) {
    static constexpr auto kOrder = [] {
      std::array<uint16_t, kTile> order{};
      for (int k = 0; k < kTile; ++k) order[k] = static_cast<uint16_t>(numerics::scale_slot(k));
      return order;
    }();
    const __m512i low = _mm512_loadu_si512(scales), high = _mm512_loadu_si512(scales + 32);
    for (int k = 0; k < kTile; k += 32) {
      const __m512i ordered = _mm512_permutex2var_epi16(low, _mm512_loadu_si512(&kOrder[k]), high);
      const __m512i first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(ordered));
      const __m512i second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(ordered, 1));
      _mm512_storeu_si512(out + k, _mm512_slli_epi32(first, 16));
      _mm512_storeu_si512(out + k + kLanes, _mm512_slli_epi32(second, 16));
    }
  }

  static void weights_log2(const int32_t* dot, float scale, const float* key_scale, float z, float* x) {
    const __m512 factor = _mm512_set1_ps(scale), reference = _mm512_set1_ps(z);
    for (int k = 0; k < kTile; k += kLanes) {
      const __m512 f = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(dot + k)), factor);
      _mm512_storeu_ps(x + k, _mm512_fmsub_ps(f, _mm512_loadu_ps(key_scale + k), reference));
    }
  }

  template <typename T>
  static void pack(const T* values, uint64_t keys, T* packed) {
    static_assert(sizeof(T) == 4);
    for (int k = 0; k < kTile; k += kLanes) {
      const __mmask16 part = static_cast<__mmask16>(keys >> k);
      _mm512_storeu_si512(packed, _mm512_maskz_compress_epi32(part, _mm512_loadu_si512(values + k)));
      packed += std::popcount(static_cast<uint16_t>(part));
    }
  }

  static void unpack(const float* packed, uint64_t keys, float* values) {
    for (int k = 0, n = 0; k < kTile; k += kLanes) {
      const __mmask16 part = static_cast<__mmask16>(keys >> k);
      const __m512 expanded = _mm512_mask_expand_ps(_mm512_loadu_ps(values + k), part, _mm512_loadu_ps(packed + n));
      _mm512_storeu_ps(values + k, expanded);
      n += std::popcount(static_cast<uint16_t>(part));
    }
  }

  static void value_weights(const float* scaled, const float* share, uint32_t* weights) {
    for (int k = 0; k < kTile; k += kLanes) {
      const __m512 w = _mm512_mul_ps(_mm512_loadu_ps(scaled + k), _mm512_loadu_ps(share + k));
      _mm512_storeu_si512(weights + k, _mm512_cvtps_epu32(w));  // saturates
    }
  }

  static Widths widths(const uint32_t* weights, int rows) {
    Widths widths;
    for (int k = 0; k < kTile; k += kLanes) {
      __m512i any = _mm512_loadu_si512(weights + k);
      for (int r = 1; r < rows; ++r) any = _mm512_or_si512(any, _mm512_loadu_si512(weights + r * kTile + k));
      const uint64_t two = _mm512_cmpge_epu32_mask(any, _mm512_set1_epi32(0x100));
      const uint64_t four = _mm512_cmpge_epu32_mask(any, _mm512_set1_epi32(0x10000));
      widths.one |= (_mm512_test_epi32_mask(any, any) & ~two) << k;
      widths.two |= (two & ~four) << k;
      widths.four |= four << k;
    }
    return widths;
  }
};

}  // namespace

DecodeKernels decode_kernels_avx512() { return {sum_range<Avx512Ops>, score_keys<Avx512Ops>}; }

}  // namespace fold::cpu
#endif
