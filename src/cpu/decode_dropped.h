#pragma once
#include <vector>

#include "cpu/decode_tile.h"

// What becomes of keys whose V is not read (docs/numerics.md, section 7). Included by one source per instruction set.
namespace fold::cpu {
namespace {

/// Adds sums in the order of split rows to sums in the order of channels, (G, D) each, and clears the former.
template <int D>
void move_split_sums(int64_t* split, int rows, int64_t* to) {
  for (int r = 0; r < rows; ++r, split += D, to += D) {
    for (int i = 0; i < D / 2; ++i) {
      to[2 * i] += split[i];
      to[2 * i + 1] += split[D / 2 + i];
    }
    std::fill_n(split, D, 0);
  }
}

/// A range's dropped keys: their mass, and with the tail model what stands in for their V: their blocks' mean V rows,
/// and the correction that their codes predict.
template <class Ops>
class DroppedKeys {
 public:
  explicit DroppedKeys(int rows)
      : rows_(rows),
        code_(rows),
        weights_(rows),
        means_(rows),
        codes_(rows),
        code_means_(rows),
        split_sum_(int64_t{rows} * D),
        code_sum_(int64_t{rows} * D) {
    std::fill_n(split_sum_.data(), rows * D, 0);
  }

  void start(const Group& group) {
    g_ = &group;
    layout_ = group.params->cache.layout;
    correct_ = group.fit_mark > 0;
    for (int r = 0; r < rows_; ++r) unit_[r] = std::ldexp(1.0, -group.e_exponent[r]);
    std::fill_n(code_mass_, rows_, 0);
    std::fill(weights_.begin(), weights_.end(), typename Ops::LaneSum{});
  }

  /// The visible keys of a tile that are not in v_h; their block is settled. x: (G, 64), rows kChunk apart.
  void add(const Tile& t, const float* x, RangeSums& out) {
    const uint64_t gone = t.visible & ~t.v_h;
    if (!layout_.tail) {
      for (int r = 0; r < rows_; ++r) Ops::drop(x + r * kChunk, gone, weights_[r]);
      return;
    }
    DroppedMass mass[kMaxRows];
    for (int r = 0; r < rows_; ++r) {
      mass[r] = Ops::drop(x + r * kChunk, gone, g_->fit_shift[r], code_[r]);
      out.dropped[r] += mass[r].weights;
    }
    const int64_t block = t.slot / kTile;
    const double scale = numerics::from_bf16(t.page.mean_scale[block]);
    prefetch(t.page.mean + block * D, D);
    means_.add({t.page.mean + block * D}, [&](int r) {
      const double share = scale * unit_[r];  // exact
      const uint32_t weight =
          static_cast<uint32_t>(std::min(std::rint(static_cast<double>(mass[r].weights) * share), 4294967295.0));
      out.mass[r] += weight;
      return weight;
    });
    out.bytes += D + 2 + (correct_ ? D : 0);
    if (!correct_) return;
    codes_.add_tile(t.page.k_h + t.slot * kHalf, code_[0]);
    prefetch(t.page.ubar + block * D, D);
    code_means_.add({t.page.ubar + block * D}, [&](int r) {
      code_mass_[r] += mass[r].codes;
      return static_cast<uint32_t>(mass[r].codes);
    });
  }

  /// Adds what add() has not: masses without the tail model, mean rows, the correction.
  void finish(RangeSums& out) {
    for (int r = 0; r < rows_; ++r) out.dropped[r] += weights_[r].total();
    means_.drain(int64_t{1} << 16, out.num.data());
    if (!correct_) return;
    for (int r = 0; r < rows_; ++r) std::fill_n(&code_sum_[r * D], D, -128 * code_mass_[r]);
    code_means_.drain(-1, code_sum_.data());
    codes_.drain(16, reinterpret_cast<uint64_t*>(split_sum_.data()));
    move_split_sums<D>(split_sum_.data(), rows_, code_sum_.data());
    for (int r = 0; r < rows_; ++r) add_correction(r, reinterpret_cast<uint64_t*>(out.num.data()) + r * D);
  }

 private:
  static constexpr int D = Ops::kDim, kHalf = D / 2;

  /// num: (D,)
  void add_correction(int r, uint64_t* num) {
    const plan::HeadPage page = g_->page_of(g_->fit_mark - 1);
    const int64_t fit = plan::fit_slot(g_->fit_mark, layout_.page_size) * numerics::kRank;
    const double unit = std::ldexp(1.0, 12 + g_->fit_shift[r] - g_->e_exponent[r]);
    const int64_t* sum = &code_sum_[r * D];
    for (int64_t direction = fit; direction < fit + numerics::kRank; ++direction) {
      const int8_t* in = page.fit_in + direction * D;
      const int8_t* out = page.fit_out + direction * D;
      int64_t t = 0;
      for (int c = 0; c < D; ++c) t += in[c] * sum[c];
      if (t == 0) continue;
      const double scale = static_cast<double>(page.fit_scale[direction]) * unit;
      for (int c = 0; c < D; ++c) {
        double phi = std::rint(out[c] * scale);
        if (!(std::abs(phi) <= 2147483647.0)) phi = 0;  // a damaged fit may be NaN
        num[c] += static_cast<uint64_t>(t) * static_cast<uint64_t>(static_cast<int64_t>(phi));
      }
    }
  }

  const int rows_;
  const Group* g_ = nullptr;
  CacheLayout layout_;
  bool correct_ = false;
  double unit_[kMaxRows];  // 1 / E

  RowTile<uint8_t> code_;
  std::vector<typename Ops::LaneSum> weights_;  // (G,) without the tail model
  RowBatch<Ops, PlainRow, 4> means_;
  typename Ops::template Sums<1> codes_;  // plane h's codes, split
  RowBatch<Ops, CodeRow, 2> code_means_;  // C_b is at most 64 * 255
  int64_t code_mass_[kMaxRows];
  Buffer<int64_t> split_sum_;  // (G, D); empty but in finish()
  Buffer<int64_t> code_sum_;   // (G, D): S of section 7
};

}  // namespace
}  // namespace fold::cpu
