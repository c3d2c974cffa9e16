#pragma once
#include <vector>

#include "cpu/decode_dropped.h"
#include "cpu/decode_tile.h"

// The decode of a range of tiles, written once over the operations of an instruction set (`Ops`, see
// decode_ops_generic.h) and included by one source per set. Steps and names follow docs/numerics.md, sections 6 and 7.
namespace fold::cpu {
namespace {

/// Sums ranges of tiles in stages, a chunk of tiles at a time, each behind the one before it, so that the memory a
/// stage reads was prefetched while other chunks were worked on. A thread keeps its worker from range to range for the
/// buffers.
template <class Ops>
class RangeWorker {
 public:
  explicit RangeWorker(int rows)
      : rows_(rows),
        dot_(rows),
        weight_(rows),
        read_(rows),
        values_(rows),
        low_values_(rows),
        dropped_(rows),
        split_sum_(int64_t{rows} * D) {
    std::fill_n(split_sum_.data(), rows * D, 0);
    for (int i = 0; i < kChunksInFlight; ++i) chunks_.emplace_back(rows);
  }

  int rows() const { return rows_; }

  void run(const Group& group, int64_t tile_begin, int64_t tile_end, RangeSums& sums) {
    g_ = &group;
    out_ = &sums;
    layout_ = group.params->cache.layout;
    every_value_ =
        std::any_of(group.gates, group.gates + rows_, [](const auto& g) { return g.v_h >= numerics::kOpen; });
    const Query& q = group.query;
    for (int r = 0; r < rows_; ++r) {
      level_0_.row[r] = {0.5f * q.scale[r], group.z[r], q.margin[r], -group.gates[r].k_l};
      level_1_.row[r] = {numerics::mul(q.scale[r], 0x1p-8f), group.z[r], q.margin[r] * 0x1p-4f, -group.gates[r].k_b};
      unit_[r] = numerics::pow2(-group.e_exponent[r]);
    }
    open_gates(0, usual_gates_);
    out_->num.assign(static_cast<size_t>(rows_) * D, 0);
    std::fill_n(out_->mass, rows_, 0);
    std::fill_n(out_->dropped, rows_, 0);
    out_->values_read = out_->bytes = 0;
    std::fill(read_.begin(), read_.end(), typename Ops::ReadSums{});
    dropped_.start(group);

    tiles_ = every_value_ ? 1 : kChunkTiles;
    const int64_t count = (tile_end - tile_begin + tiles_ - 1) / tiles_;
    for (int64_t step = 0; step < count + kChunksInFlight - 1; ++step) {
      const auto stage = [&](int64_t behind) -> Chunk* {
        return step >= behind && step - behind < count ? &chunks_[(step - behind) % kChunksInFlight] : nullptr;
      };
      Chunk* const next = stage(0);
      if (next != nullptr) locate(*next, tile_begin + step * tiles_, tile_end);
      if (Chunk* c = stage(1)) {
        for (int i = 0; i < tiles_; ++i) {
          const Tile* const then = i + 1 < tiles_ ? &c->tile[i + 1] : next != nullptr ? next->tile : nullptr;
          scan(*c, i, then, next != nullptr && tiles_ > 1 ? &next->tile[i] : nullptr);
        }
        list_deep(*c);
      }
      fetch(next, 0);
      if (Chunk* c = stage(2)) refine(*c);
      fetch(next, 1);
      if (Chunk* c = stage(3)) {
        refine_further(*c);
        for (int i = 0; i < tiles_; ++i) {
          weigh(*c, i);
          fetch_values(c->tile[i]);
        }
      }
      fetch(next, 2);
      if (Chunk* c = stage(4)) accumulate(*c);
      fetch(next, 3);
    }
    finish();
  }

 private:
  static constexpr int D = Ops::kDim, kHalf = D / 2;
  static constexpr int kChunksInFlight = 5;

  /// Where a chunk's tiles are, from `begin` on as far as they are below `end`. Sends for the first of their keys' rows
  /// and for their scales, all tiles' in a row.
  void locate(Chunk& c, int64_t begin, int64_t end) {
    for (int i = 0; i < tiles_; ++i) {
      Tile& t = c.tile[i];
      t.tile = begin + i;
      t.visible = t.tile < end ? g_->visible_mask(t.tile) : 0;
      t.k_l = t.v_h = t.v_l = t.v_b = 0;
      if (t.visible == 0) continue;
      t.always = g_->always_mask(t.tile);
      t.slot = g_->slot_of(t.tile * kTile);
      const bool same = i > 0 && t.slot > 0 && c.tile[i - 1].visible != 0;  // page as the tile before
      t.page = same ? c.tile[i - 1].page : g_->page_of(t.tile * kTile);
    }
    for (int i = 0; i < tiles_; ++i) {
      const Tile& t = c.tile[i];
      if (t.visible == 0) continue;
      const int64_t block = t.slot / kTile;
      prefetch(t.page.k_h + t.slot * kHalf, 1);
      prefetch(t.page.k_scale + t.slot, kTile * sizeof(uint16_t));
      prefetch(t.page.bound + block, sizeof(uint16_t));
      if (layout_.tail) prefetch(t.page.mean_scale + block, sizeof(uint16_t));
    }
  }

  /// Where every value is read, sends for a quarter of a tile's plane h.
  FOLD_PREFETCH fetch(const Chunk* c, int quarter) const {
    constexpr int64_t kPart = kTile * kHalf / 4;
    if (!every_value_ || c == nullptr || c->tile[0].visible == 0) return;
    prefetch(c->tile[0].page.v_h + c->tile[0].slot * kHalf + quarter * kPart, kPart);
  }

  /// Level 0 of every key of tile i, and k_l, the keys read deeper (section 6, steps 1 and 2). next, later: the tile
  /// after it and the one a chunk later, if there are.
  void scan(Chunk& c, int i, const Tile* next, const Tile* later) {
    Tile& t = c.tile[i];
    if (t.visible == 0) return;
    float* const key_scale = c.key_scale + i * kTile;
    Ops::scales(t.page.k_scale + t.slot, key_scale);
    const auto plane_of = [&](const Tile* tile) {  // of one that is there
      const Tile& sent = tile != nullptr && tile->visible != 0 ? *tile : t;
      return sent.page.k_h + sent.slot * kHalf;
    };
    Ops::scan(plane_of(&t), {plane_of(next), plane_of(later)}, g_->query, rows_, dot_[0]);
    const uint64_t wanted = Ops::level_0(dot_[0], rows_, level_0_, key_scale, &c.x[i * kTile]);
    if (layout_.k_bits == 4) return;
    t.k_l = (wanted | t.always) & t.visible;
  }

  /// Lists the keys in k_l and sends for their rows.
  void list_deep(Chunk& c) const {
    c.deep.count = 0;
    for (int i = 0; i < tiles_; ++i) {
      const Tile& t = c.tile[i];
      for (uint64_t keys = t.k_l; keys != 0; keys &= keys - 1) {
        const int k = std::countr_zero(keys);
        const int64_t at = (t.slot + k) * kHalf;
        prefetch(t.page.k_l + at, kHalf);
        c.deep.add({t.page.k_h + at, t.page.k_l + at}, i * kTile + k);
      }
    }
  }

  /// Level 1 of those keys; which of them are read to level 2 (section 6, steps 2 and 3).
  void refine(Chunk& c) {
    uint64_t wanted[kChunkTiles] = {};  // by place in the list
    const int fours = c.deep.fill();
    for (int i = 0; i < fours; ++i) {
      float key_scale[4], x[kQuadProducts];
      for (int j = 0; j < 4; ++j) key_scale[j] = c.key_scale[c.deep.key[4 * i + j]];
      int32_t* const d1 = &c.d1[int64_t{i} * 4 * rows_];
      const uint64_t asks = Ops::level_1(&c.deep.row[4 * i], g_->query, rows_, level_1_, key_scale, d1, x);
      wanted[i / 16] |= asks << 4 * (i % 16);
      put_x(c, &c.deep.key[4 * i], x);
    }
    c.further.count = 0;
    out_->bytes += c.deep.count * kHalf;
    if (layout_.k_bits != 16) return;
    for (int i = 0; i < kChunkTiles; ++i) {
      for (; wanted[i] != 0; wanted[i] &= wanted[i] - 1) {
        const int place = i * kTile + std::countr_zero(wanted[i]);
        if (place >= c.deep.count) break;
        const int k = c.deep.key[place];
        const Tile& t = c.tile[k / kTile];
        const int8_t* const row = t.page.k_b + (t.slot + k % kTile) * D;
        prefetch(row, D);
        c.place[c.further.count] = place;
        c.further.add({row}, k);
      }
    }
    out_->bytes += c.further.count * D;
  }

  /// Level 2.
  void refine_further(Chunk& c) {
    const int fours = c.further.fill();
    for (int i = c.further.count; i < 4 * fours; ++i) c.place[i] = c.place[0];
    for (int i = 0; i < fours; ++i) {
      float key_scale[4], x[kQuadProducts];
      int32_t d1[kQuadProducts];
      for (int j = 0; j < 4; ++j) {
        const int place = c.place[4 * i + j];
        const int32_t* const products = &c.d1[int64_t{place / 4} * 4 * rows_ + place % 4];
        key_scale[j] = c.key_scale[c.further.key[4 * i + j]];
        for (int r = 0; r < rows_; ++r) d1[4 * r + j] = products[4 * r];
      }
      Ops::level_2(&c.further.row[4 * i], g_->query, rows_, level_1_, key_scale, d1, x);
      put_x(c, &c.further.key[4 * i], x);
    }
  }

  /// Takes over the x of four keys. x: (G, 4)
  void put_x(Chunk& c, const int* key, const float* x) {
    float* const to[] = {&c.x[key[0]], &c.x[key[1]], &c.x[key[2]], &c.x[key[3]]};
    for (int r = 0; r < rows_; ++r, x += 4) {
      to[0][r * kChunk] = x[0];
      to[1][r * kChunk] = x[1];
      to[2][r * kChunk] = x[2];
      to[3][r * kChunk] = x[3];
    }
  }

  /// The thresholds of V's planes in a block whose outliers open the gates by `deeper`.
  void open_gates(float deeper, ValueGates* gates) const {
    for (int r = 0; r < rows_; ++r) {
      const numerics::Gates& g = g_->gates[r];
      gates[r] = {-(g.v_h + deeper), -(g.v_l + deeper), -(g.v_b + deeper)};
    }
  }

  /// Which V planes of tile i are read (section 6, step 4), and what is dropped (section 7).
  void weigh(Chunk& c, int i) {
    Tile& t = c.tile[i];
    if (t.visible == 0) return;
    const float* const x = &c.x[i * kTile];
    const float deeper = g_->outlier_depth(t.tile, t.page.bound[t.slot / kTile]);
    ValueGates opened[kMaxRows];
    if (deeper != 0) open_gates(deeper, opened);
    const ValueKeys wanted = Ops::value_keys(x, deeper != 0 ? opened : usual_gates_, rows_);
    t.v_h = (wanted.h | t.always) & t.visible;
    t.v_l = layout_.v_bits >= 8 ? (wanted.l | t.always) & t.v_h : 0;
    t.v_b = layout_.v_bits == 16 ? wanted.b & t.v_l : 0;
    if (t.v_h != t.visible) dropped_.add(t, x, *out_);
    out_->values_read += std::popcount(t.v_h);
    out_->bytes += std::popcount(t.visible) * (kHalf + 2) + std::popcount(t.v_h) * (kHalf + 2) +
                   std::popcount(t.v_l) * kHalf + std::popcount(t.v_b) * D +
                   (g_->settled(t.tile) ? 2 : 0);  // the block's bound
  }

  /// Sends for the values of a tile that are read.
  FOLD_PREFETCH fetch_values(const Tile& t) const {
    if (t.v_h == 0) return;
    prefetch(t.page.v_scale + t.slot, kTile * sizeof(uint16_t));
    if (!every_value_) prefetch_rows(t.page.v_h + t.slot * kHalf, t.v_h, kHalf);
    if (t.v_l != 0) prefetch_rows(t.page.v_l + t.slot * kHalf, t.v_l, kHalf);
    if (t.v_b != 0) prefetch_rows(t.page.v_b + t.slot * D, t.v_b, D);
  }

  /// The values that are read (section 7).
  void accumulate(const Chunk& c) {
    ReadList list;
    for (int i = 0; i < tiles_; ++i) {
      const Tile& t = c.tile[i];
      if (t.v_h == 0) continue;
      const int count = std::popcount(t.v_h);
      if (list.count + count > kTile) {
        add_values(c, list);
        list.count = 0, list.l = list.b = 0;
      }
      Ops::scales(t.page.v_scale + t.slot, value_scale_ + i * kTile);
      Ops::list(t.v_h, i * kTile, list.key + list.count);
      list.l |= moved_together(t.v_l, t.v_h) << list.count;
      list.b |= moved_together(t.v_b, t.v_h) << list.count;
      list.count += count;
    }
    if (list.count > 0) add_values(c, list);
  }

  void add_values(const Chunk& c, const ReadList& list) {
    Ops::read(list, c.x.data(), value_scale_, unit_, rows_, read_.data(), weight_[0]);
    const Widths widths = Ops::widths(weight_[0], list.count, rows_);
    const auto slot_of = [&](int place) {
      const Tile& t = c.tile[list.key[place] / kTile];
      return std::pair(&t.page, t.slot + list.key[place] % kTile);
    };
    values_.add(widths, ~uint64_t{0}, weight_, [&](int place) {
      const auto [page, slot] = slot_of(place);
      const uint8_t* const low = layout_.v_bits >= 8 ? page->v_l : page->v_h;  // without v_l none is read
      const uint8_t* l[] = {kHalfPlane.bytes, low + slot * kHalf};             // not a branch: it could not be foreseen
      return SplitRow{page->v_h + slot * kHalf, l[list.l >> place & 1]};
    });
    low_values_.add(widths, list.b, weight_, [&](int place) {
      const auto [page, slot] = slot_of(place);
      return PlainRow{page->v_b + slot * D};
    });
  }

  /// num in its final unit.
  void finish() {
    int64_t* num = out_->num.data();
    values_.drain(int64_t{1} << 16, split_sum_.data());
    move_split_sums<D>(split_sum_.data(), rows_, num);
    low_values_.drain(int64_t{1} << 8, num);
    dropped_.finish(*out_);
    constexpr uint64_t kAbove = (numerics::kHalfReading % 256) << 8;  // what kHalfPlane leaves out
    for (int r = 0; r < rows_; ++r) {
      const typename Ops::ReadSums& read = read_[r];
      out_->den[r] = out_->dropped[r] + read.den();
      out_->mass[r] += read.mass();
      out_->peak[r] = read.peak();
      const uint64_t above = kAbove * static_cast<uint64_t>(read.half());  // may wrap where the reference does not hold
      for (int c = 0; c < D; ++c) num[r * D + c] = static_cast<int64_t>(static_cast<uint64_t>(num[r * D + c]) + above);
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
  bool every_value_ = false;
  int tiles_ = 0;  // of a chunk

  RowScales level_0_, level_1_;
  ValueGates usual_gates_[kMaxRows];
  float unit_[kMaxRows];  // 1 / E

  std::vector<Chunk> chunks_;
  RowTile<int32_t> dot_;
  RowTile<uint32_t> weight_;
  alignas(64) float value_scale_[kChunk];

  std::vector<typename Ops::ReadSums> read_;  // (G,)
  RowSums<Ops, SplitRow> values_;             // plane a
  RowSums<Ops, PlainRow> low_values_;         // plane b
  DroppedKeys<Ops> dropped_;
  Buffer<int64_t> split_sum_;  // (G, D) in the order of split rows; empty but in finish()
};

}  // namespace
}  // namespace fold::cpu
