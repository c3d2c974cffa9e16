#pragma once
#include "cpu/decode_tile.h"

// The decode of a range of tiles, written once over the operations of an instruction set (`Ops`, see
// decode_ops_generic.h) and included by one source per set. Steps and names follow docs/numerics.md, sections 6 and 7.
namespace fold::cpu {
namespace {

/// Sums a range of tiles in four stages, each one tile behind the other, so that the rows a stage gathers were
/// prefetched while other tiles were worked on.
template <class Ops>
class RangeWorker {
 public:
  RangeWorker(const Group& group, RangeSums& sums)
      : g_(group),
        out_(sums),
        d_(group.head_dim),
        layout_(group.params->cache.layout),
        correct_(group.fit_mark > 0),
        stages_{TileState(group.rows), TileState(group.rows), TileState(group.rows), TileState(group.rows)},
        dot_(group.rows),
        value_weight_(group.rows),
        code_weight_(group.rows),
        values_(group.rows, d_),
        low_values_(group.rows, d_),
        means_(group.rows, d_),
        codes_(size(), 0),
        code_means_(size(), 0),
        code_sum_(size(), 0) {
    std::fill_n(out_.den, g_.rows, 0);
    std::fill_n(out_.dropped, g_.rows, 0);
    out_.values_read = out_.bytes = 0;
  }

  void run(int64_t tile_begin, int64_t tile_end) {
    const int64_t count = tile_end - tile_begin;
    for (int64_t step = 0; step < count + 3; ++step) {
      const auto stage = [&](int64_t behind) -> TileState* {
        return step >= behind && step - behind < count ? &stages_[(step - behind) % 4] : nullptr;
      };
      if (TileState* s = stage(0)) scan(*s, tile_begin + step);
      if (TileState* s = stage(1)) refine(*s);
      if (TileState* s = stage(2)) weigh(*s);
      if (TileState* s = stage(3)) accumulate(*s);
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
    Ops::scales(s.page.k_scale + s.slot, s.key_scale);
    Ops::scan(h, g_, dot_[0]);
    uint64_t wanted = s.always;
    for (int r = 0; r < g_.rows; ++r) {
      Ops::weights_log2(dot_[r], g_.query.scale[r], s.key_scale, g_.z[r], s.x[r]);
      wanted |= Ops::at_least(g_.query.margin[r], s.key_scale, s.x[r], -g_.gates[r].k_l);
    }
    if (layout_.k_bits == 4) return;
    s.k_l = wanted & s.visible;
    prefetch_rows(s.page.k_l + s.slot * (d_ / 2), s.k_l, d_ / 2);
  }

  /// Level 1, and k_b, the keys read to level 2 (section 6, steps 2 and 3).
  void refine(TileState& s) {
    if (s.k_l == 0) return;
    const Query& q = g_.query;
    int count = 0;
    for (uint64_t keys = s.k_l; keys != 0; keys &= keys - 1, ++count) {
      const int64_t at = (s.slot + std::countr_zero(keys)) * (d_ / 2);
      rows_.h[count] = s.page.k_h + at;
      rows_.l[count] = s.page.k_l + at;
    }
    Ops::dots_a(rows_, count, g_, s.dot[0]);
    uint64_t wanted = 0;
    float scale[kPacked], x[kPacked];
    Ops::pack(s.key_scale, s.k_l, scale);
    for (int r = 0; r < g_.rows; ++r) {
      Ops::weights_log2(s.dot[r], numerics::mul(q.scale[r], 0x1p-8f), scale, g_.z[r], x);
      Ops::unpack(x, s.k_l, s.x[r]);
      wanted |= Ops::at_least(q.margin[r] * 0x1p-4f, s.key_scale, s.x[r], -g_.gates[r].k_b);
    }
    if (layout_.k_bits != 16) return;
    s.k_b = wanted & s.k_l;
    prefetch_rows(reinterpret_cast<const uint8_t*>(s.page.k_b) + s.slot * d_, s.k_b, d_);
  }

  /// Level 2 of the keys in k_b.
  void refine_further(TileState& s) {
    int n = 0, place = 0;
    int from[kTile], key[kTile];  // place among the keys of level 1; which key
    for (uint64_t keys = s.k_l; keys != 0; keys &= keys - 1, ++place) {
      const int k = std::countr_zero(keys);
      if ((s.k_b >> k & 1) == 0) continue;
      rows_.b[n] = s.page.k_b + (s.slot + k) * d_;
      from[n] = place;
      key[n++] = k;
    }
    Ops::dots_b(rows_, n, g_, dot_[0]);
    for (int r = 0; r < g_.rows; ++r) {
      float* x = s.x[r];
      const int32_t *first = s.dot[r], *second = dot_[r];
      for (int i = 0; i < n; ++i) {
        x[key[i]] = numerics::fma(logit_2(g_.query, r, first[from[i]], second[i]), s.key_scale[key[i]], -g_.z[r]);
      }
    }
  }

  /// Which V planes are read (section 6, step 4), and every weight.
  void weigh(TileState& s) {
    if (s.visible == 0) return;
    if (s.k_b != 0) refine_further(s);
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

  /// Section 7.
  void accumulate(TileState& s) {
    if (s.visible == 0) return;
    if (s.v_h != 0) add_values(s);
    if (s.v_h != s.visible) add_dropped(s);
    const int64_t half = d_ / 2;
    out_.bytes += std::popcount(s.visible) * (half + 2) + std::popcount(s.k_l) * half +
                  std::popcount(s.k_b) * int64_t{d_} + std::popcount(s.v_h) * (half + 2) + std::popcount(s.v_l) * half +
                  std::popcount(s.v_b) * int64_t{d_} + (g_.settled(s.tile) ? 2 : 0);  // the block's bound
  }

  void add_values(TileState& s) {
    const float unit = numerics::pow2(-g_.e_exponent);
    alignas(64) float share[kTile];
    Ops::scales(s.page.v_scale + s.slot, share);
    for (float& value : share) value = numerics::mul(value, unit);
    for (int r = 0; r < g_.rows; ++r) Ops::value_weights(s.scaled[r], share, value_weight_[r]);
    for (uint64_t keys = s.v_h; keys != 0; keys &= keys - 1) {
      const int k = std::countr_zero(keys);
      const int64_t at = (s.slot + k) * (d_ / 2);
      const uint8_t* l = (s.v_l >> k & 1) != 0 ? s.page.v_l + at : kHalfPlane.bytes;
      Ops::join_nibbles(s.page.v_h + at, l, d_ / 2, values_.next());
      for (int r = 0; r < g_.rows; ++r) values_.weight(r) = value_weight_[r][k];
    }
    for (uint64_t keys = s.v_b; keys != 0; keys &= keys - 1) {
      const int k = std::countr_zero(keys);
      std::copy_n(s.page.v_b + (s.slot + k) * d_, d_, low_values_.next());
      for (int r = 0; r < g_.rows; ++r) low_values_.weight(r) = value_weight_[r][k];
    }
    out_.values_read += std::popcount(s.v_h);
  }

  /// Dropped keys: their mass, and with the tail model what stands in for their V (their block is settled): its mean V
  /// row, and the codes the correction is predicted from.
  void add_dropped(TileState& s) {
    const uint64_t gone = s.visible & ~s.v_h;
    const int64_t block = s.slot / kTile;
    double share = 0;
    if (layout_.tail) {
      share = std::ldexp(static_cast<double>(numerics::from_bf16(s.page.mean_scale[block])), -g_.e_exponent);
      std::copy_n(s.page.mean + block * d_, d_, means_.next());
      out_.bytes += d_ + 2 + (correct_ ? d_ : 0);
    }
    bool any_code = false;
    for (int r = 0; r < g_.rows; ++r) {
      int64_t code_mass = 0;
      const int64_t mass = Ops::codes(s.weight[r], gone, g_.fit_shift[r], code_weight_[r], code_mass);
      out_.dropped[r] += mass;
      if (!layout_.tail) continue;
      // A mass past 2^32 belongs to a row whose reference does not hold (section 8).
      means_.weight(r) = static_cast<uint32_t>(std::min(std::rint(static_cast<double>(mass) * share), 4294967295.0));
      if (!correct_ || code_mass == 0) continue;
      any_code = true;
      const uint8_t* ubar = s.page.ubar + block * d_;
      int32_t* code_means = &code_means_[static_cast<size_t>(r) * d_];
      for (int c = 0; c < d_; ++c) code_means[c] += static_cast<int32_t>(code_mass) * ubar[c];
    }
    if (any_code) Ops::code_sums(s.page.k_h + s.slot * (d_ / 2), code_weight_[0], g_.rows, d_, codes_.data());
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

  /// num in its final unit.
  void finish() {
    const std::vector<uint64_t> high = values_.drain(), low = low_values_.drain(), mean = means_.drain();
    out_.num.resize(size());
    for (int r = 0; r < g_.rows; ++r) {
      const size_t row = static_cast<size_t>(r) * d_;
      for (int c = 0; c < d_; ++c) {
        const uint64_t value = high[row + static_cast<size_t>(c % 2 == 0 ? c / 2 : d_ / 2 + c / 2)];
        out_.num[row + c] = static_cast<int64_t>((value << 16) + (low[row + c] << 8) + (mean[row + c] << 16));
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
        const uint64_t part = static_cast<uint64_t>(t) * static_cast<uint64_t>(static_cast<int64_t>(phi));
        int64_t& num = out_.num[static_cast<size_t>(r) * d_ + c];
        num = static_cast<int64_t>(static_cast<uint64_t>(num) + part);
      }
    }
  }

  static void prefetch(const uint8_t* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
  }

  static void prefetch_rows(const uint8_t* tile, uint64_t keys, int64_t row_bytes) {
    for (; keys != 0; keys &= keys - 1) prefetch(tile + std::countr_zero(keys) * row_bytes, row_bytes);
  }

  const Group& g_;
  RangeSums& out_;
  const int d_;
  const CacheLayout& layout_;
  const bool correct_;

  TileState stages_[4];
  KeyRows rows_{};
  RowTile<int32_t> dot_;
  RowTile<uint32_t> value_weight_;
  RowTile<uint8_t> code_weight_;

  // Sums over the range, (G, D).
  RowBatch<typename Ops::Sums> values_;      // plane a: even channels first
  RowBatch<typename Ops::Sums> low_values_;  // plane b
  RowBatch<typename Ops::Sums> means_;
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
  level == 0 ? Ops::dots_h(rows, count, g, first[0]) : Ops::dots_a(rows, count, g, first[0]);
  if (level == 2) Ops::dots_b(rows, count, g, second[0]);
  for (int r = 0; r < g.rows; ++r) {
    const float unit = level == 0 ? g.query.scale[r] : numerics::mul(g.query.scale[r], 0x1p-8f);
    for (int i = 0; i < count; ++i) {
      const float f = level == 2 ? logit_2(g.query, r, first[r][i], second[r][i])
                                 : numerics::mul(static_cast<float>(first[r][i]), unit);
      logits[static_cast<size_t>(r) * kTile + i] = numerics::mul(f, scale[i]);
    }
  }
}

}  // namespace
}  // namespace fold::cpu
