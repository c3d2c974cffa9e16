#pragma once
#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/buffer.h"
#include "cpu/decode_range.h"
#include "numerics/exp2.h"
#include "numerics/planes.h"

// Data of a range on its way through decode. Included by one source per instruction set, so everything has internal
// linkage.
namespace fold::cpu {
namespace {

constexpr int kLanes = 16;         // fp32 lanes of the widest registers
constexpr int kBatch = 2 * kTile;  // rows collected for a weighted sum, at most

/// Plane l of a key of which only h is read: 16 h + 7.5 is half above the value whose low nibble is 7.
struct HalfPlane {
  alignas(64) uint8_t bytes[numerics::kMaxHeadDim / 2];
  constexpr HalfPlane() : bytes() {
    for (auto& byte : bytes) byte = 0x77;
  }
};
constexpr HalfPlane kHalfPlane;

template <typename T>
struct RowTile {  // (G, 64)
  explicit RowTile(int rows) : data(int64_t{rows} * kTile) {}
  T* operator[](int row) { return &data[int64_t{row} * kTile]; }
  Buffer<T> data;
};

/// One tile on its way through the stages of a RangeWorker.
struct TileState {
  explicit TileState(int rows) : dot(rows), x(rows) {}
  plan::HeadPage page{};
  int64_t tile = 0, slot = 0;  // which; the page slot of its first key
  uint64_t visible = 0, always = 0, k_l = 0, k_b = 0, v_h = 0, v_l = 0, v_b = 0;  // key sets
  alignas(64) float key_scale[kTile];
  RowTile<int32_t> dot;  // level-1 dot products, in the order of k_l
  RowTile<float> x;      // log2 weights at the level read; once weighed, 2^x in fixed point before it is rounded
};

/// Keys whose V is read, by plane.
struct ValueKeys {
  uint64_t h = 0, l = 0, b = 0;
};

/// Sums of weights over the keys whose V is read, and over those of them read to plane h alone.
struct ValueMass {
  int64_t all = 0, half = 0;
};

/// Keys by the bytes their largest weight over a group's rows fills. Keys of weight 0 are in no set.
struct Widths {
  uint64_t one = 0, two = 0, four = 0;
};

// Rows of D signed bytes in a cache page, as they enter a weighted sum.
struct SplitRow {        // plane a: even channels, then odd ones
  const uint8_t *h, *l;  // (D/2,) each
};
struct PlainRow {
  const int8_t* bytes;  // (D,)
};
struct CodeRow {         // ubar - 128
  const uint8_t* bytes;  // (D,)
};

/// Sums over rows times their weights, of at most `Bytes` bytes each. The rows are collected and multiplied 64 or more
/// at a time, while they are still in a cache near by.
template <class Ops, class Row, int Bytes>
class RowBatch {
 public:
  explicit RowBatch(int rows) : rows_(rows), sums_(rows) {}

  /// Adds row(k) for every key k of `keys`. weights: (G, 64), in key order.
  template <class F>
  void add(uint64_t keys, RowTile<uint32_t>& weights, F row) {
    if (keys == 0) return;
    for (int r = 0; r < rows_; ++r) sums_.put(count_, r, weights[r], keys);
    for (; keys != 0; keys &= keys - 1) row_[count_++] = row(std::countr_zero(keys));
    if (count_ >= kTile) flush();
  }

  /// Adds one row; weight(r) is its weight for query row r.
  template <class F>
  void add(const Row& row, F weight) {
    for (int r = 0; r < rows_; ++r) sums_.put(count_, r, weight(r));
    row_[count_++] = row;
    if (count_ >= kTile) flush();
  }

  /// out[r][channel(i)] += factor * sum of weight * byte i. Leaves the batch empty. out: (G, D).
  template <class Channel>
  void drain(int64_t factor, Channel channel, int64_t* out) {
    flush();
    sums_.drain(static_cast<uint64_t>(factor), channel, reinterpret_cast<uint64_t*>(out));
  }

 private:
  void flush() {
    if (count_ == 0) return;
    for (; count_ % 4 != 0; ++count_) {  // rows of weight 0
      for (int r = 0; r < rows_; ++r) sums_.put(count_, r, 0);
      row_[count_] = row_[0];
    }
    sums_.add(row_, count_);
    count_ = 0;
  }

  int rows_, count_ = 0;
  typename Ops::template Sums<Bytes> sums_;
  Row row_[kBatch];
};

/// RowBatches of every width.
template <class Ops, class Row>
class RowSums {
 public:
  explicit RowSums(int rows) : one_(rows), two_(rows), four_(rows) {}

  template <class F>
  void add(uint64_t keys, const Widths& widths, RowTile<uint32_t>& weights, F row) {
    one_.add(keys & widths.one, weights, row);
    two_.add(keys & widths.two, weights, row);
    four_.add(keys & widths.four, weights, row);
  }

  template <class Channel>
  void drain(int64_t factor, Channel channel, int64_t* out) {
    one_.drain(factor, channel, out);
    two_.drain(factor, channel, out);
    four_.drain(factor, channel, out);
  }

 private:
  RowBatch<Ops, Row, 1> one_;
  RowBatch<Ops, Row, 2> two_;
  RowBatch<Ops, Row, 4> four_;
};

/// How a query row's dot products become log2 weights, and which of those ask for more.
struct RowScale {
  float unit, z;            // x = fma(float(dot) * unit, e_k, -z)
  float margin, threshold;  // asked for where fma(margin, e_k, x) >= threshold
};

/// D0 from the product with the plane kHalfPlane completes: sum (32 h + 15) qa.
inline int32_t level_0(int32_t dot, int32_t sum_a) { return 2 * dot + sum_a; }

/// F of level 2 (docs/numerics.md, section 3); scale: e_q.
inline float logit_2(float scale, int32_t d1, int32_t d2) {
  const float dot = numerics::add(static_cast<float>(d1), numerics::mul(static_cast<float>(d2), 0x1p-8f));
  return numerics::mul(dot, numerics::mul(scale, 0x1p-8f));
}

}  // namespace
}  // namespace fold::cpu
