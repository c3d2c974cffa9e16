#include <immintrin.h>

#include "cpu/decode_ops_generic.h"

namespace fold::cpu {
namespace {

// 16 keys stand in the 16 lanes of a register. Plane rows are transposed into words of 4 bytes, lane = key, once for
// all the query rows; a query word is broadcast from memory into the dot product (vpdpbusd, u8 x s8).
struct Avx512Ops : GenericOps {
  static constexpr int kLanes = 16;
  static constexpr int kMaxWords = numerics::kMaxHeadDim / 4;

  struct Words {
    __m512i word[kMaxWords];  // word w of 16 keys
  };

  /// words.word[w] lane i = bytes 4w..4w+3 of row i. rows: 16 pointers; count: words a row has (a multiple of 4).
  static void transpose(const uint8_t* const* rows, int count, Words& words) {
    for (int w = 0; w < count; w += 4) {
      __m512i part[4];  // row i of each of the four 4-row groups, 16 bytes a group
      for (int i = 0; i < 4; ++i) {
        const auto quad = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + 4 * w)); };
        part[i] = _mm512_inserti32x4(
            _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(quad(i)), quad(i + 4), 1), quad(i + 8), 2),
            quad(i + 12), 3);
      }
      const __m512i ab_low = _mm512_unpacklo_epi32(part[0], part[1]), ab_high = _mm512_unpackhi_epi32(part[0], part[1]);
      const __m512i cd_low = _mm512_unpacklo_epi32(part[2], part[3]), cd_high = _mm512_unpackhi_epi32(part[2], part[3]);
      words.word[w] = _mm512_unpacklo_epi64(ab_low, cd_low);
      words.word[w + 1] = _mm512_unpackhi_epi64(ab_low, cd_low);
      words.word[w + 2] = _mm512_unpacklo_epi64(ab_high, cd_high);
      words.word[w + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
    }
  }

  static __m512i query_word(const int8_t* q, int w) {
    int32_t value;
    __builtin_memcpy(&value, q + 4 * w, sizeof(value));
    return _mm512_set1_epi32(value);
  }

  /// out[r] lane i = sum over the bytes of words (even, then odd) with the two query planes. R rows at once.
  template <int R>
  static void dot_pair(const Words& even, const Words& odd, int count, const int8_t* q_even, const int8_t* q_odd,
                       int stride, __m512i* out) {
    __m512i sum[R];
    for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_si512();
    for (int w = 0; w < count; ++w) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sum[r] = _mm512_dpbusd_epi32(sum[r], even.word[w], query_word(q_even + r * stride, w));
        sum[r] = _mm512_dpbusd_epi32(sum[r], odd.word[w], query_word(q_odd + r * stride, w));
      }
    }
    for (int r = 0; r < R; ++r) out[r] = sum[r];
  }

  /// Calls f(first_row, integral_constant<R>) over the rows in runs of 8, 4, 2, 1.
  template <class F>
  static void by_rows(int rows, F f) {
    int r = 0;
    for (; r + 8 <= rows; r += 8) f(r, std::integral_constant<int, 8>{});
    if (rows - r >= 4) f(r, std::integral_constant<int, 4>{}), r += 4;
    if (rows - r >= 2) f(r, std::integral_constant<int, 2>{}), r += 2;
    if (rows - r >= 1) f(r, std::integral_constant<int, 1>{});
  }

  static void pad(const uint8_t** rows, int count) {
    for (int i = count; i < kLanes; ++i) rows[i] = rows[0];
  }

  static void store(int32_t* to, __m512i value) { _mm512_storeu_si512(to, value); }

  static void scan(const uint8_t* h, const Group& g, int32_t* d0) {
    const uint8_t* rows[kTile];
    for (int k = 0; k < kTile; ++k) rows[k] = h + static_cast<int64_t>(k) * (g.head_dim / 2);
    for (int k = 0; k < kTile; k += kLanes) dot_h(rows + k, g, d0 + k);
  }

  static void dots_h(const KeyRows& keys, int count, const Group& g, int32_t* d0) {
    for (int k = 0; k < count; k += kLanes) {
      const uint8_t* rows[kLanes];
      const int n = std::min(count - k, kLanes);
      std::copy_n(keys.h + k, n, rows);
      pad(rows, n);
      dot_h(rows, g, d0 + k);
    }
  }

  static void dot_h(const uint8_t* const* rows, const Group& g, int32_t* d0) {
    const int half = g.head_dim / 2, count = half / 4;
    const __m512i low = _mm512_set1_epi8(15);
    Words even, odd;
    transpose(rows, count, odd);
    for (int w = 0; w < count; ++w) {
      even.word[w] = _mm512_and_si512(_mm512_srli_epi16(odd.word[w], 4), low);
      odd.word[w] = _mm512_and_si512(odd.word[w], low);
    }
    by_rows(g.rows, [&](int r, auto size) {
      constexpr int R = decltype(size)::value;
      __m512i sum[R];
      dot_pair<R>(even, odd, count, &g.query.a_even[static_cast<size_t>(r) * half],
                  &g.query.a_odd[static_cast<size_t>(r) * half], half, sum);
      for (int i = 0; i < R; ++i) {
        const __m512i offset = _mm512_set1_epi32(120 * g.query.sum_a[r + i]);
        store(d0 + (r + i) * kTile, _mm512_sub_epi32(_mm512_slli_epi32(sum[i], 4), offset));
      }
    });
  }

  static void dots_a(const KeyRows& keys, int count, const Group& g, int32_t* d1) {
    const int half = g.head_dim / 2, words = half / 4;
    const Query& q = g.query;
    const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(static_cast<char>(0xF0));
    for (int k = 0; k < count; k += kLanes) {
      const uint8_t *h_rows[kLanes], *l_rows[kLanes];
      const int n = std::min(count - k, kLanes);
      std::copy_n(keys.h + k, n, h_rows);
      std::copy_n(keys.l + k, n, l_rows);
      pad(h_rows, n);
      pad(l_rows, n);
      Words even, odd;  // a + 128
      transpose(h_rows, words, even);
      transpose(l_rows, words, odd);
      for (int w = 0; w < words; ++w) {
        const __m512i h = even.word[w], l = odd.word[w];
        even.word[w] = _mm512_or_si512(_mm512_and_si512(h, high), _mm512_and_si512(_mm512_srli_epi16(l, 4), low));
        odd.word[w] = _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi16(h, 4), high), _mm512_and_si512(l, low));
      }
      by_rows(g.rows, [&](int r, auto size) {
        constexpr int R = decltype(size)::value;
        const size_t at = static_cast<size_t>(r) * half;
        __m512i a[R], b[R];
        dot_pair<R>(even, odd, words, &q.a_even[at], &q.a_odd[at], half, a);
        dot_pair<R>(even, odd, words, &q.b_even[at], &q.b_odd[at], half, b);
        for (int i = 0; i < R; ++i) {
          const __m512i offset = _mm512_set1_epi32(128 * (256 * q.sum_a[r + i] + q.sum_b[r + i]));
          store(d1 + (r + i) * kTile + k, _mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32(a[i], 8), b[i]), offset));
        }
      });
    }
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

  static void values(const int16_t* readings, const double* weights, int count, int rows, int d, double* sums) {
    for (int c = 0; c < d; c += 32) {
      by_rows(rows, [&](int r, auto size) {
        constexpr int R = decltype(size)::value < 4 ? decltype(size)::value : 4;
        for (int first = r; first < r + decltype(size)::value; first += R) {
          value_block<R>(readings + c, weights + first * kTile, count, d, sums + static_cast<size_t>(first) * d + c);
        }
      });
    }
  }

  /// 32 channels of R rows. Products and sums are integers below 2^53, so fusing them changes no bit.
  template <int R>
  static void value_block(const int16_t* readings, const double* weights, int count, int d, double* sums) {
    __m512d sum[R][4];
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < 4; ++j) sum[r][j] = _mm512_loadu_pd(sums + static_cast<size_t>(r) * d + 8 * j);
    }
    for (int i = 0; i < count; ++i) {
      const int16_t* reading = readings + static_cast<size_t>(i) * d;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(reading + 8 * j));
        const __m512d value = _mm512_cvtepi32_pd(_mm256_cvtepi16_epi32(packed));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
          sum[r][j] = _mm512_fmadd_pd(_mm512_set1_pd(weights[r * kTile + i]), value, sum[r][j]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < 4; ++j) _mm512_storeu_pd(sums + static_cast<size_t>(r) * d + 8 * j, sum[r][j]);
    }
  }
};

}  // namespace

DecodeKernels decode_kernels_avx512() { return {sum_range<Avx512Ops>, score_keys<Avx512Ops>}; }

}  // namespace fold::cpu
