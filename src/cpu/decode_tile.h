#pragma once
#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/decode_range.h"
#include "numerics/exp2.h"
#include "numerics/planes.h"

// Data of a range on its way through decode. Included by one source per instruction set, so everything has internal
// linkage.
namespace fold::cpu {
namespace {

constexpr int kPacked = kTile + 16;  // packed keys, with room for a whole vector behind the last one

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

/// One tile on its way through the stages of a RangeWorker.
struct TileState {
  explicit TileState(int rows) : dot(rows), x(rows), scaled(rows), weight(rows) {}
  plan::HeadPage page{};
  int64_t tile = 0, slot = 0;  // which; the page slot of its first key
  uint64_t visible = 0, always = 0, k_l = 0, k_b = 0, v_h = 0, v_l = 0, v_b = 0;  // key sets
  alignas(64) float key_scale[kTile];
  RowTile<int32_t> dot;      // level-1 dot products, in the order of k_l
  RowTile<float> x;          // log2 weights at the level read
  RowTile<float> scaled;     // 2^x in fixed point, before it is rounded
  RowTile<uint32_t> weight;  // d of section 7; 0 where not visible
};

/// Rows of signed bytes waiting to be multiplied by their weights, up to 64 at a time.
template <class Sums>
class RowBatch {
 public:
  RowBatch(int rows, int d) : sums_(rows, d), d_(d), bytes_(static_cast<size_t>(kTile) * d), weights_(rows) {}

  /// Room for the next row's bytes, (D,); its weights are set through weight().
  int8_t* next() {
    if (count_ == kTile) flush();
    return bytes_.data() + static_cast<size_t>(count_++) * d_;
  }
  uint32_t& weight(int r) { return weights_[r][count_ - 1]; }

  /// The sums over every row so far of weight * byte: (G, D).
  std::vector<uint64_t> drain() {
    flush();
    return sums_.drain();
  }

 private:
  void flush() {
    if (count_ > 0) sums_.add(bytes_.data(), weights_[0], count_);
    count_ = 0;
  }

  Sums sums_;
  int d_, count_ = 0;
  std::vector<int8_t> bytes_;  // (64, D)
  RowTile<uint32_t> weights_;
};

/// F of level 2 (docs/numerics.md, section 3).
inline float logit_2(const Query& q, int r, int32_t d1, int32_t d2) {
  const float dot = numerics::add(static_cast<float>(d1), numerics::mul(static_cast<float>(d2), 0x1p-8f));
  return numerics::mul(dot, numerics::mul(q.scale[r], 0x1p-8f));
}

}  // namespace
}  // namespace fold::cpu
