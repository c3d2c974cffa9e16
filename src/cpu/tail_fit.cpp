#include "cpu/tail_fit.h"

#include <algorithm>

#include "numerics/block.h"
#include "plan/cache_access.h"

namespace fold::cpu {
namespace {

using numerics::kRank;
using numerics::kTile;

/// A block's place: its page and the slot of its first key.
struct BlockAt {
  plan::HeadPage page;
  int64_t slot;
};

class TailFit {
  static constexpr int kNone = 1000;  // no power of two has this exponent

 public:
  TailFit(const plan::CacheView& cache, const int32_t* table, int64_t head, const CacheKernels& kernels,
          const FitBuffers& buffers)
      : cache_(cache),
        table_(table),
        head_(head),
        d_(static_cast<int>(cache.layout.head_dim)),
        kernels_(kernels),
        buffers_(buffers) {}

  /// Marks come in ascending order.
  void fit(int64_t mark) {
    for (; bounds_read_ < mark / kTile; ++bounds_read_) {
      const BlockAt at = block(bounds_read_);
      const uint16_t bound = at.page.bound[at.slot / kTile];
      bound_ = std::max(bound_, bound);  // NaN is the largest
      exponents_ += numerics::pow2_ceil_exponent(bound);
    }
    const BlockAt last = block(mark / kTile - 1);
    const int64_t first = plan::fit_slot(mark, cache_.layout.page_size) * kRank;
    const FitOut out = {last.page.fit_in + first * d_, last.page.fit_out + first * d_, last.page.fit_scale + first};
    if (bound_ == numerics::kBf16Nan) {
      std::fill_n(out.p, kRank * d_, int8_t{0});
      std::fill_n(out.u, kRank * d_, int8_t{0});
      std::fill_n(out.f, kRank, 0.0f);
      return;
    }
    const int exponent = std::min(numerics::pow2_ceil_exponent(bound_),
                                  numerics::typical_exponent(exponents_, bounds_read_) + numerics::kOutlierBits);
    if (exponent != exponent_) {  // B counts in units of E: a new E starts the sums again
      exponent_ = exponent;
      summed_ = 0;
      std::fill_n(buffers_.sums, 2 * d_ * d_, 0);
    }
    for (; summed_ < mark / kTile; summed_ += kChunk / kTile) {  // marks are multiples of a chunk
      pack(summed_, 0);
      pack(summed_ + 1, 1);
      kernels_.add_chunk(d_, buffers_);
    }
    kernels_.solve_fit(d_, exponent, buffers_, out);
  }

 private:
  BlockAt block(int64_t index) const {
    const int64_t key = index * kTile, page_size = cache_.layout.page_size;
    return {plan::head_page(cache_, table_[key / page_size], head_), key % page_size};
  }

  void pack(int64_t index, int half) const {
    const BlockAt at = block(index);
    const numerics::PlaneRow v = numerics::plane_row({at.page.v_h, at.page.v_l, at.page.v_b}, at.slot, d_);
    kernels_.pack_block(at.page.k_h + at.slot * (d_ / 2), v, at.page.v_scale + at.slot, exponent_, d_, half, buffers_);
  }

  const plan::CacheView& cache_;
  const int32_t* table_;
  const int64_t head_;
  const int d_;
  const CacheKernels& kernels_;
  const FitBuffers& buffers_;
  uint16_t bound_ = 0;       // largest bound of the blocks below bounds_read_
  int64_t exponents_ = 0;    // sum over theirs
  int64_t bounds_read_ = 0;  // blocks
  int exponent_ = kNone;     // of the E that the sums count in
  int64_t summed_ = 0;       // blocks in the sums
};

}  // namespace

FitScratch::FitScratch(int64_t d) : words_(3 * d * kPairs), sums_(2 * d * d), matrices_(3 * d * d + 2 * d * kRank) {
  double* m = matrices_.data();
  buffers_ = {.centred = words_.data(),
              .right = words_.data() + d * kPairs,
              .sums = sums_.data(),
              .a = m,
              .y = m + d * d,
              .c = m + 2 * d * d,
              .x = m + 3 * d * d,
              .v = m + 3 * d * d + d * kRank};
}

void fit_tail(const plan::CacheView& cache, const int32_t* table, int64_t head, int64_t length, int64_t new_length,
              const CacheKernels& kernels, FitScratch& scratch) {
  TailFit fit(cache, table, head, kernels, scratch.buffers());
  for (int64_t mark = plan::next_mark(length); mark <= new_length; mark = plan::next_mark(mark)) fit.fit(mark);
}

}  // namespace fold::cpu
