#include <immintrin.h>

#include <array>

#include "cpu/decode_ops_generic.h"
#include "cpu/decode_worker.h"

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

  /// Sums of neighbouring unsigned 32-bit lanes.
  static __m512i pair_sums(__m512i v) {
    return _mm512_add_epi64(_mm512_and_si512(v, _mm512_set1_epi64(0xFFFFFFFF)), _mm512_srli_epi64(v, 32));
  }

  /// As GenericOps::weigh; the same operations 16 keys at a time (numerics/exp2.h).
  static int64_t weigh(const float* x, uint64_t visible, float* scaled, uint32_t* weights) {
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
      _mm512_storeu_ps(scaled + k, value);
      const __m512i rounded = _mm512_maskz_cvtps_epu32(static_cast<__mmask16>(visible >> k), value);  // saturates
      _mm512_storeu_si512(weights + k, rounded);
      sum = _mm512_add_epi64(sum, pair_sums(rounded));
    }
    return _mm512_reduce_add_epi64(sum);
  }

  static int64_t codes(const uint32_t* weights, uint64_t gone, int shift, uint8_t* codes, int64_t& code_mass) {
    const __m512i half = _mm512_set1_epi32(static_cast<int>((1u << shift) >> 1)), most = _mm512_set1_epi32(255);
    const __m128i bits = _mm_cvtsi32_si128(shift);
    __m512i mass = _mm512_setzero_si512(), code_sum = mass;
    for (int k = 0; k < kTile; k += kLanes) {
      const __m512i weight = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(gone >> k), weights + k);
      const __m512i code = _mm512_min_epu32(_mm512_srl_epi32(_mm512_add_epi32(weight, half), bits), most);
      mass = _mm512_add_epi64(mass, pair_sums(weight));
      code_sum = _mm512_add_epi32(code_sum, code);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + k), _mm512_cvtepi32_epi8(code));
    }
    code_mass += _mm512_reduce_add_epi32(code_sum);
    return _mm512_reduce_add_epi64(mass);
  }

  // Sums over keys: the bytes of four keys are interleaved so that one channel's four stand in one 32-bit lane, and are
  // then multiplied by their four weights (vpdpbusd). Byte 16 L + 4 i + e of the rows lands in lane 4 L + e of out[i].
  static constexpr int kQuads = kTile / 4;

  static void interleave(__m512i a, __m512i b, __m512i c, __m512i d, __m512i (&out)[4]) {
    const __m512i low_ab = _mm512_unpacklo_epi8(a, b), high_ab = _mm512_unpackhi_epi8(a, b);
    const __m512i low_cd = _mm512_unpacklo_epi8(c, d), high_cd = _mm512_unpackhi_epi8(c, d);
    out[0] = _mm512_unpacklo_epi16(low_ab, low_cd);
    out[1] = _mm512_unpackhi_epi16(low_ab, low_cd);
    out[2] = _mm512_unpacklo_epi16(high_ab, high_cd);
    out[3] = _mm512_unpackhi_epi16(high_ab, high_cd);
  }

  /// The byte (0..63) that element s = 16 i + lane of interleaved rows came from.
  static int interleaved_byte(int s) { return s % 16 / 4 * 16 + s / 16 * 4 + s % 4; }

  static bool wide(int d) { return d >= 128; }  // a row of plane h fills a register

  static int code_channel(int c, int d) {
    if (!wide(d)) return GenericOps::code_channel(c, d);
    const int half = d / 2, s = c % half;
    return 2 * (s / 64 * 64 + interleaved_byte(s % 64)) + c / half;
  }

  static void code_sums(const uint8_t* h, const uint8_t* weights, int rows, int d, int32_t* sums) {
    if (!wide(d)) return GenericOps::code_sums(h, weights, rows, d, sums);
    const int half = d / 2;
    for (int chunk = 0; chunk < half; chunk += 64) {
      __m512i quad[kQuads][4];
      for (int k = 0; k < kQuads; ++k) {
        const auto row = [&](int i) { return _mm512_loadu_si512(h + (4 * k + i) * half + chunk); };
        interleave(row(0), row(1), row(2), row(3), quad[k]);
      }
      by_rows(rows, [&](int first, auto size) {
        constexpr int R = decltype(size)::value < 4 ? decltype(size)::value : 4;
        for (int r = first; r < first + decltype(size)::value; r += R) {
          code_block<R>(quad, weights + r * kTile, d, 4, sums + static_cast<size_t>(r) * d + chunk);
          code_block<R>(quad, weights + r * kTile, d, 0, sums + static_cast<size_t>(r) * d + half + chunk);
        }
      });
    }
  }

  /// One nibble (shift 4: even channels, 0: odd) of 64 bytes of R rows.
  template <int R>
  static void code_block(const __m512i (&quad)[kQuads][4], const uint8_t* weights, int d, int shift, int32_t* sums) {
    const __m512i low = _mm512_set1_epi8(15);
    const __m128i count = _mm_cvtsi32_si128(shift);
    __m512i sum[R][4];
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < 4; ++j) sum[r][j] = _mm512_loadu_si512(sums + static_cast<size_t>(r) * d + 16 * j);
    }
    for (int k = 0; k < kQuads; ++k) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512i nibbles = _mm512_and_si512(_mm512_srl_epi16(quad[k][j], count), low);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          sum[r][j] = _mm512_dpbusd_epi32(sum[r][j],
                                          query_word(reinterpret_cast<const int8_t*>(weights) + r * kTile, k), nibbles);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < 4; ++j) _mm512_storeu_si512(sums + static_cast<size_t>(r) * d + 16 * j, sum[r][j]);
    }
  }

  static void scales(const uint16_t* scales, float* out) {
    static constexpr auto kOrder = [] {
      std::array<uint16_t, kTile> order{};
      for (int k = 0; k < kTile; ++k) order[k] = static_cast<uint16_t>(8 * (k % 8) + k / 8);  // numerics::scale_slot
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

  static void pack(const float* values, uint64_t keys, float* packed) {
    for (int k = 0, n = 0; k < kTile; k += kLanes) {
      const __mmask16 part = static_cast<__mmask16>(keys >> k);
      _mm512_storeu_ps(packed + n, _mm512_maskz_compress_ps(part, _mm512_loadu_ps(values + k)));
      n += std::popcount(static_cast<uint16_t>(part));
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
      _mm512_storeu_si512(weights + k, _mm512_cvtps_epu32(w));
    }
  }

  static void join_nibbles(const uint8_t* h, const uint8_t* l, int half, int8_t* a) {
    const __m256i low = _mm256_set1_epi8(15), high = _mm256_set1_epi8(static_cast<char>(0xF0)),
                  sign = _mm256_set1_epi8(-128);
    for (int i = 0; i < half; i += 32) {
      const __m256i vh = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(h + i));
      const __m256i vl = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(l + i));
      const __m256i even = _mm256_or_si256(_mm256_and_si256(vh, high), _mm256_and_si256(_mm256_srli_epi16(vl, 4), low));
      const __m256i odd = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(vh, 4), high), _mm256_and_si256(vl, low));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(a + i), _mm256_xor_si256(even, sign));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(a + half + i), _mm256_xor_si256(odd, sign));
    }
  }

  /// The four bytes of a weight are four unsigned operands; each has its own 32-bit sums, which four keys of one
  /// channel enter with one vpdpbusd.
  class Sums {
   public:
    Sums(int rows, int d)
        : rows_(rows),
          d_(d),
          bytes_(static_cast<size_t>(rows) * kTile * 4),
          parts_(static_cast<size_t>(rows) * 4 * d),
          sums_(static_cast<size_t>(rows) * d) {}

    void add(const int8_t* rows, const uint32_t* weights, int count) {
      const int quads = (count + 3) / 4;
      for (int r = 0; r < rows_; ++r) split(weights + r * kTile, count, &bytes_[static_cast<size_t>(r) * kTile * 4]);
      for (int c = 0; c < d_; c += 64) {
        __m512i quad[kQuads][4];
        for (int k = 0; k < quads; ++k) {
          const auto row = [&](int i) {  // rows past the last have weight 0
            return _mm512_loadu_si512(rows + static_cast<size_t>(std::min(4 * k + i, count - 1)) * d_ + c);
          };
          interleave(row(0), row(1), row(2), row(3), quad[k]);
        }
        for (int r = 0; r < rows_; ++r)
          add_block(quad, &bytes_[static_cast<size_t>(r) * kTile * 4], quads, block(r, c));
      }
      seen_ += count;
      if (seen_ > kMaxKeys - kTile) spill();
    }

    std::vector<uint64_t> drain() {
      spill();
      return std::move(sums_);
    }

   private:
    static constexpr int kMaxKeys = 65536;  // 2^16 products of at most 255 * 128 stay below 2^31

    /// bytes: (quad, byte, 4 keys), zero for keys past count.
    static void split(const uint32_t* weights, int count, uint8_t* bytes) {
      const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
      for (int k = 0; k < count; k += kLanes) {
        const __mmask16 part = static_cast<__mmask16>(count - k >= kLanes ? 0xFFFF : (1 << (count - k)) - 1);
        _mm512_storeu_si512(bytes + 4 * k, _mm512_shuffle_epi8(_mm512_maskz_loadu_epi32(part, weights + k), order));
      }
    }

    /// Adds one row's products with 64 channels. parts: (byte, 64 interleaved channels).
    static void add_block(const __m512i (&quad)[kQuads][4], const uint8_t* bytes, int quads, int32_t* parts) {
      __m512i sum[4][4];
      for (int i = 0; i < 16; ++i) sum[i / 4][i % 4] = _mm512_loadu_si512(parts + 16 * i);
      for (int k = 0; k < quads; ++k) {
#pragma GCC unroll 4
        for (int b = 0; b < 4; ++b) {
          const __m512i w = query_word(reinterpret_cast<const int8_t*>(bytes), 4 * k + b);
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) sum[b][j] = _mm512_dpbusd_epi32(sum[b][j], w, quad[k][j]);
        }
      }
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(parts + 16 * i, sum[i / 4][i % 4]);
    }

    int32_t* block(int r, int c) { return &parts_[(static_cast<size_t>(r) * d_ + c) * 4]; }

    void spill() {
      for (int r = 0; r < rows_; ++r) {
        for (int c = 0; c < d_; c += 64) {
          const int32_t* parts = block(r, c);
          for (int s = 0; s < 64; ++s) {
            int64_t sum = 0;
            for (int b = 0; b < 4; ++b) sum += int64_t{parts[64 * b + s]} * (int64_t{1} << (8 * b));
            sums_[static_cast<size_t>(r) * d_ + c + interleaved_byte(s)] += static_cast<uint64_t>(sum);
          }
        }
      }
      std::fill(parts_.begin(), parts_.end(), 0);
      seen_ = 0;
    }

    int rows_, d_, seen_ = 0;
    std::vector<uint8_t> bytes_;  // (G, 16 quads, byte, 4 keys)
    std::vector<int32_t> parts_;  // (G, D/64, byte, 64 interleaved channels)
    std::vector<uint64_t> sums_;  // (G, D), two's complement
  };
};

}  // namespace

DecodeKernels decode_kernels_avx512() { return {sum_range<Avx512Ops>, score_keys<Avx512Ops>}; }

}  // namespace fold::cpu
