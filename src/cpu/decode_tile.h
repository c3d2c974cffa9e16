#pragma once
#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/decode_range.h"
#include "numerics/exp2.h"
#include "numerics/planes.h"

// The decode of a range of tiles, written once over the dot products of an instruction set (`Ops`) and included by one
// source per set; hence everything here has internal linkage. Steps and names follow docs/numerics.md, sections 6
// and 7.
namespace fold::cpu {
namespace {

alignas(64) constexpr int8_t kZeroPlane[numerics::kMaxHeadDim] = {};

/// Plane l of a key of which only h is read: 16 h + 8 is the value whose low nibble is 8.
struct HalfPlane {
  alignas(64) uint8_t bytes[numerics::kMaxHeadDim / 2];
  constexpr HalfPlane() : bytes() {
    for (auto& byte : bytes) byte = 0x88;
  }
};
constexpr HalfPlane kHalfPlane;

/// Plane rows of up to 64 keys, in the order of a list of keys.
struct KeyRows {
  const uint8_t* h[kTile];  // (D/2,) each
  const uint8_t* l[kTile];  // (D/2,)
  const int8_t* b[kTile];   // (D,)
};

template <typename T>
struct RowTile {  // (G, 64)
  explicit RowTile(int rows) : data(static_cast<size_t>(rows) * kTile) {}
  T* operator[](int row) { return data.data() + static_cast<size_t>(row) * kTile; }
  std::vector<T> data;
};

inline float logit_1(const Query& q, int r, int32_t d1) {
  return numerics::mul(static_cast<float>(d1), numerics::mul(q.scale[r], 0x1p-8f));
}

inline float logit_2(const Query& q, int r, int32_t d1, int32_t d2) {
  const float dot = numerics::add(static_cast<float>(d1), numerics::mul(static_cast<float>(d2), 0x1p-8f));
  return numerics::mul(dot, numerics::mul(q.scale[r], 0x1p-8f));
}

template <class Ops>
class RangeWorker {
 public:
  RangeWorker(const Group& group, RangeSums& sums)
      : g_(group),
        out_(sums),
        d_(group.head_dim),
        layout_(group.params->cache.layout),
        x_(group.rows),
        dot0_(group.rows),
        dot1_(group.rows),
        dot2_(group.rows),
        weight_(group.rows),
        value_weight_(group.rows),
        code_weight_(group.rows),
        readings_(static_cast<size_t>(kTile) * d_),
        values_(size(), 0.0),
        means_(size(), 0.0),
        codes_(size(), 0),
        code_means_(size(), 0),
        code_sum_(size(), 0) {
    std::fill_n(out_.den, g_.rows, 0);
    std::fill_n(out_.dropped, g_.rows, 0);
    out_.values_read = out_.bytes = 0;
    correct_ = g_.fit_mark > 0;
  }

  void run(int64_t tile_begin, int64_t tile_end) {
    for (int64_t t = tile_begin; t < tile_end; ++t) {
      tile(t);
      if (correct_ && (t - tile_begin) % kFlushTiles == kFlushTiles - 1) flush_codes();
    }
    if (correct_) flush_codes();
    finish();
  }

 private:
  // Per tile a code sum grows by at most 64 * 255 * 15, its mean's part by 64 * 255 * 240: 256 tiles stay below 2^31.
  static constexpr int64_t kFlushTiles = 256;

  size_t size() const { return static_cast<size_t>(g_.rows) * d_; }

  void tile(int64_t t) {
    visible_ = g_.visible_mask(t);
    if (visible_ == 0) return;
    page_ = g_.page_of(t * kTile);
    slot_ = g_.slot_of(t * kTile);
    for (int k = 0; k < kTile; ++k) key_scale_[k] = numerics::from_bf16(page_.k_scale[slot_ + numerics::scale_slot(k)]);
    const uint64_t always = g_.always_mask(t);
    read_keys(always);
    choose_values(always);
    weigh();
    add_values();
    if (layout_.tail && v_h_ != visible_) add_tail();
    count_bytes(t);
  }

  /// Steps 1-3 of section 6: x_ of every visible key at the level it is read to; k_l_, k_b_ the keys read deeper.
  void read_keys(uint64_t always) {
    const Query& q = g_.query;
    Ops::scan(page_.k_h + slot_ * (d_ / 2), g_, dot0_[0]);
    uint64_t wanted = always;
    for (int r = 0; r < g_.rows; ++r) {
      float* x = x_[r];
      const int32_t* dot = dot0_[r];
      const float scale = q.scale[r], z = g_.z[r];
      for (int k = 0; k < kTile; ++k)
        x[k] = numerics::fma(numerics::mul(static_cast<float>(dot[k]), scale), key_scale_[k], -z);
      wanted |= Ops::at_least(q.margin[r], key_scale_, x, -g_.gates[r].k_l);
    }
    k_l_ = layout_.k_bits >= 8 ? wanted & visible_ : 0;
    k_b_ = 0;
    if (k_l_ == 0) return;

    const int count = list(k_l_, list_);
    for (int i = 0; i < count; ++i) key_rows(list_[i], i);
    Ops::dots_a(rows_, count, g_, dot1_[0]);
    wanted = 0;
    for (int r = 0; r < g_.rows; ++r) {
      float* x = x_[r];
      for (int i = 0; i < count; ++i) {
        x[list_[i]] = numerics::fma(logit_1(q, r, dot1_[r][i]), key_scale_[list_[i]], -g_.z[r]);
      }
      wanted |= Ops::at_least(q.margin[r] * 0x1p-4f, key_scale_, x, -g_.gates[r].k_b);
    }
    k_b_ = layout_.k_bits == 16 ? wanted & k_l_ : 0;
    if (k_b_ == 0) return;

    int deeper[kTile], n = 0;  // positions in list_
    for (int i = 0; i < count; ++i) {
      if ((k_b_ >> list_[i] & 1) == 0) continue;
      rows_.b[n] = page_.k_b + (slot_ + list_[i]) * d_;
      deeper[n++] = i;
    }
    Ops::dots_b(rows_, n, g_, dot2_[0]);
    for (int r = 0; r < g_.rows; ++r) {
      for (int i = 0; i < n; ++i) {
        const int key = list_[deeper[i]];
        x_[r][key] = numerics::fma(logit_2(q, r, dot1_[r][deeper[i]], dot2_[r][i]), key_scale_[key], -g_.z[r]);
      }
    }
  }

  /// Step 4 of section 6: which V planes are read.
  void choose_values(uint64_t always) {
    v_h_ = v_l_ = always;
    v_b_ = 0;
    for (int r = 0; r < g_.rows; ++r) {
      v_h_ |= Ops::at_least(0.0f, key_scale_, x_[r], -g_.gates[r].v_h);
      v_l_ |= Ops::at_least(0.0f, key_scale_, x_[r], -g_.gates[r].v_l);
      v_b_ |= Ops::at_least(0.0f, key_scale_, x_[r], -g_.gates[r].v_b);
    }
    v_h_ &= visible_;
    v_l_ &= layout_.v_bits >= 8 ? v_h_ : 0;
    v_b_ &= layout_.v_bits == 16 ? v_l_ : 0;
  }

  void weigh() {
    uint32_t seen[kTile];
    for (int k = 0; k < kTile; ++k) seen[k] = (visible_ >> k & 1) != 0 ? ~0u : 0u;
    for (int r = 0; r < g_.rows; ++r) {
      uint32_t* w = weight_[r];
      const float* x = x_[r];
      int64_t sum = 0;
      for (int k = 0; k < kTile; ++k) {
        w[k] = Ops::fix(x[k]) & seen[k];
        sum += w[k];
      }
      out_.den[r] += sum;
    }
  }

  void add_values() {
    if (v_h_ == 0) return;
    const int count = list(v_h_, list_);
    const float unit = numerics::pow2(-g_.e_exponent);
    for (int i = 0; i < count; ++i) {
      const int k = list_[i];
      const int64_t at = slot_ + k;
      const uint8_t* l = (v_l_ >> k & 1) != 0 ? page_.v_l + at * (d_ / 2) : kHalfPlane.bytes;
      const int8_t* b = (v_b_ >> k & 1) != 0 ? page_.v_b + at * d_ : kZeroPlane;
      read_value(page_.v_h + at * (d_ / 2), l, b, readings_.data() + static_cast<size_t>(i) * d_);
      const float share = numerics::mul(numerics::from_bf16(page_.v_scale[slot_ + numerics::scale_slot(k)]), unit);
      for (int r = 0; r < g_.rows; ++r) {
        value_weight_[r][i] = static_cast<double>(numerics::fix(numerics::exp2_parts(x_[r][k]), share));
      }
    }
    out_.values_read += count;
    Ops::values(readings_.data(), value_weight_[0], count, g_.rows, d_, values_.data());
  }

  /// One row's reading in units of e/256; even channels first, then odd ones. reading: (D,)
  void read_value(const uint8_t* h, const uint8_t* l, const int8_t* b, int16_t* reading) const {
    const int half = d_ / 2;
    for (int i = 0; i < half; ++i) {
      const int even = (h[i] & 0xF0) | (l[i] >> 4), odd = ((h[i] << 4) & 0xF0) | (l[i] & 15);
      reading[i] = static_cast<int16_t>((even - 128) * 256 + b[2 * i]);
      reading[half + i] = static_cast<int16_t>((odd - 128) * 256 + b[2 * i + 1]);
    }
  }

  /// Dropped keys of a settled block: its mean V row, and the codes the correction is predicted from.
  void add_tail() {
    const uint64_t gone = visible_ & ~v_h_;
    const int64_t block = slot_ / kTile;
    const double share =
        static_cast<double>(numerics::from_bf16(page_.mean_scale[block])) * std::ldexp(1.0, -g_.e_exponent);
    const int8_t* mean = page_.mean + block * d_;
    const uint8_t* ubar = page_.ubar + block * d_;
    uint32_t mask[kTile];
    for (int k = 0; k < kTile; ++k) mask[k] = (gone >> k & 1) != 0 ? ~0u : 0u;
    bool any_code = false;
    for (int r = 0; r < g_.rows; ++r) {
      const uint32_t* w = weight_[r];
      const int shift = g_.fit_shift[r];
      const uint32_t half = (1u << shift) >> 1;
      int64_t mass = 0;
      int32_t code_mass = 0;
      uint8_t* codes = code_weight_[r];
      for (int k = 0; k < kTile; ++k) {
        const uint32_t weight = w[k] & mask[k];
        mass += weight;
        const uint32_t code = std::min(255u, (weight + half) >> shift);
        codes[k] = static_cast<uint8_t>(code);
        code_mass += static_cast<int32_t>(code);
      }
      out_.dropped[r] += mass;
      const double stand_in = std::rint(static_cast<double>(mass) * share);
      double* means = &means_[static_cast<size_t>(r) * d_];
      for (int c = 0; c < d_; ++c) means[c] += stand_in * mean[c];
      if (!correct_ || code_mass == 0) continue;
      any_code = true;
      int32_t* code_means = &code_means_[static_cast<size_t>(r) * d_];
      for (int c = 0; c < d_; ++c) code_means[c] += code_mass * ubar[c];
    }
    if (any_code) Ops::code_sums(page_.k_h + slot_ * (d_ / 2), code_weight_[0], g_.rows, d_, codes_.data());
    out_.bytes += d_ + 2 + (correct_ ? d_ : 0);
  }

  void flush_codes() {
    for (int r = 0; r < g_.rows; ++r) {
      const size_t row = static_cast<size_t>(r) * d_;
      for (int c = 0; c < d_; ++c) {
        code_sum_[row + Ops::code_channel(c, d_)] += int64_t{16} * codes_[row + c];
        code_sum_[row + c] -= code_means_[row + c];
      }
    }
    std::fill(codes_.begin(), codes_.end(), 0);
    std::fill(code_means_.begin(), code_means_.end(), 0);
  }

  /// num in its final unit. Sums of a row whose reference does not hold may be meaningless, but never undefined.
  void finish() {
    const int half = d_ / 2;
    out_.num.resize(size());
    for (int r = 0; r < g_.rows; ++r) {
      const size_t row = static_cast<size_t>(r) * d_;
      for (int c = 0; c < d_; ++c) {
        const uint64_t value = to_integer(values_[row + static_cast<size_t>(c % 2 == 0 ? c / 2 : half + c / 2)]);
        out_.num[row + c] = static_cast<int64_t>((value << 8) + (to_integer(means_[row + c]) << 16));
      }
      if (correct_) add_correction(r);
    }
  }

  void add_correction(int r) {
    const plan::HeadPage page = g_.page_of(g_.fit_mark - 1);
    const int64_t fit = plan::fit_slot(g_.fit_mark, layout_.page_size) * numerics::kRank;
    const double unit = std::ldexp(1.0, 12 + g_.fit_shift[r] - g_.e_exponent);
    const int64_t* sum = &code_sum_[static_cast<size_t>(r) * d_];
    for (int64_t direction = fit; direction < fit + numerics::kRank; ++direction) {
      const int8_t* in = page.fit_in + direction * d_;
      const int8_t* out = page.fit_out + direction * d_;
      int64_t t = 0;
      for (int c = 0; c < d_; ++c) t += in[c] * sum[c];
      if (t == 0) continue;
      const double scale = static_cast<double>(page.fit_scale[direction]) * unit;
      for (int c = 0; c < d_; ++c) {
        const double phi = std::clamp(std::rint(out[c] * scale), -2147483648.0, 2147483647.0);
        int64_t& num = out_.num[static_cast<size_t>(r) * d_ + c];
        num = static_cast<int64_t>(static_cast<uint64_t>(num) +
                                   static_cast<uint64_t>(t) * static_cast<uint64_t>(static_cast<int64_t>(phi)));
      }
    }
  }

  static uint64_t to_integer(double a) {
    return static_cast<uint64_t>(static_cast<int64_t>(std::clamp(a, -0x1p62, 0x1p62)));
  }

  void count_bytes(int64_t t) {
    const int64_t half = d_ / 2;
    out_.bytes += std::popcount(visible_) * (half + 2) + std::popcount(k_l_) * half +
                  std::popcount(k_b_) * int64_t{d_} + std::popcount(v_h_) * (half + 2) + std::popcount(v_l_) * half +
                  std::popcount(v_b_) * int64_t{d_};
    if (g_.settled(t)) out_.bytes += 2;  // the block's bound
  }

  void key_rows(int key, int i) {
    const int64_t at = slot_ + key;
    rows_.h[i] = page_.k_h + at * (d_ / 2);
    rows_.l[i] = page_.k_l + at * (d_ / 2);
  }

  static int list(uint64_t mask, int* keys) {
    int n = 0;
    for (; mask != 0; mask &= mask - 1) keys[n++] = std::countr_zero(mask);
    return n;
  }

  const Group& g_;
  RangeSums& out_;
  const int d_;
  const CacheLayout& layout_;
  bool correct_;

  // The tile at hand.
  plan::HeadPage page_{};
  int64_t slot_ = 0;                                                        // of its first key
  uint64_t visible_ = 0, k_l_ = 0, k_b_ = 0, v_h_ = 0, v_l_ = 0, v_b_ = 0;  // key sets
  alignas(64) float key_scale_[kTile];
  int list_[kTile];
  KeyRows rows_{};
  RowTile<float> x_;
  RowTile<int32_t> dot0_, dot1_, dot2_;
  RowTile<uint32_t> weight_;
  RowTile<double> value_weight_;
  RowTile<uint8_t> code_weight_;
  std::vector<int16_t> readings_;  // (64, D)

  // Sums over the range, (G, D). Doubles hold integers below 2^53 (section 8), so every addition is exact.
  std::vector<double> values_;  // even channels first
  std::vector<double> means_;
  std::vector<int32_t> codes_;  // in the order Ops::code_channel maps
  std::vector<int32_t> code_means_;
  std::vector<int64_t> code_sum_;
};

template <class Ops>
void sum_range(const Group& group, int64_t tile_begin, int64_t tile_end, RangeSums& sums) {
  RangeWorker<Ops>(group, sums).run(tile_begin, tile_end);
}

template <class Ops>
void score_keys(const Group& g, const int64_t* keys, int count, int level, float* logits) {
  const int64_t d = g.head_dim;
  KeyRows rows;
  float scale[kTile];
  for (int i = 0; i < count; ++i) {
    const plan::HeadPage page = g.page_of(keys[i]);
    const int64_t slot = g.slot_of(keys[i]);
    rows.h[i] = page.k_h + slot * d / 2;
    rows.l[i] = level >= 1 ? page.k_l + slot * d / 2 : nullptr;
    rows.b[i] = level >= 2 ? page.k_b + slot * d : nullptr;
    scale[i] =
        numerics::from_bf16(page.k_scale[slot / kTile * kTile + numerics::scale_slot(static_cast<int>(slot % kTile))]);
  }
  RowTile<int32_t> first(g.rows), second(g.rows);
  if (level == 0) {
    Ops::dots_h(rows, count, g, first[0]);
  } else {
    Ops::dots_a(rows, count, g, first[0]);
  }
  if (level == 2) Ops::dots_b(rows, count, g, second[0]);
  for (int r = 0; r < g.rows; ++r) {
    for (int i = 0; i < count; ++i) {
      const float f = level == 0   ? numerics::mul(static_cast<float>(first[r][i]), g.query.scale[r])
                      : level == 1 ? logit_1(g.query, r, first[r][i])
                                   : logit_2(g.query, r, first[r][i], second[r][i]);
      logits[static_cast<size_t>(r) * kTile + i] = numerics::mul(f, scale[i]);
    }
  }
}

}  // namespace
}  // namespace fold::cpu
