#pragma once
#include <memory>
#include <vector>

#include "cpu/decode_tile.h"

// The decode of a range of tiles, written once over the operations of an instruction set (`Ops`, see
// decode_ops_generic.h) and included by one source per set. Steps and names follow docs/numerics.md, sections 6 and 7.
namespace fold::cpu {
namespace {

// Always inlined: g++ takes a function that only prefetches for one without effect and drops the calls.
#define FOLD_PREFETCH inline __attribute__((always_inline)) void

FOLD_PREFETCH prefetch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const uint8_t*>(from) + at);
}

/// Sums ranges of tiles in stages, each behind the one before it, so that the memory a stage reads was prefetched
/// while other tiles were worked on. A thread keeps its worker from range to range for the buffers.
template <class Ops>
class RangeWorker {
 public:
  explicit RangeWorker(int rows)
      : rows_(rows),
        dot_(rows),
        weight_(rows),
        code_(rows),
        values_(rows),
        low_values_(rows),
        means_(rows),
        codes_(rows),
        code_means_(rows),
        code_sum_(int64_t{rows} * D) {
    for (int i = 0; i < kTilesInFlight; ++i) stages_.emplace_back(rows);
  }

  int rows() const { return rows_; }

  void run(const Group& group, int64_t tile_begin, int64_t tile_end, RangeSums& sums) {
    g_ = &group;
    out_ = &sums;
    layout_ = group.params->cache.layout;
    correct_ = group.fit_mark > 0;
    out_->num.assign(static_cast<size_t>(rows_) * D, 0);
    std::fill_n(out_->den, rows_, 0);
    std::fill_n(out_->dropped, rows_, 0);
    out_->values_read = out_->bytes = 0;
    std::fill_n(code_mass_, rows_, 0);

    const int64_t count = tile_end - tile_begin;
    for (int64_t step = 0; step < count + kTilesInFlight - 1; ++step) {
      const auto stage = [&](int64_t behind) -> TileState* {
        return step >= behind && step - behind < count ? &stages_[(step - behind) % kTilesInFlight] : nullptr;
      };
      TileState* const next = stage(0);
      if (next != nullptr) locate(*next, tile_begin + step);
      if (TileState* s = stage(2)) scan(*s);
      fetch(next, 0);
      if (TileState* s = stage(3)) refine(*s);
      fetch(next, 1);
      if (TileState* s = stage(4)) weigh(*s);
      fetch(next, 2);
      if (TileState* s = stage(5)) accumulate(*s);
      fetch(next, 3);
    }
    finish();
  }

 private:
  static constexpr int D = Ops::kDim, kHalf = D / 2;
  static constexpr int kTilesInFlight = 6;

  /// Where a tile is.
  void locate(TileState& s, int64_t tile) {
    s.tile = tile;
    s.visible = g_->visible_mask(tile);
    s.k_l = s.k_b = s.v_h = s.v_l = s.v_b = 0;
    if (s.visible == 0) return;
    s.always = g_->always_mask(tile);
    s.page = g_->page_of(tile * kTile);
    s.slot = g_->slot_of(tile * kTile);
    prefetch(s.page.k_scale + s.slot, kTile * sizeof(uint16_t));
  }

  /// Sends for a quarter of a tile's plane h.
  static FOLD_PREFETCH fetch(const TileState* s, int quarter) {
    constexpr int64_t kPart = kTile * kHalf / 4;
    if (s != nullptr && s->visible != 0) prefetch(s->page.k_h + s->slot * kHalf + quarter * kPart, kPart);
  }

  /// Level 0 of every key: x, and k_l, the keys read deeper (section 6, steps 1 and 2).
  void scan(TileState& s) {
    if (s.visible == 0) return;
    const Query& q = g_->query;
    Ops::scales(s.page.k_scale + s.slot, s.key_scale);
    Ops::scan(s.page.k_h + s.slot * kHalf, q, rows_, dot_[0]);
    uint64_t wanted = s.always;
    for (int r = 0; r < rows_; ++r) {
      Ops::weights_log2(dot_[r], q.scale[r], s.key_scale, g_->z[r], s.x[r]);
      wanted |= Ops::at_least(q.margin[r], s.key_scale, s.x[r], -g_->gates[r].k_l);
    }
    if (layout_.k_bits == 4) return;
    s.k_l = wanted & s.visible;
    prefetch_rows(s.page.k_l + s.slot * kHalf, s.k_l, kHalf);
  }

  /// Level 1, and k_b, the keys read to level 2 (section 6, steps 2 and 3).
  void refine(TileState& s) {
    if (s.k_l == 0) return;
    const Query& q = g_->query;
    int count = 0;
    for (uint64_t keys = s.k_l; keys != 0; keys &= keys - 1, ++count) {
      const int64_t at = (s.slot + std::countr_zero(keys)) * kHalf;
      Ops::join(s.page.k_h + at, s.page.k_l + at, 0, key_bytes_ + count * D);
    }
    Ops::template dots<true>(key_bytes_, count, q.a_split.data(), q.b_split.data(), q.offset, rows_, s.dot[0]);
    uint64_t wanted = 0;
    float scale[kPacked] = {}, x[kPacked];
    Ops::pack(s.key_scale, s.k_l, scale);
    for (int r = 0; r < rows_; ++r) {
      Ops::weights_log2(s.dot[r], numerics::mul(q.scale[r], 0x1p-8f), scale, g_->z[r], x);
      Ops::unpack(x, s.k_l, s.x[r]);
      wanted |= Ops::at_least(q.margin[r] * 0x1p-4f, s.key_scale, s.x[r], -g_->gates[r].k_b);
    }
    if (layout_.k_bits != 16) return;
    s.k_b = wanted & s.k_l;
    prefetch_rows(s.page.k_b + s.slot * D, s.k_b, D);
  }

  /// Level 2 of the keys in k_b.
  void refine_further(TileState& s) {
    const Query& q = g_->query;
    int n = 0, place = 0;
    int from[kTile], key[kTile];  // place among the keys of level 1; which key
    for (uint64_t keys = s.k_l; keys != 0; keys &= keys - 1, ++place) {
      const int k = std::countr_zero(keys);
      if ((s.k_b >> k & 1) == 0) continue;
      Ops::flip(s.page.k_b + (s.slot + k) * D, key_bytes_ + n * D);
      from[n] = place;
      key[n++] = k;
    }
    Ops::template dots<true>(key_bytes_, n, q.a.data(), q.b.data(), q.offset, rows_, dot_[0]);
    for (int r = 0; r < rows_; ++r) {
      float* x = s.x[r];
      const int32_t *first = s.dot[r], *second = dot_[r];
      for (int i = 0; i < n; ++i) {
        x[key[i]] = numerics::fma(logit_2(q, r, first[from[i]], second[i]), s.key_scale[key[i]], -g_->z[r]);
      }
    }
  }

  /// Which V planes are read (section 6, step 4), and every weight.
  void weigh(TileState& s) {
    if (s.visible == 0) return;
    if (s.k_b != 0) refine_further(s);
    s.v_h = s.v_l = s.always;
    for (int r = 0; r < rows_; ++r) {
      s.v_h |= Ops::at_least(s.x[r], -g_->gates[r].v_h);
      s.v_l |= Ops::at_least(s.x[r], -g_->gates[r].v_l);
      s.v_b |= Ops::at_least(s.x[r], -g_->gates[r].v_b);
    }
    s.v_h &= s.visible;
    s.v_l &= layout_.v_bits >= 8 ? s.v_h : 0;
    s.v_b &= layout_.v_bits == 16 ? s.v_l : 0;
    if (s.v_h != 0) {
      prefetch_rows(s.page.v_h + s.slot * kHalf, s.v_h, kHalf);
      prefetch(s.page.v_scale + s.slot, kTile * sizeof(uint16_t));
    }
    if (s.v_l != 0) prefetch_rows(s.page.v_l + s.slot * kHalf, s.v_l, kHalf);
    if (s.v_b != 0) prefetch_rows(s.page.v_b + s.slot * D, s.v_b, D);
    if (layout_.tail && s.v_h != s.visible) {
      const int64_t block = s.slot / kTile;
      prefetch(s.page.mean_scale + block, 1);
      prefetch(s.page.mean + block * D, D);
      if (correct_) prefetch(s.page.ubar + block * D, D);
    }
    for (int r = 0; r < rows_; ++r) out_->den[r] += Ops::weigh(s.visible, s.x[r]);
  }

  /// Section 7.
  void accumulate(TileState& s) {
    if (s.visible == 0) return;
    if (s.v_h != 0) add_values(s);
    if (s.v_h != s.visible) add_dropped(s);
    out_->bytes += std::popcount(s.visible) * (kHalf + 2) + std::popcount(s.k_l) * kHalf + std::popcount(s.k_b) * D +
                   std::popcount(s.v_h) * (kHalf + 2) + std::popcount(s.v_l) * kHalf + std::popcount(s.v_b) * D +
                   (g_->settled(s.tile) ? 2 : 0);  // the block's bound
  }

  void add_values(TileState& s) {
    const float unit = numerics::pow2(-g_->e_exponent);
    alignas(64) float share[kTile];
    Ops::scales(s.page.v_scale + s.slot, share);
    for (float& value : share) value = numerics::mul(value, unit);
    for (int r = 0; r < rows_; ++r) Ops::value_weights(s.x[r], share, weight_[r]);
    const Widths widths = Ops::widths(weight_[0], rows_);
    values_.add(s.v_h, widths, weight_, [&](int k) {
      const int64_t at = (s.slot + k) * kHalf;
      return SplitRow{s.page.v_h + at, (s.v_l >> k & 1) != 0 ? s.page.v_l + at : kHalfPlane.bytes};
    });
    low_values_.add(s.v_b, widths, weight_, [&](int k) { return PlainRow{s.page.v_b + (s.slot + k) * D}; });
    out_->values_read += std::popcount(s.v_h);
  }

  /// Dropped keys: their mass, and with the tail model what stands in for their V (their block is settled): its mean V
  /// row, and the codes the correction is predicted from.
  void add_dropped(TileState& s) {
    const uint64_t gone = s.visible & ~s.v_h;
    const int64_t block = s.slot / kTile;
    typename Ops::Mass mass[kMaxRows];
    uint64_t coded = 0;
    for (int r = 0; r < rows_; ++r) {
      mass[r] = Ops::codes(s.x[r], gone, g_->fit_shift[r], code_[r]);
      coded |= mass[r].coded;
      out_->dropped[r] += mass[r].weights;
    }
    if (!layout_.tail) return;
    const double share =
        std::ldexp(static_cast<double>(numerics::from_bf16(s.page.mean_scale[block])), -g_->e_exponent);
    means_.add({s.page.mean + block * D}, [&](int r) {
      // A mass past 2^32 belongs to a row whose reference does not hold (section 8).
      return static_cast<uint32_t>(std::min(std::rint(static_cast<double>(mass[r].weights) * share), 4294967295.0));
    });
    out_->bytes += D + 2 + (correct_ ? D : 0);
    if (!correct_ || coded == 0) return;
    codes_.add_tile(s.page.k_h + s.slot * kHalf, code_[0], coded);
    code_means_.add({s.page.ubar + block * D}, [&](int r) {
      code_mass_[r] += mass[r].codes;
      return static_cast<uint32_t>(mass[r].codes);
    });
  }

  /// num in its final unit.
  void finish() {
    const auto in_order = [](int i) { return i; };
    int64_t* num = out_->num.data();
    values_.drain(int64_t{1} << 16, Ops::split_channel, num);
    low_values_.drain(int64_t{1} << 8, in_order, num);
    means_.drain(int64_t{1} << 16, in_order, num);
    if (!correct_) return;
    for (int r = 0; r < rows_; ++r) std::fill_n(&code_sum_[r * D], D, -128 * code_mass_[r]);
    code_means_.drain(-1, in_order, code_sum_.data());
    codes_.drain(16, Ops::split_channel, reinterpret_cast<uint64_t*>(code_sum_.data()));
    for (int r = 0; r < rows_; ++r) add_correction(r);
  }

  void add_correction(int r) {
    const plan::HeadPage page = g_->page_of(g_->fit_mark - 1);
    const int64_t fit = plan::fit_slot(g_->fit_mark, layout_.page_size) * numerics::kRank;
    const double unit = std::ldexp(1.0, 12 + g_->fit_shift[r] - g_->e_exponent);
    const int64_t* sum = &code_sum_[r * D];
    uint64_t* num = reinterpret_cast<uint64_t*>(out_->num.data()) + r * D;
    for (int64_t direction = fit; direction < fit + numerics::kRank; ++direction) {
      const int8_t* in = page.fit_in + direction * D;
      const int8_t* out = page.fit_out + direction * D;
      int64_t t = 0;
      for (int c = 0; c < D; ++c) t += in[c] * sum[c];
      if (t == 0) continue;
      const double scale = static_cast<double>(page.fit_scale[direction]) * unit;
      for (int c = 0; c < D; ++c) {
        const double phi = std::clamp(std::rint(out[c] * scale), -2147483648.0, 2147483647.0);
        num[c] += static_cast<uint64_t>(t) * static_cast<uint64_t>(static_cast<int64_t>(phi));
      }
    }
  }

  template <typename T>
  static FOLD_PREFETCH prefetch_rows(const T* tile, uint64_t keys, int64_t row_bytes) {
    for (; keys != 0; keys &= keys - 1) prefetch(tile + std::countr_zero(keys) * row_bytes, row_bytes);
  }

  const int rows_;
  const Group* g_ = nullptr;
  RangeSums* out_ = nullptr;
  CacheLayout layout_;
  bool correct_ = false;

  std::vector<TileState> stages_;
  alignas(64) uint8_t key_bytes_[kTile * D];
  RowTile<int32_t> dot_;
  RowTile<uint32_t> weight_;
  RowTile<uint8_t> code_;

  RowSums<Ops, SplitRow> values_;      // plane a
  RowSums<Ops, PlainRow> low_values_;  // plane b
  RowBatch<Ops, PlainRow, 4> means_;
  typename Ops::template Sums<1> codes_;  // plane h's codes, split
  RowBatch<Ops, CodeRow, 2> code_means_;  // C_b is at most 64 * 255
  int64_t code_mass_[kMaxRows];
  Buffer<int64_t> code_sum_;  // (G, D): S of section 7
};

template <class Ops>
void sum_rows(const Group& group, int64_t tile_begin, int64_t tile_end, RangeSums& sums) {
  thread_local std::unique_ptr<RangeWorker<Ops>> worker;
  if (!worker || worker->rows() != group.rows) worker = std::make_unique<RangeWorker<Ops>>(group.rows);
  worker->run(group, tile_begin, tile_end, sums);
}

template <class Ops>
void score_rows(const Group& g, const int64_t* keys, int count, int level, float* logits) {
  constexpr int D = Ops::kDim, kHalf = D / 2;
  const Query& q = g.query;
  numerics::PlaneRow rows[kTile];
  float scale[kTile];
  for (int i = 0; i < count; ++i) {
    const plan::HeadPage page = g.page_of(keys[i]);
    const int64_t slot = g.slot_of(keys[i]);
    rows[i] = {page.k_h + slot * kHalf, level >= 1 ? page.k_l + slot * kHalf : kHalfPlane.bytes,
               level >= 2 ? page.k_b + slot * D : nullptr};
    prefetch(rows[i].h, kHalf);
    if (level >= 1) prefetch(rows[i].l, kHalf);
    if (level >= 2) prefetch(rows[i].b, D);
    scale[i] =
        numerics::from_bf16(page.k_scale[slot / kTile * kTile + numerics::scale_slot(static_cast<int>(slot % kTile))]);
  }
  alignas(64) uint8_t bytes[kTile * D];
  RowTile<int32_t> first(g.rows), second(g.rows);
  for (int i = 0; i < count; ++i) Ops::join(rows[i].h, rows[i].l, 0, bytes + i * D);
  if (level == 0) {
    Ops::template dots<false>(bytes, count, q.a_split.data(), nullptr, q.offset_a, g.rows, first[0]);
  } else {
    Ops::template dots<true>(bytes, count, q.a_split.data(), q.b_split.data(), q.offset, g.rows, first[0]);
  }
  if (level == 2) {
    for (int i = 0; i < count; ++i) Ops::flip(rows[i].b, bytes + i * D);
    Ops::template dots<true>(bytes, count, q.a.data(), q.b.data(), q.offset, g.rows, second[0]);
  }
  for (int r = 0; r < g.rows; ++r) {
    const float unit = level == 0 ? q.scale[r] : numerics::mul(q.scale[r], 0x1p-8f);
    for (int i = 0; i < count; ++i) {
      const float f =
          level == 2 ? logit_2(q, r, first[r][i], second[r][i]) : numerics::mul(static_cast<float>(first[r][i]), unit);
      logits[r * kTile + i] = numerics::mul(f, scale[i]);
    }
  }
}

/// Picks the operations for the head dim.
template <template <int> class Ops>
void sum_range(const Group& group, int64_t tile_begin, int64_t tile_end, RangeSums& sums) {
  if (group.head_dim == 64) return sum_rows<Ops<64>>(group, tile_begin, tile_end, sums);
  if (group.head_dim == 128) return sum_rows<Ops<128>>(group, tile_begin, tile_end, sums);
  sum_rows<Ops<256>>(group, tile_begin, tile_end, sums);
}

template <template <int> class Ops>
void score_keys(const Group& group, const int64_t* keys, int count, int level, float* logits) {
  if (group.head_dim == 64) return score_rows<Ops<64>>(group, keys, count, level, logits);
  if (group.head_dim == 128) return score_rows<Ops<128>>(group, keys, count, level, logits);
  score_rows<Ops<256>>(group, keys, count, level, logits);
}

}  // namespace
}  // namespace fold::cpu
