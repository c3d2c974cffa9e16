#pragma once
#include "numerics/config.h"
#include "numerics/planes.h"
#include "plan/decode_params.h"

// Addresses inside a page, for every backend.
namespace fold::plan {

/// Where one KV head of one page keeps its sections. Null where the layout does not keep a section.
struct HeadPage {
  uint8_t* k_h;          // (P, D/2)
  uint8_t* k_l;          // (P, D/2)
  int8_t* k_b;           // (P, D)
  uint16_t* k_scale;     // (P,) bf16, permuted within 64-key tiles
  uint8_t* v_h;          // (P, D/2)
  uint8_t* v_l;          // (P, D/2)
  int8_t* v_b;           // (P, D)
  uint16_t* v_scale;     // (P,)
  uint16_t* bound;       // (P/64,)
  uint16_t* mean_scale;  // (P/64,)
  int8_t* mean;          // (P/64, D)
  uint8_t* ubar;         // (P/64, D)
  int8_t* fit_in;        // (F, 16, D)
  int8_t* fit_out;       // (F, 16, D)
  float* fit_scale;      // (F, 16)
};

template <typename T>
FOLD_HD T* section(uint8_t* page, int64_t offset, int64_t element) {
  return offset < 0 ? nullptr : reinterpret_cast<T*>(page + offset) + element;
}

FOLD_HD HeadPage head_page(const CacheView& cache, int64_t page_id, int64_t head) {
  uint8_t* page = cache.pages + page_id * cache.page_stride;
  const PageSections& s = cache.sections;
  const int64_t d = cache.layout.head_dim, row = head * cache.layout.page_size;
  const int64_t block = row / numerics::kTile;
  const int64_t slots = (cache.layout.page_size + numerics::kFitSlotKeys - 1) / numerics::kFitSlotKeys;
  const int64_t fit = head * slots * numerics::kRank;
  return {section<uint8_t>(page, s.k_h, row * d / 2), section<uint8_t>(page, s.k_l, row * d / 2),
          section<int8_t>(page, s.k_b, row * d),      section<uint16_t>(page, s.k_scale, row),
          section<uint8_t>(page, s.v_h, row * d / 2), section<uint8_t>(page, s.v_l, row * d / 2),
          section<int8_t>(page, s.v_b, row * d),      section<uint16_t>(page, s.v_scale, row),
          section<uint16_t>(page, s.bound, block),    section<uint16_t>(page, s.mean_scale, block),
          section<int8_t>(page, s.mean, block * d),   section<uint8_t>(page, s.ubar, block * d),
          section<int8_t>(page, s.fit_in, fit * d),   section<int8_t>(page, s.fit_out, fit * d),
          section<float>(page, s.fit_scale, fit)};
}

/// The largest mark not above `keys`, or 0: 2^k (4 + i) / 4, k >= 10, i = 0..3 (docs/numerics.md, section 9).
FOLD_HD int64_t last_mark(int64_t keys) {
  if (keys < numerics::kFirstMark) return 0;
  int64_t octave = numerics::kFirstMark;
  while (octave * 2 <= keys) octave *= 2;
  return octave + (keys - octave) / (octave / 4) * (octave / 4);
}

/// The smallest mark above `keys`.
FOLD_HD int64_t next_mark(int64_t keys) {
  if (keys < numerics::kFirstMark) return numerics::kFirstMark;
  int64_t octave = numerics::kFirstMark;
  while (octave * 2 <= keys) octave *= 2;
  return octave + ((keys - octave) / (octave / 4) + 1) * (octave / 4);
}

/// The slot of mark `m` within the page that holds key m - 1.
FOLD_HD int64_t fit_slot(int64_t mark, int64_t page_size) { return ((mark - 1) % page_size) / numerics::kFitSlotKeys; }

}  // namespace fold::plan
