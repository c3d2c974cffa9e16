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

/// One tile on its way through the stages of a RangeWorker.
struct TileState {
  explicit TileState(int rows) : x(rows), scaled(rows), weight(rows) {}
  plan::HeadPage page{};
  int64_t tile = 0, slot = 0;  // which; the page slot of its first key
  uint64_t visible = 0, always = 0, k_l = 0, k_b = 0, v_h = 0, v_l = 0, v_b = 0;  // key sets
  alignas(64) float key_scale[kTile];
  RowTile<float> x;          // log2 weights at the level read
  RowTile<float> scaled;     // 2^x in fixed point, before it is rounded
  RowTile<uint32_t> weight;  // d of section 7; 0 where not visible
};

/// Sums a range of tiles in three stages, each one tile behind the other, so that the rows a stage gathers were
/// prefetched while another tile was worked on: scan (level 0), refine (levels 1 and 2, which V is read), accumulate.
template <class Ops>
class RangeWorker {
 public:
  RangeWorker(const Group& group, RangeSums& sums)
      : g_(group),
        out_(sums),
        d_(group.head_dim),
        layout_(group.params->cache.layout),
        correct_(group.fit_mark > 0),
        stages_{TileState(group.rows), TileState(group.rows), TileState(group.rows)},
        dot_(group.rows),
        deeper_dot_(group.rows),
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
  }

  void run(int64_t tile_begin, int64_t tile_end) {
    const int64_t count = tile_end - tile_begin;
    for (int64_t step = 0; step < count + 2; ++step) {
      if (step < count) scan(stages_[step % 3], tile_begin + step);
      if (step >= 1 && step <= count) refine(stages_[(step - 1) % 3]);
      if (step >= 2) accumulate(stages_[(step - 2) % 3]);
      if (correct_ && step % kFlushTiles == kFlushTiles - 1) flush_codes();
    }
    if (correct_) flush_codes();
    finish();
  }

 private:
  // Per tile a code sum grows by at most 64 * 255 * 15, its mean's part by 64 * 255 * 240: 256 tiles stay below 2^31.
  static constexpr int64_t kFlushTiles = 256;

  size_t size() const { return static_cast<size_t>(g_.rows) * d_; }

  /// Level 0 of every key: x, and k_l, the keys read deeper (section 6, steps 1 and 2).
  void scan(TileState& s, int64_t tile) {
    s.tile = tile;
    s.visible = g_.visible_mask(tile);
    s.k_l = s.k_b = s.v_h = s.v_l = s.v_b = 0;
    if (s.visible == 0) return;
    s.page = g_.page_of(tile * kTile);
    s.slot = g_.slot_of(tile * kTile);
    s.always = g_.always_mask(tile);
    const uint8_t* h = s.page.k_h + s.slot * (d_ / 2);
    if ((s.slot + kTile) % layout_.page_size != 0) prefetch(h + kTile * (d_ / 2), kTile * (d_ / 2));
    for (int k = 0; k < kTile; ++k)
      s.key_scale[k] = numerics::from_bf16(s.page.k_scale[s.slot + numerics::scale_slot(k)]);
    Ops::scan(h, g_, dot_[0]);
    uint64_t wanted = s.always;
    for (int r = 0; r < g_.rows; ++r) {
      float* x = s.x[r];
      const int32_t* dot = dot_[r];
      const float scale = g_.query.scale[r], z = g_.z[r];
      for (int k = 0; k < kTile; ++k)
        x[k] = numerics::fma(numerics::mul(static_cast<float>(dot[k]), scale), s.key_scale[k], -z);
      wanted |= Ops::at_least(g_.query.margin[r], s.key_scale, x, -g_.gates[r].k_l);
    }
    if (layout_.k_bits == 4) return;
    s.k_l = wanted & s.visible;
    prefetch_rows(s.page.k_l + s.slot * (d_ / 2), s.k_l, d_ / 2);
  }

  /// Levels 1 and 2, then which V planes are read and every weight (section 6, steps 2-4).
  void refine(TileState& s) {
    if (s.visible == 0) return;
    if (s.k_l != 0) refine_keys(s);
    s.v_h = s.v_l = s.always;
    for (int r = 0; r < g_.rows; ++r) {
      s.v_h |= Ops::at_least(0.0f, s.key_scale, s.x[r], -g_.gates[r].v_h);
      s.v_l |= Ops::at_least(0.0f, s.key_scale, s.x[r], -g_.gates[r].v_l);
      s.v_b |= Ops::at_least(0.0f, s.key_scale, s.x[r], -g_.gates[r].v_b);
    }
    s.v_h &= s.visible;
    s.v_l &= layout_.v_bits >= 8 ? s.v_h : 0;
    s.v_b &= layout_.v_bits == 16 ? s.v_l : 0;
    prefetch_rows(s.page.v_h + s.slot * (d_ / 2), s.v_h, d_ / 2);
    if (s.v_l != 0) prefetch_rows(s.page.v_l + s.slot * (d_ / 2), s.v_l, d_ / 2);
    if (s.v_b != 0) prefetch_rows(reinterpret_cast<const uint8_t*>(s.page.v_b) + s.slot * d_, s.v_b, d_);
    for (int r = 0; r < g_.rows; ++r) out_.den[r] += Ops::weigh(s.x[r], s.visible, s.scaled[r], s.weight[r]);
  }

  void refine_keys(TileState& s) {
    const Query& q = g_.query;
    const int count = list(s.k_l, list_);
    for (int i = 0; i < count; ++i) {
      const int64_t at = (s.slot + list_[i]) * (d_ / 2);
      rows_.h[i] = s.page.k_h + at;
      rows_.l[i] = s.page.k_l + at;
    }
    Ops::dots_a(rows_, count, g_, dot_[0]);
    uint64_t wanted = 0;
    for (int r = 0; r < g_.rows; ++r) {
      for (int i = 0; i < count; ++i) {
        const int key = list_[i];
        s.x[r][key] = numerics::fma(logit_1(q, r, dot_[r][i]), s.key_scale[key], -g_.z[r]);
      }
      wanted |= Ops::at_least(q.margin[r] * 0x1p-4f, s.key_scale, s.x[r], -g_.gates[r].k_b);
    }
    s.k_b = layout_.k_bits == 16 ? wanted & s.k_l : 0;
    if (s.k_b == 0) return;

    int deeper[kTile], n = 0;  // positions in list_
    for (int i = 0; i < count; ++i) {
      if ((s.k_b >> list_[i] & 1) == 0) continue;
      rows_.b[n] = s.page.k_b + (s.slot + list_[i]) * d_;
      deeper[n++] = i;
    }
    Ops::dots_b(rows_, n, g_, deeper_dot_[0]);
    for (int r = 0; r < g_.rows; ++r) {
      for (int i = 0; i < n; ++i) {
        const int key = list_[deeper[i]];
        s.x[r][key] = numerics::fma(logit_2(q, r, dot_[r][deeper[i]], deeper_dot_[r][i]), s.key_scale[key], -g_.z[r]);
      }
    }
  }

  /// Section 7.
  void accumulate(TileState& s) {
    if (s.visible == 0) return;
    if (s.v_h != 0) add_values(s);
    if (layout_.tail && s.v_h != s.visible) add_tail(s);
    if (!layout_.tail) count_dropped(s);
    const int64_t half = d_ / 2;
    out_.bytes += std::popcount(s.visible) * (half + 2) + std::popcount(s.k_l) * half +
                  std::popcount(s.k_b) * int64_t{d_} + std::popcount(s.v_h) * (half + 2) + std::popcount(s.v_l) * half +
                  std::popcount(s.v_b) * int64_t{d_} + (g_.settled(s.tile) ? 2 : 0);  // the block's bound
  }

  void add_values(TileState& s) {
    const int count = list(s.v_h, list_);
    const float unit = numerics::pow2(-g_.e_exponent);
    alignas(64) float share[kTile];
    for (int i = 0; i < count; ++i) {
      const int k = list_[i];
      const int64_t at = s.slot + k;
      const uint8_t* l = (s.v_l >> k & 1) != 0 ? s.page.v_l + at * (d_ / 2) : kHalfPlane.bytes;
      const int8_t* b = (s.v_b >> k & 1) != 0 ? s.page.v_b + at * d_ : kZeroPlane;
      read_value(s.page.v_h + at * (d_ / 2), l, b, readings_.data() + static_cast<size_t>(i) * d_);
      share[i] = numerics::mul(numerics::from_bf16(s.page.v_scale[s.slot + numerics::scale_slot(k)]), unit);
    }
    for (int r = 0; r < g_.rows; ++r) {
      const float* scaled = s.scaled[r];
      double* weight = value_weight_[r];
      for (int i = 0; i < count; ++i) weight[i] = numerics::round_u32(numerics::mul(scaled[list_[i]], share[i]));
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

  void count_dropped(TileState& s) {
    for (int r = 0; r < g_.rows; ++r) {
      for (uint64_t gone = s.visible & ~s.v_h; gone != 0; gone &= gone - 1)
        out_.dropped[r] += s.weight[r][std::countr_zero(gone)];
    }
  }

  /// Dropped keys of a settled block: its mean V row, and the codes the correction is predicted from.
  void add_tail(TileState& s) {
    const int64_t block = s.slot / kTile;
    const double share =
        static_cast<double>(numerics::from_bf16(s.page.mean_scale[block])) * std::ldexp(1.0, -g_.e_exponent);
    const int8_t* mean = s.page.mean + block * d_;
    const uint8_t* ubar = s.page.ubar + block * d_;
    const uint64_t gone = s.visible & ~s.v_h;
    bool any_code = false;
    for (int r = 0; r < g_.rows; ++r) {
      int64_t code_mass = 0;
      const int64_t mass = Ops::codes(s.weight[r], gone, g_.fit_shift[r], code_weight_[r], code_mass);
      out_.dropped[r] += mass;
      const double stand_in = std::rint(static_cast<double>(mass) * share);
      double* means = &means_[static_cast<size_t>(r) * d_];
      for (int c = 0; c < d_; ++c) means[c] += stand_in * mean[c];
      if (!correct_ || code_mass == 0) continue;
      any_code = true;
      int32_t* code_means = &code_means_[static_cast<size_t>(r) * d_];
      for (int c = 0; c < d_; ++c) code_means[c] += static_cast<int32_t>(code_mass) * ubar[c];
    }
    if (any_code) Ops::code_sums(s.page.k_h + s.slot * (d_ / 2), code_weight_[0], g_.rows, d_, codes_.data());
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

  static void prefetch(const uint8_t* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
  }

  static void prefetch_rows(const uint8_t* tile, uint64_t keys, int64_t row_bytes) {
    for (; keys != 0; keys &= keys - 1) prefetch(tile + std::countr_zero(keys) * row_bytes, row_bytes);
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
  const bool correct_;

  TileState stages_[3];
  int list_[kTile];
  KeyRows rows_{};
  RowTile<int32_t> dot_, deeper_dot_;
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
