#pragma once
#include <limits>
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
        code_sum_(int64_t{rows} * D),
        peak_(int64_t{rows} * kLanes) {
    for (int i = 0; i < kTilesInFlight; ++i) stages_.emplace_back(rows);
  }

  int rows() const { return rows_; }

  void run(const Group& group, int64_t tile_begin, int64_t tile_end, RangeSums& sums) {
    g_ = &group;
    out_ = &sums;
    layout_ = group.params->cache.layout;
    correct_ = group.fit_mark > 0;
    every_value_ =
        std::any_of(group.gates, group.gates + rows_, [](const auto& g) { return g.v_h >= numerics::kOpen; });
    out_->num.assign(static_cast<size_t>(rows_) * D, 0);
    std::fill_n(out_->den, rows_, 0);
    std::fill_n(out_->mass, rows_, 0);
    std::fill_n(out_->dropped, rows_, 0);
    std::fill_n(peak_.data(), rows_ * kLanes, -std::numeric_limits<float>::infinity());
    std::fill_n(half_mass_, rows_, 0);
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
    prefetch(s.page.bound + s.slot / kTile, sizeof(uint16_t));
  }

  /// Sends for a quarter of what is read of a tile in any case.
  FOLD_PREFETCH fetch(const TileState* s, int quarter) const {
    constexpr int64_t kPart = kTile * kHalf / 4;
    if (s == nullptr || s->visible == 0) return;
    const int64_t at = s->slot * kHalf + quarter * kPart;
    prefetch(s->page.k_h + at, kPart);
    if (every_value_) prefetch(s->page.v_h + at, kPart);
  }

  /// Level 0 of every key: x, and k_l, the keys read deeper (section 6, steps 1 and 2).
  void scan(TileState& s) {
    if (s.visible == 0) return;
    const Query& q = g_->query;
    Ops::scales(s.page.k_scale + s.slot, s.key_scale);
    Ops::scan(s.page.k_h + s.slot * kHalf, q, rows_, dot_[0]);
    uint64_t wanted = s.always;
    for (int r = 0; r < rows_; ++r) {
      const RowScale row{0.5f * q.scale[r], g_->z[r], q.margin[r], -g_->gates[r].k_l};
      wanted |= Ops::logits(dot_[r], ~uint64_t{0}, row, s.key_scale, s.x[r]);
    }
    if (layout_.k_bits == 4) return;
    s.k_l = wanted & s.visible;
    prefetch_rows(s.page.k_l + s.slot * kHalf, s.k_l, kHalf);
  }

  /// Level 1, and k_b, the keys read to level 2 (section 6, steps 2 and 3).
  void refine(TileState& s) {
    if (s.k_l == 0) return;
    const Query& q = g_->query;
    SplitRow rows[kTile];
    const int count = list(s.k_l, rows, [&](int k) {
      const int64_t at = (s.slot + k) * kHalf;
      return SplitRow{s.page.k_h + at, s.page.k_l + at};
    });
    Ops::template dots<true>(rows, count, q.a_split.data(), q.b_split.data(), q.sum, rows_, s.dot[0]);
    uint64_t wanted = 0;
    for (int r = 0; r < rows_; ++r) {
      const RowScale row{numerics::mul(q.scale[r], 0x1p-8f), g_->z[r], q.margin[r] * 0x1p-4f, -g_->gates[r].k_b};
      wanted |= Ops::logits(s.dot[r], s.k_l, row, s.key_scale, s.x[r]);
    }
    if (layout_.k_bits != 16) return;
    s.k_b = wanted;
    prefetch_rows(s.page.k_b + s.slot * D, s.k_b, D);
  }

  /// Level 2 of the keys in k_b.
  void refine_further(TileState& s) {
    const Query& q = g_->query;
    PlainRow rows[kTile];
    const int count = list(s.k_b, rows, [&](int k) { return PlainRow{s.page.k_b + (s.slot + k) * D}; });
    Ops::template dots<true>(rows, count, q.a.data(), q.b.data(), q.sum, rows_, dot_[0]);
    for (int r = 0; r < rows_; ++r) {
      Ops::level_2(s.dot[r], s.k_l, dot_[r], s.k_b, q.scale[r], s.key_scale, g_->z[r], s.x[r]);
    }
  }

  /// rows[i] = row(k) for the i-th key k of `keys`, the first row repeated up to a multiple of 4. Returns that.
  template <class Row, class F>
  static int list(uint64_t keys, Row* rows, F row) {
    int count = 0;
    for (; keys != 0; keys &= keys - 1) rows[count++] = row(std::countr_zero(keys));
    for (; count % 4 != 0; ++count) rows[count] = rows[0];
    return count;
  }

  /// Which V planes are read (section 6, step 4), and every weight.
  void weigh(TileState& s) {
    if (s.visible == 0) return;
    if (s.k_b != 0) refine_further(s);
    const float deeper = g_->outlier_depth(s.tile, s.page.bound[s.slot / kTile]);
    const ValueKeys wanted = Ops::value_keys(s.x[0], g_->gates, deeper, rows_);
    s.v_h = (wanted.h | s.always) & s.visible;
    s.v_l = layout_.v_bits >= 8 ? (wanted.l | s.always) & s.v_h : 0;
    s.v_b = layout_.v_bits == 16 ? wanted.b & s.v_l : 0;
    // The fetches stand apart from each other: a core takes only a few dozen at a time.
    if (!every_value_) prefetch_rows(s.page.v_h + s.slot * kHalf, s.v_h, kHalf);
    if (s.v_h != 0) prefetch(s.page.v_scale + s.slot, kTile * sizeof(uint16_t));
    const auto weigh_rows = [&](int begin, int end) {
      for (int r = begin; r < end; ++r) out_->den[r] += Ops::weigh(s.visible, s.v_h, s.x[r], &peak_[r * kLanes]);
    };
    weigh_rows(0, rows_ / 2);
    if (s.v_l != 0) prefetch_rows(s.page.v_l + s.slot * kHalf, s.v_l, kHalf);
    weigh_rows(rows_ / 2, rows_);
    if (s.v_b != 0) prefetch_rows(s.page.v_b + s.slot * D, s.v_b, D);
    if (layout_.tail && s.v_h != s.visible) {
      const int64_t block = s.slot / kTile;
      prefetch(s.page.mean_scale + block, 1);
      prefetch(s.page.mean + block * D, D);
      if (correct_) prefetch(s.page.ubar + block * D, D);
    }
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
    alignas(64) float scale[kTile];
    Ops::scales(s.page.v_scale + s.slot, scale);
    for (int r = 0; r < rows_; ++r) {
      const float unit = numerics::pow2(-g_->e_exponent[r]);
      const ValueMass mass = Ops::value_weights(s.x[r], scale, unit, s.v_h, s.v_h & ~s.v_l, weight_[r]);
      out_->mass[r] += mass.all;
      half_mass_[r] += mass.half;
    }
    const Widths widths = Ops::widths(weight_[0], rows_);
    const uint8_t* const low = layout_.v_bits >= 8 ? s.page.v_l : s.page.v_h;  // where there is no v_l, none is read
    values_.add(s.v_h, widths, weight_, [&](int k) {
      const int64_t at = (s.slot + k) * kHalf;
      const uint8_t* l[] = {kHalfPlane.bytes, low + at};  // not a branch: it could not be foreseen
      return SplitRow{s.page.v_h + at, l[s.v_l >> k & 1]};
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
    const double scale = numerics::from_bf16(s.page.mean_scale[block]);
    means_.add({s.page.mean + block * D}, [&](int r) {
      const double share = std::ldexp(scale, -g_->e_exponent[r]);
      const uint32_t weight =
          static_cast<uint32_t>(std::min(std::rint(static_cast<double>(mass[r].weights) * share), 4294967295.0));
      out_->mass[r] += weight;
      return weight;
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
    constexpr int64_t kAbove = (numerics::kHalfReading % 256) << 8;  // what kHalfPlane leaves out
    for (int r = 0; r < rows_; ++r) {
      for (int c = 0; c < D; ++c) num[r * D + c] += kAbove * half_mass_[r];
      out_->peak[r] = *std::max_element(&peak_[r * kLanes], &peak_[r * kLanes] + kLanes);
    }
    if (!correct_) return;
    for (int r = 0; r < rows_; ++r) std::fill_n(&code_sum_[r * D], D, -128 * code_mass_[r]);
    code_means_.drain(-1, in_order, code_sum_.data());
    codes_.drain(16, Ops::split_channel, reinterpret_cast<uint64_t*>(code_sum_.data()));
    for (int r = 0; r < rows_; ++r) add_correction(r);
  }

  void add_correction(int r) {
    const plan::HeadPage page = g_->page_of(g_->fit_mark - 1);
    const int64_t fit = plan::fit_slot(g_->fit_mark, layout_.page_size) * numerics::kRank;
    const double unit = std::ldexp(1.0, 12 + g_->fit_shift[r] - g_->e_exponent[r]);
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
        double phi = std::rint(out[c] * scale);
        if (std::abs(phi) > 2147483647.0) phi = 0;
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
  bool correct_ = false, every_value_ = false;

  std::vector<TileState> stages_;
  RowTile<int32_t> dot_;
  RowTile<uint32_t> weight_;
  RowTile<uint8_t> code_;

  RowSums<Ops, SplitRow> values_;      // plane a
  RowSums<Ops, PlainRow> low_values_;  // plane b
  RowBatch<Ops, PlainRow, 4> means_;
  typename Ops::template Sums<1> codes_;  // plane h's codes, split
  RowBatch<Ops, CodeRow, 2> code_means_;  // C_b is at most 64 * 255
  int64_t code_mass_[kMaxRows], half_mass_[kMaxRows];
  Buffer<int64_t> code_sum_;  // (G, D): S of section 7
  Buffer<float> peak_;        // (G, kLanes)
};

template <class Ops>
void sum_rows(const Group& group, int64_t tile_begin, int64_t tile_end, RangeSums& sums) {
  thread_local std::unique_ptr<RangeWorker<Ops>> worker;
  if (!worker || worker->rows() != group.rows) worker = std::make_unique<RangeWorker<Ops>>(group.rows);
  worker->run(group, tile_begin, tile_end, sums);
}

template <class Ops>
void score_rows(const Group& g, const int64_t* keys, int count, float* logits) {
  constexpr int D = Ops::kDim, kHalf = D / 2;
  const Query& q = g.query;
  const bool coarse = g.params->cache.layout.k_bits == 4;  // level 0, else level 1
  SplitRow rows[kTile];
  float scale[kTile];
  const int64_t page_size = g.params->cache.layout.page_size;
  plan::HeadPage page{};
  for (int i = 0; i < count; ++i) {
    const int64_t slot = g.slot_of(keys[i]);
    if (i == 0 || keys[i] / page_size != keys[i - 1] / page_size) page = g.page_of(keys[i]);
    rows[i] = {page.k_h + slot * kHalf, coarse ? kHalfPlane.bytes : page.k_l + slot * kHalf};
    prefetch(rows[i].h, kHalf);
    if (!coarse) prefetch(rows[i].l, kHalf);
    scale[i] =
        numerics::from_bf16(page.k_scale[slot / kTile * kTile + numerics::scale_slot(static_cast<int>(slot % kTile))]);
  }
  int padded = count;
  for (; padded % 4 != 0; ++padded) rows[padded] = rows[0];
  int32_t products[kMaxRows * kTile];  // (G, 64)
  if (coarse) {
    Ops::template dots<false>(rows, padded, q.a_split.data(), nullptr, q.sum_a, g.rows, products);
    for (int r = 0; r < g.rows; ++r) {
      for (int i = 0; i < count; ++i) products[r * kTile + i] = level_0(products[r * kTile + i], q.sum_a[r]);
    }
  } else {
    Ops::template dots<true>(rows, padded, q.a_split.data(), q.b_split.data(), q.sum, g.rows, products);
  }
  for (int r = 0; r < g.rows; ++r) {
    const int32_t* dot = products + r * kTile;
    float* out = logits + r * kTile;
    const float unit = numerics::mul(q.scale[r], coarse ? 0.5f : 0x1p-8f);
    for (int i = 0; i < count; ++i) out[i] = numerics::mul(numerics::mul(static_cast<float>(dot[i]), unit), scale[i]);
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
void score_keys(const Group& group, const int64_t* keys, int count, float* logits) {
  if (group.head_dim == 64) return score_rows<Ops<64>>(group, keys, count, logits);
  if (group.head_dim == 128) return score_rows<Ops<128>>(group, keys, count, logits);
  score_rows<Ops<256>>(group, keys, count, logits);
}

/// The kernels of a set of operations.
template <template <int> class Ops>
DecodeKernels kernels_of() {
  return {sum_range<Ops>, score_keys<Ops>};
}

}  // namespace
}  // namespace fold::cpu
