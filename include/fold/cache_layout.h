#pragma once
#include <cstdint>

#include "fold/error.h"
#include "fold/tensor.h"

namespace fold {

/// What a KV cache stores and how. The bytes are fixed by docs/numerics.md.
struct CacheLayout {
  int64_t n_kv_heads = 0;
  int64_t head_dim = 0;     ///< 64, 128 or 256
  int64_t page_size = 256;  ///< keys a page: a multiple of 64, 64..1024
  int k_bits = 16;          ///< 16 (planes h, l, b), 8 (h, l) or 4 (h)
  int v_bits = 16;          ///< likewise for V
  bool tail = true;         ///< keep what stands in for dropped keys (block means, fits)
};

/// Where each section of a page starts, in bytes from the page's start, and the page's size. A section a layout does
/// not keep has offset -1. HK = n_kv_heads, P = page_size, D = head_dim. Sections start at multiples of 128 bytes.
struct PageSections {
  int64_t k_h, k_l, v_h, v_l;  ///< (HK, P, D/2) u8 nibble planes
  int64_t k_b, v_b;            ///< (HK, P, D) i8
  int64_t k_scale, v_scale;    ///< (HK, P) bf16, permuted within 64-key tiles
  int64_t bound;               ///< (HK, P/64) bf16: largest V scale of a block, NaN if the block is poisoned
  int64_t mean_scale;          ///< (HK, P/64) bf16
  int64_t mean;                ///< (HK, P/64, D) i8: block mean of V
  int64_t ubar;                ///< (HK, P/64, D) u8: block mean of K's h codes, in 1/16
  int64_t fit_in, fit_out;     ///< (HK, F, 16, D) i8: P and U of a fit; F = ceil(P/256) slots
  int64_t fit_scale;           ///< (HK, F, 16) f32
  int64_t bytes;               ///< size of a page; a multiple of 128
};

/// Throws fold::Error for a layout that does not exist.
FOLD_API void check_layout(const CacheLayout& layout);

/// Checks the layout and lays out a page.
FOLD_API PageSections page_sections(const CacheLayout& layout);

/// Fit slots a page has per KV head.
FOLD_API int64_t fit_slots(const CacheLayout& layout);

/// A pool of pages: storage (num_pages, page_sections(layout).bytes) u8, last dimension contiguous, page stride free.
/// Owned by the caller; its bytes need no initialisation.
struct CacheStorage {
  CacheLayout layout;
  TensorView storage;
};

}  // namespace fold
