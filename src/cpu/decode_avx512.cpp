#if defined(__x86_64__)
// g++ 12 takes the deliberately undefined operands inside its own AVX-512 header for mistakes (GCC bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <array>

#include "cpu/decode_ops_generic.h"
#include "cpu/decode_sums_avx512.h"
#include "cpu/decode_worker.h"

namespace fold::cpu {
namespace {

/// Sums of neighbouring unsigned 32-bit lanes.
__m512i pair_sums(__m512i v) {
  return _mm512_add_epi64(_mm512_and_si512(v, _mm512_set1_epi64(0xFFFFFFFF)), _mm512_srli_epi64(v, 32));
}

template <int D>
struct Avx512Ops : GenericOps<D> {
  using typename GenericOps<D>::Mass;
  static constexpr int kHalf = D / 2;
  template <int Bytes>
  using Sums = Avx512Sums<D, Bytes>;

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
      for (int r = 0; r < R; ++r) {  // codes times 32 are 241 above 32 h + 15
        const __m512i offset = _mm512_set1_epi32(241 * q.sum_a[first + r]);
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
          const __m512i product = _mm512_sub_epi32(_mm512_slli_epi32(sum[r][g], 5), offset);
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

  /// Few keys: every key's products are summed along its row, for four keys and four query rows at once.
  template <bool Both, class Row>
  static void dots(const Row* keys, int count, const int8_t* qa, const int8_t* qb, const int32_t* sums, int rows,
                   int32_t* out) {
    for (int k = 0; k < count; k += 4) {
      __m512i key[4][D / 64];
      load_keys(keys + k, key);
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
        const auto put = [&](int r, __m128i raised) {
          _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (first + r) * kTile + k),
                           _mm_sub_epi32(raised, _mm_set1_epi32(128 * sums[first + r])));
        };
        [&]<int... r>(std::integer_sequence<int, r...>) {  // 128 bits a query row
          (put(r, _mm512_extracti32x4_epi32(total, r)), ...);
        }
        (std::make_integer_sequence<int, R>{});
      });
    }
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

  static uint64_t logits(const int32_t* dots, uint64_t keys, const RowScale& row, const float* key_scale, float* x) {
    const __m512 unit = _mm512_set1_ps(row.unit), z = _mm512_set1_ps(row.z);
    const __m512 margin = _mm512_set1_ps(row.margin), threshold = _mm512_set1_ps(row.threshold);
    uint64_t wanted = 0;
    for (int k = 0; k < kTile; k += kLanes) {
      const __mmask16 part = static_cast<__mmask16>(keys >> k);
      const __m512 scale = _mm512_loadu_ps(key_scale + k);
      const __m512 value = _mm512_fmsub_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(expand(part, dots)), unit), scale, z);
      _mm512_mask_storeu_ps(x + k, part, value);
      const __m512 most = _mm512_fmadd_ps(margin, scale, value);
      wanted |= static_cast<uint64_t>(_mm512_mask_cmp_ps_mask(part, most, threshold, _CMP_GE_OQ)) << k;
    }
    return wanted;
  }

  static ValueKeys value_keys(const float* x, const numerics::Gates* gates, float deeper, int rows) {
    ValueKeys keys;
    for (int k = 0; k < kTile; k += kLanes) {
      __mmask16 h = 0, l = 0, b = 0;
      for (int r = 0; r < rows; ++r) {
        const __m512 below = _mm512_xor_ps(_mm512_loadu_ps(x + r * kTile + k), _mm512_set1_ps(-0.0f));
        h = _kor_mask16(h, _mm512_cmp_ps_mask(below, _mm512_set1_ps(gates[r].v_h + deeper), _CMP_LE_OQ));
        l = _kor_mask16(l, _mm512_cmp_ps_mask(below, _mm512_set1_ps(gates[r].v_l + deeper), _CMP_LE_OQ));
        b = _kor_mask16(b, _mm512_cmp_ps_mask(below, _mm512_set1_ps(gates[r].v_b + deeper), _CMP_LE_OQ));
      }
      keys.h |= static_cast<uint64_t>(h) << k;
      keys.l |= static_cast<uint64_t>(l) << k;
      keys.b |= static_cast<uint64_t>(b) << k;
    }
    return keys;
  }

  /// The same operations as GenericOps::weigh, 16 keys at a time (numerics/exp2.h).
  static int64_t weigh(uint64_t visible, uint64_t read, float* x, float* peak) {
    const auto constant = [](float c) { return _mm512_set1_ps(c); };
    __m512i sum = _mm512_setzero_si512();
    __m512 largest = _mm512_loadu_ps(peak);
    for (int k = 0; k < kTile; k += kLanes) {
      __m512 v = _mm512_loadu_ps(x + k);
      largest = _mm512_mask_max_ps(largest, static_cast<__mmask16>(read >> k), largest, v);
      v = _mm512_max_ps(v, constant(numerics::kExp2Min));  // a NaN becomes the minimum
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
    _mm512_storeu_ps(peak, largest);
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

  static void level_2(const int32_t* first, uint64_t keys, const int32_t* second, uint64_t further, float scale,
                      const float* key_scale, float z, float* x) {
    const __m512 unit = _mm512_set1_ps(numerics::mul(scale, 0x1p-8f)), reference = _mm512_set1_ps(z);
    for (int k = 0; k < kTile; k += kLanes) {
      const __mmask16 part = static_cast<__mmask16>(further >> k);
      const __m512 d1 = _mm512_cvtepi32_ps(expand(static_cast<__mmask16>(keys >> k), first));
      const __m512 d2 = _mm512_cvtepi32_ps(expand(part, second));
      const __m512 dot = _mm512_add_ps(d1, _mm512_mul_ps(d2, _mm512_set1_ps(0x1p-8f)));
      const __m512 value = _mm512_fmsub_ps(_mm512_mul_ps(dot, unit), _mm512_loadu_ps(key_scale + k), reference);
      _mm512_mask_storeu_ps(x + k, part, value);
    }
  }

  /// The next integers of a list in the lanes of `keys`; the other lanes hold anything.
  static __m512i expand(__mmask16 keys, const int32_t*& list) {
    const __m512i next = _mm512_loadu_si512(list);
    list += std::popcount(static_cast<uint16_t>(keys));
    return _mm512_mask_expand_epi32(next, keys, next);  // zeroing would wait for the register's last user
  }

  static ValueMass value_weights(const float* scaled, const float* scale, float unit, uint64_t read, uint64_t half,
                                 uint32_t* weights) {
    __m512i all = _mm512_setzero_si512(), halved = all;
    for (int k = 0; k < kTile; k += kLanes) {
      const __m512 share = _mm512_mul_ps(_mm512_loadu_ps(scale + k), _mm512_set1_ps(unit));
      const __m512 w = _mm512_mul_ps(_mm512_loadu_ps(scaled + k), share);
      const __m512i rounded = _mm512_maskz_cvtps_epu32(static_cast<__mmask16>(read >> k), w);  // saturates
      _mm512_storeu_si512(weights + k, rounded);
      all = _mm512_add_epi64(all, pair_sums(rounded));
      halved = _mm512_add_epi64(halved, pair_sums(_mm512_maskz_mov_epi32(static_cast<__mmask16>(half >> k), rounded)));
    }
    return {_mm512_reduce_add_epi64(all), _mm512_reduce_add_epi64(halved)};
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

DecodeKernels decode_kernels_avx512() { return kernels_of<Avx512Ops>(); }

}  // namespace fold::cpu
#endif
