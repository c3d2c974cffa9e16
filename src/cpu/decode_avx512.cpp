#if defined(__x86_64__)
// g++ 12 takes the deliberately undefined operands inside its own AVX-512 header for mistakes (GCC bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <array>

#include "cpu/decode_kernels.h"
#include "cpu/decode_ops_generic.h"
#include "cpu/decode_sums_avx512.h"

namespace fold::cpu {
namespace {

/// A sum of unsigned 32-bit lanes: of pairs as 64-bit integers, and of their upper halves.
struct LaneSum {
  void add(__m512i lanes) {
    pairs = _mm512_add_epi64(pairs, lanes);
    upper = _mm512_add_epi64(upper, _mm512_srli_epi64(lanes, 32));
  }
  int64_t total() const {  // an upper half counts 2^32 in its pair
    const __m512i lower = _mm512_sub_epi64(pairs, _mm512_slli_epi64(upper, 32));
    return _mm512_reduce_add_epi64(_mm512_add_epi64(lower, upper));
  }
  __m512i pairs = _mm512_setzero_si512(), upper = _mm512_setzero_si512();
};

template <int D>
struct Avx512Ops : GenericOps<D> {
  using LaneSum = cpu::LaneSum;
  static constexpr int kHalf = D / 2;
  template <int Bytes>
  using Sums = Avx512Sums<D, Bytes>;

  /// 16 keys stand in the 16 lanes of a register: rows are transposed into words of 4 bytes, once for all the query
  /// rows, and a query word is broadcast to meet the four registers of the tile. Odd channels first, the low nibbles;
  /// even ones stay in the high nibbles, 16 times their codes.
  static void scan(const uint8_t* h, const Coming& coming, const Query& q, int rows, int32_t* d0) {
    constexpr int kWords = kHalf / 4;
    __m512i words[kWords][4];  // [w][g] lane i: bytes 4w..4w+3 of key 16 g + i
    for (int g = 0; g < 4; ++g) {
      for (int w = 0; w < kWords; w += 4) transpose(h + g * kLanes * kHalf + 4 * w, &words[w][g]);
    }
    by_rows(rows, [&](int first, auto size) {
      constexpr int R = decltype(size)::value;
      __m512i sum[R][4];
#pragma GCC unroll 16
      for (int i = 0; i < 4 * R; ++i) sum[i / 4][i % 4] = _mm512_setzero_si512();
      const int8_t* const even = &q.a_split[static_cast<size_t>(first) * D];
      add_products(words, _mm512_set1_epi8(15), even + kHalf, coming, 0, sum);
#pragma GCC unroll 16
      for (int i = 0; i < 4 * R; ++i) sum[i / 4][i % 4] = _mm512_slli_epi32(sum[i / 4][i % 4], 4);
      add_products(words, _mm512_set1_epi8(static_cast<char>(0xF0)), even, coming, kTile * kHalf / 2, sum);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {  // codes times 32 are 241 above 32 h + 15
        const __m512i offset = _mm512_set1_epi32(241 * q.sum_a[first + r]);
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
          const __m512i product = _mm512_sub_epi32(_mm512_add_epi32(sum[r][g], sum[r][g]), offset);
          _mm512_store_si512(d0 + (first + r) * kTile + kLanes * g, product);
        }
      }
    });
  }

  /// Adds the products of the words' bits in `mask` with R query rows, D apart. Sends for half a tile, from byte `at`
  /// on.
  template <int R>
  static void add_products(const __m512i (*words)[4], __m512i mask, const int8_t* query, const Coming& coming,
                           int64_t at, __m512i (&sum)[R][4]) {
    for (int w = 0; w < kHalf / 4; ++w) {
      coming.send(at + 128 * w);
      coming.send(at + 128 * w + 64);
      __m512i codes[4];
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) codes[g] = _mm512_and_si512(words[w][g], mask);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512i q = broadcast(query + r * D + 4 * w);
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) sum[r][g] = _mm512_dpbusd_epi32(sum[r][g], codes[g], q);
      }
    }
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

  /// Four keys: every key's products are summed along its row, for four query rows at once. f(first, used, products):
  /// lane 4 r + i is key i's product with row first + r; `used`: the lanes that have a row.
  template <bool Both, class Row, class F>
  static void quad_dots(const Row* keys, const int8_t* qa, const int8_t* qb, const int32_t* sums, int rows, F f) {
    __m512i key[4][D / 64];
    load_keys(keys, key);
    by_rows(rows, [&](int first, auto size) {
      constexpr int R = decltype(size)::value;
      __m512i part[4] = {};  // lane 4 j + i of a query row: what 128 bits j of key i add to its product
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int8_t *a = qa + (first + r) * D, *b = qb + (first + r) * D;
        part[r] = add_lanes(dot<Both>(key[0], a, b), dot<Both>(key[1], a, b), dot<Both>(key[2], a, b),
                            dot<Both>(key[3], a, b));
      }
      const __m512i total = add_quarters(add_quarters(part[0], part[1]), add_quarters(part[2], part[3]));
      const __m128i raised = _mm_slli_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sums + first)), 7);
      const __m512i by_row = _mm512_permutexvar_epi32(quarters(), _mm512_castsi128_si512(raised));
      f(first, static_cast<__mmask16>((1u << 4 * R) - 1), _mm512_sub_epi32(total, by_row));
    });
  }

  /// Lane i of 16 holds i / 4.
  static __m512i quarters() { return _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3); }

  template <bool Both, class Row>
  static void dots(const Row* keys, const int8_t* qa, const int8_t* qb, const int32_t* sums, int rows, int32_t* out) {
    quad_dots<Both>(keys, qa, qb, sums, rows, [&](int first, __mmask16 /*used*/, __m512i products) {
      _mm512_storeu_si512(out + 4 * first, products);
    });
  }

  template <int Block = 0, class Row>
  static void load_keys(const Row* keys, __m512i (&out)[4][D / 64]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) out[i][Block] = RowBytes<D, Block>::raised(keys[i]);
    if constexpr (Block + 1 < D / 64) load_keys<Block + 1>(keys, out);
  }

  /// sum key qa or 256 sum key qa + sum key qb, spread over 16 lanes.
  template <bool Both>
  static __m512i dot(const __m512i (&key)[D / 64], const int8_t* qa, const int8_t* qb) {
    __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int c = 0; c < D / 64; ++c) sum = _mm512_dpbusd_epi32(sum, key[c], _mm512_loadu_si512(qa + 64 * c));
    if constexpr (Both) {
      sum = _mm512_slli_epi32(sum, 8);
#pragma GCC unroll 4
      for (int c = 0; c < D / 64; ++c) sum = _mm512_dpbusd_epi32(sum, key[c], _mm512_loadu_si512(qb + 64 * c));
    }
    return sum;
  }

  /// Neighbouring 128 bits added: a's into the lower half, b's into the upper.
  static __m512i add_quarters(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
  }

  /// Within each 128 bits: the sums of a's lanes, of b's, c's and d's.
  static __m512i add_lanes(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  }

  static __m512 constant(float c) { return _mm512_set1_ps(c); }

  static __m512 log2_weight(__m512 product, __m512 unit, __m512 key_scale, __m512 z) {
    return _mm512_fmsub_ps(_mm512_mul_ps(product, unit), key_scale, z);
  }

  static uint64_t level_0(const int32_t* d0, int rows, const RowScales& scales, const float* key_scale, float* x) {
    uint64_t wanted = 0;
    for (int k = 0; k < kTile; k += kLanes) {
      const __m512 scale = _mm512_load_ps(key_scale + k);
      __mmask16 content = 0xFFFF;  // keys that no row asks for
      for (int r = 0; r < rows; ++r) {
        const RowScale& row = scales.row[r];
        const __m512 product = _mm512_cvtepi32_ps(_mm512_load_si512(d0 + r * kTile + k));
        const __m512 value = log2_weight(product, constant(row.unit), scale, constant(row.z));
        _mm512_store_ps(x + r * kChunk + k, value);
        const __m512 most = _mm512_fmadd_ps(constant(row.margin), scale, value);
        content = _mm512_mask_cmp_ps_mask(content, most, constant(row.threshold), _CMP_NGE_UQ);
      }
      wanted |= uint64_t{static_cast<uint16_t>(~content)} << k;
    }
    return wanted;
  }

  /// A row's scales in the four lanes of its products.
  struct QuadScales {
    explicit QuadScales(const RowScale* first) : all(_mm512_loadu_ps(first)) {}
    __m512 unit() const { return _mm512_permute_ps(all, 0x00); }
    __m512 z() const { return _mm512_permute_ps(all, 0x55); }
    __m512 margin() const { return _mm512_permute_ps(all, 0xAA); }
    __m512 threshold() const { return _mm512_permute_ps(all, 0xFF); }
    __m512 all;
  };

  static unsigned level_1(const SplitRow* keys, const Query& q, int rows, const RowScales& scales,
                          const float* key_scale, int32_t* d1, float* x) {
    const __m512 scale = _mm512_broadcast_f32x4(_mm_loadu_ps(key_scale));
    unsigned wanted = 0;
    const auto put = [&](int first, __mmask16 used, __m512i products) {
      const QuadScales row(&scales.row[first]);
      const __m512 value = log2_weight(_mm512_cvtepi32_ps(products), row.unit(), scale, row.z());
      _mm512_storeu_si512(d1 + 4 * first, products);
      _mm512_storeu_ps(x + 4 * first, value);
      const __m512 most = _mm512_fmadd_ps(row.margin(), scale, value);
      wanted |= _mm512_mask_cmp_ps_mask(used, most, row.threshold(), _CMP_GE_OQ);
    };
    quad_dots<true>(keys, q.a_split.data(), q.b_split.data(), q.sum, rows, put);
    wanted |= wanted >> 8;
    return (wanted | wanted >> 4) & 15;
  }

  static void level_2(const PlainRow* keys, const Query& q, int rows, const RowScales& scales, const float* key_scale,
                      const int32_t* d1, float* x) {
    const __m512 scale = _mm512_broadcast_f32x4(_mm_loadu_ps(key_scale));
    const auto put = [&](int first, __mmask16 used, __m512i products) {
      const QuadScales row(&scales.row[first]);
      const __m512 high = _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(used, d1 + 4 * first));
      const __m512 low = _mm512_mul_ps(_mm512_cvtepi32_ps(products), constant(0x1p-8f));
      _mm512_storeu_ps(x + 4 * first, log2_weight(_mm512_add_ps(high, low), row.unit(), scale, row.z()));
    };
    quad_dots<true>(keys, q.a.data(), q.b.data(), q.sum, rows, put);
  }

  static ValueKeys value_keys(const float* x, const ValueGates* gates, int rows) {
    // Few tiles hold a key whose deeper planes are asked for: they are looked for by a tile's largest x.
    __mmask16 content[4] = {0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF}, deeper = 0;
    for (int r = 0; r < rows; ++r) {
      __m512 largest = constant(-std::numeric_limits<float>::infinity());
      for (int i = 0; i < 4; ++i) {
        const __m512 value = _mm512_load_ps(x + r * kChunk + kLanes * i);
        content[i] = _mm512_mask_cmp_ps_mask(content[i], value, constant(gates[r].h), _CMP_NGE_UQ);
        largest = _mm512_max_ps(value, largest);  // the second where the first is NaN
      }
      deeper |= _mm512_cmp_ps_mask(largest, constant(std::min(gates[r].l, gates[r].b)), _CMP_GE_OQ);
    }
    ValueKeys keys;
    for (int i = 0; i < 4; ++i) keys.h |= uint64_t{static_cast<uint16_t>(~content[i])} << kLanes * i;
    if (deeper == 0) return keys;
    for (int r = 0; r < rows; ++r) {
      for (int k = 0; k < kTile; k += kLanes) {
        const __m512 value = _mm512_load_ps(x + r * kChunk + k);
        keys.l |= uint64_t{_mm512_cmp_ps_mask(value, constant(gates[r].l), _CMP_GE_OQ)} << k;
        keys.b |= uint64_t{_mm512_cmp_ps_mask(value, constant(gates[r].b), _CMP_GE_OQ)} << k;
      }
    }
    return keys;
  }

  /// 2^x in fixed point, unrounded: the operations of numerics::exp2_parts but for the limits of x, beyond which it is
  /// rounded to 0 or saturates as well. (An x that is NaN belongs to a row whose sums are of no account.)
  static __m512 scaled_exp2(__m512 x) {
    const auto raised = [](float c) { return constant(c * (1 << numerics::kFraction)); };
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 p = raised(numerics::kExp2C5);
    p = _mm512_fmadd_ps(p, f, raised(numerics::kExp2C4));
    p = _mm512_fmadd_ps(p, f, raised(numerics::kExp2C3));
    p = _mm512_fmadd_ps(p, f, raised(numerics::kExp2C2));
    p = _mm512_fmadd_ps(p, f, raised(numerics::kExp2C1));
    p = _mm512_fmadd_ps(p, f, raised(1.0f));
    return _mm512_scalef_ps(p, _mm512_sub_ps(x, f));
  }

  static __m512i dropped_weights(const float* x, uint64_t gone, int k) {
    return _mm512_maskz_cvtps_epu32(static_cast<__mmask16>(gone >> k), scaled_exp2(_mm512_load_ps(x + k)));
  }

  static void drop(const float* x, uint64_t gone, LaneSum& sum) {
    LaneSum total = sum;
    for (int k = 0; k < kTile; k += kLanes) total.add(dropped_weights(x, gone, k));
    sum = total;
  }

  static DroppedMass drop(const float* x, uint64_t gone, int shift, uint8_t* codes) {
    const __m512i half = _mm512_set1_epi32(static_cast<int>((1u << shift) >> 1)), most = _mm512_set1_epi32(255);
    const __m512i limit = _mm512_set1_epi32(static_cast<int>(kMostCoded));
    const __m128i bits = _mm_cvtsi32_si128(shift);
    LaneSum sum;
    __m512i code[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i weights = dropped_weights(x, gone, kLanes * i);
      sum.add(weights);
      const __m512i coded = _mm512_add_epi32(_mm512_min_epu32(weights, limit), half);
      code[i] = _mm512_min_epu32(_mm512_srl_epi32(coded, bits), most);
    }
    // Packing leaves bytes 4 j.. of register i in 32-bit lane 4 j + i.
    const __m512i packed =
        _mm512_packus_epi16(_mm512_packus_epi32(code[0], code[1]), _mm512_packus_epi32(code[2], code[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_store_si512(codes, _mm512_permutexvar_epi32(order, packed));
    return {sum.total(), _mm512_reduce_add_epi64(_mm512_sad_epu8(packed, _mm512_setzero_si512()))};
  }

  static void list(uint64_t set, int base, uint8_t* out) {
    static constexpr auto kPlaces = [] {
      std::array<uint8_t, kTile> places{};
      for (int k = 0; k < kTile; ++k) places[k] = static_cast<uint8_t>(k);
      return places;
    }();
    const __m512i places =
        _mm512_add_epi8(_mm512_loadu_si512(kPlaces.data()), _mm512_set1_epi8(static_cast<char>(base)));
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(set, places));
  }

  struct ReadSums {
    int64_t den() const { return den_.total(); }
    int64_t mass() const { return mass_.total(); }
    int64_t half() const { return half_.total(); }
    float peak() const { return _mm512_reduce_max_ps(peak_); }

    LaneSum den_, mass_, half_;
    __m512 peak_ = constant(-std::numeric_limits<float>::infinity());
  };

  static void read(const ReadList& list, const float* x, const float* scale, const float* unit, int rows,
                   ReadSums* sums, uint32_t* weights) {
    for (int i = 0; i < list.count; i += kLanes) {
      const __mmask16 used = static_cast<__mmask16>(list.count - i < kLanes ? (1u << (list.count - i)) - 1 : 0xFFFF);
      const __mmask16 half = static_cast<__mmask16>(~(list.l >> i));
      const __m512i keys = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(list.key + i)));
      const bool neighbours = used == 0xFFFF && list.key[i + kLanes - 1] - list.key[i] == kLanes - 1;
      const auto of_keys = [&](const float* all) {
        return neighbours ? _mm512_loadu_ps(all + list.key[i])
                          : _mm512_mask_i32gather_ps(_mm512_setzero_ps(), used, keys, all, 4);
      };
      const __m512 share = of_keys(scale);
      for (int r = 0; r < rows; ++r) {
        __m512 value = of_keys(x + r * kChunk);
        sums[r].peak_ = _mm512_mask_max_ps(sums[r].peak_, used, sums[r].peak_, value);
        value = _mm512_max_ps(value, constant(numerics::kExp2Min));  // a NaN becomes the minimum
        value = scaled_exp2(_mm512_min_ps(value, constant(numerics::kExp2Max)));
        sums[r].den_.add(_mm512_maskz_cvtps_epu32(used, value));
        const __m512i w = _mm512_maskz_cvtps_epu32(used, _mm512_mul_ps(value, _mm512_mul_ps(share, constant(unit[r]))));
        sums[r].mass_.add(w);
        sums[r].half_.add(_mm512_maskz_mov_epi32(half, w));
        _mm512_store_si512(weights + r * kTile + i, w);
      }
    }
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

  static Widths widths(const uint32_t* weights, int count, int rows) {
    Widths widths;
    for (int k = 0; k < count; k += kLanes) {
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

DecodeKernels decode_kernels_avx512() { return kernels_of<Avx512Ops>(); }

}  // namespace fold::cpu
#endif
