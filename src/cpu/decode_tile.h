#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#if defined(__BMI2__)
#include <immintrin.h>
#endif

#include "cpu/buffer.h"
#include "cpu/decode_range.h"
#include "numerics/exp2.h"
#include "numerics/planes.h"

// Data of a range on its way through decode. Included by one source per instruction set, so everything has internal
// linkage.
namespace fold::cpu {
namespace {

constexpr int kLanes = 16;                   // fp32 lanes of the widest registers
constexpr int kBatch = 2 * kTile;            // rows collected for a weighted sum, at most
constexpr int kChunkTiles = 4;               // tiles that go through the stages together
constexpr int kChunk = kChunkTiles * kTile;  // a byte names one of its keys

// Always inlined: g++ takes a function that only prefetches for one without effect and drops the calls.
#define FOLD_PREFETCH inline __attribute__((always_inline)) void

FOLD_PREFETCH prefetch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const uint8_t*>(from) + at);
}

/// What a scan sends for in the course of its products, as a core takes only a few lines at a time: the tile scanned
/// next into the cache next to the core, and one a chunk later into the one behind it. Planes h, (64, D/2) each.
struct Coming {
  FOLD_PREFETCH send(int64_t at) const {
    __builtin_prefetch(next + at, 0, 3);
    __builtin_prefetch(later + at, 0, 2);
  }
  const uint8_t *next, *later;
};

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

// Rows of D signed bytes in a cache page, as they enter a product.
struct SplitRow {        // plane a: even channels, then odd ones
  const uint8_t *h, *l;  // (D/2,) each
};
struct PlainRow {
  const int8_t* bytes;  // (D,)
};
struct CodeRow {         // ubar - 128
  const uint8_t* bytes;  // (D,)
};

/// Products of four keys with a group's rows, and room for whole vectors of four rows.
constexpr int kQuadProducts = 4 * kMaxRows + 12;

/// Keys of a chunk whose deeper planes are multiplied, four at a time.
template <class Row>
struct KeyList {
  void add(const Row& r, int k) {
    row[count] = r;
    key[count++] = k;
  }
  /// Repeats the first key up to a multiple of four. Returns how many fours there are.
  int fill() {
    for (int i = count; i % 4 != 0; ++i) row[i] = row[0], key[i] = key[0];
    return (count + 3) / 4;
  }
  int count = 0;
  Row row[kChunk + 3];
  int key[kChunk + 3];  // in the chunk
};

/// Where a tile is, and the sets of its keys that are seen and read.
struct Tile {
  plan::HeadPage page{};
  int64_t tile = 0, slot = 0;  // which; the page slot of its first key
  uint64_t visible = 0, always = 0, k_l = 0, v_h = 0, v_l = 0, v_b = 0;
};

/// Tiles on their way through the stages of a RangeWorker. Few keys of a tile are read deeper than plane h, so what is
/// done with those takes the whole chunk's at once.
struct Chunk {
  explicit Chunk(int rows) : x(int64_t{rows} * kChunk), d1(int64_t{rows} * kChunk + kQuadProducts) {}
  Tile tile[kChunkTiles];
  alignas(64) float key_scale[kChunk];
  Buffer<float> x;            // (G, kChunk) log2 weights at the level read
  KeyList<SplitRow> deep;     // the keys read to level 1
  Buffer<int32_t> d1;         // (fours, G, 4) their products
  KeyList<PlainRow> further;  // the keys read to level 2, their places among those of level 1
  int place[kChunk + 3];
};

/// Keys of a chunk whose values are added together.
struct ReadList {
  alignas(64) uint8_t key[2 * kTile];  // room for a whole vector behind the last
  int count = 0;
  uint64_t l = 0, b = 0;  // places in the list of those read to planes l and b
};

/// The bits of `set` at the places of `of`, moved together.
inline uint64_t moved_together(uint64_t set, uint64_t of) {
#if defined(__BMI2__)
  return _pext_u64(set, of);
#else
  uint64_t out = 0;
  for (int i = 0; of != 0; of &= of - 1, ++i) out |= (set >> std::countr_zero(of) & 1) << i;
  return out;
#endif
}

/// Keys whose V is read, by plane.
struct ValueKeys {
  uint64_t h = 0, l = 0, b = 0;
};

/// A row asks for a plane of V at or above these x.
struct ValueGates {
  float h, l, b;
};

/// A weight whose code is 255 at every shift (24 at most), and to which half of a code can be added in 32 bits.
constexpr uint32_t kMostCoded = 0xFF000000u;

/// Sums over dropped keys of their weights, and of their codes.
struct DroppedMass {
  int64_t weights, codes;
};

/// Places in a list by the bytes that the key's largest weight over a group's rows fills. Keys of weight 0 are in no
/// set.
struct Widths {
  uint64_t one = 0, two = 0, four = 0;
};

/// Sums over rows times their weights, of at most `Bytes` bytes each. The rows are collected and multiplied 64 or more
/// at a time, while they are still in a cache near by.
template <class Ops, class Row, int Bytes>
class RowBatch {
 public:
  explicit RowBatch(int rows) : rows_(rows), sums_(rows) {}

  /// Adds row(i) with the weights [i] for every bit i of `places`. weights: (G, 64).
  template <class F>
  void add(uint64_t places, RowTile<uint32_t>& weights, F row) {
    if (places == 0) return;
    for (int r = 0; r < rows_; ++r) sums_.put(count_, r, weights[r], places);
    for (; places != 0; places &= places - 1) row_[count_++] = row(std::countr_zero(places));
    if (count_ >= kTile) flush();
  }

  /// Adds one row; weight(r) is its weight for query row r.
  template <class F>
  void add(const Row& row, F weight) {
    for (int r = 0; r < rows_; ++r) sums_.put(count_, r, weight(r));
    row_[count_++] = row;
    if (count_ >= kTile) flush();
  }

  /// out[r][i] += factor * sum of weight * byte i. Leaves the batch empty. out: (G, D).
  void drain(int64_t factor, int64_t* out) {
    flush();
    sums_.drain(static_cast<uint64_t>(factor), reinterpret_cast<uint64_t*>(out));
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

  /// Adds row(place) for those of `places` that have a width.
  template <class F>
  void add(const Widths& widths, uint64_t places, RowTile<uint32_t>& weights, F row) {
    one_.add(places & widths.one, weights, row);
    two_.add(places & widths.two, weights, row);
    four_.add(places & widths.four, weights, row);
  }

  void drain(int64_t factor, int64_t* out) {
    one_.drain(factor, out);
    two_.drain(factor, out);
    four_.drain(factor, out);
  }

 private:
  RowBatch<Ops, Row, 1> one_;
  RowBatch<Ops, Row, 2> two_;
  RowBatch<Ops, Row, 4> four_;
};

/// How a query row's products become log2 weights at a level, and which of those ask for more.
struct RowScale {
  float unit, z;            // x = fma(float(dot) * unit, e_k, -z)
  float margin, threshold;  // asked for where fma(margin, e_k, x) >= threshold
};

/// The same of a group's rows.
struct RowScales {
  RowScale row[kMaxRows + 3];  // room for whole vectors of four
};

/// D0 from the product with the plane kHalfPlane completes: sum (32 h + 15) qa.
inline int32_t level_0(int32_t dot, int32_t sum_a) { return 2 * dot + sum_a; }

/// The product of level 2 (docs/numerics.md, section 3), in level 1's unit.
inline float product_2(int32_t d1, int32_t d2) {
  return numerics::add(static_cast<float>(d1), numerics::mul(static_cast<float>(d2), 0x1p-8f));
}

}  // namespace
}  // namespace fold::cpu
