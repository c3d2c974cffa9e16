#pragma once
#include <cstdint>

#include "fold/cache_layout.h"

// The contract between the API (which checks), the plan and every backend. B requests, T query tokens, H query heads,
// HK KV heads, G = H / HK, D head dim. Strides count elements.
namespace fold::plan {

struct CacheView {
  uint8_t* pages;       // (num_pages, sections.bytes), page p at pages + p * page_stride
  int64_t page_stride;  // bytes
  int64_t num_pages;
  CacheLayout layout;
  PageSections sections;
};

struct CacheWriteParams {
  CacheView cache;
  const void* k;  // (T_total, HK, D)
  const void* v;  // (T_total, HK, D)
  DType k_dtype, v_dtype;
  int64_t k_stride_t, k_stride_h, v_stride_t, v_stride_h;
  const int32_t* block_table;  // (B, max_pages)
  int64_t block_table_stride;
  const int32_t* seqlens;       // (B,), stride 1: keys before the call
  const int32_t* cu_seqlens;    // (B + 1,), stride 1
  const int64_t* slot_mapping;  // (T_total,), stride 1, or null
  int64_t batch;
};

struct DecodeParams {
  CacheView cache;
  const void* q;  // (B, T, H, D)
  DType q_dtype;
  int64_t q_stride_b, q_stride_t, q_stride_h;
  const int32_t* block_table;  // (B, max_pages)
  int64_t block_table_stride;
  const int32_t* seqlens;  // (B,), stride 1
  const int32_t* q_lens;   // (B,), stride 1, or null
  const uint64_t* tree;    // (B, T), row stride tree_stride, or null
  int64_t tree_stride;
  const float* depth;  // (B, T, H) by strides, or null (+inf)
  int64_t depth_stride_b, depth_stride_t, depth_stride_h;
  const float* sinks;  // (H,), stride 1, or null
  const float* gates;  // (5,) or null
  float qk_scale;      // softmax_scale * log2(e)
  float reference_shift;
  int64_t window_left;         // -1: unlimited
  int64_t key_begin, key_end;  // range of keys summed (the whole request: 0, INT64_MAX)
  int64_t batch, tokens, heads;
  int splits;  // 0: the backend's choice

  void* out;  // (B, T, H, D) or null
  DType out_dtype;
  int64_t out_stride_b, out_stride_t, out_stride_h;
  float* lse;            // (B, H, T) or null
  float* kept_fraction;  // (B, T, H) or null
  float* dropped_mass;   // (B, T, H) or null
  uint8_t* recomputed;   // (B, T, H) or null
  int64_t* bytes_read;   // (B, T, HK) or null

  int64_t* numerator;    // (B, T, H, D) or null: partials instead of out
  int64_t* denominator;  // (B, T, H, 3): sums of weights, of weights times V's scales, visible keys
  float* grid;           // (B, T, H, 3): Z, E, spread
};

/// into += other, of the same rows: B T H of them, in order.
struct AddPartialsParams {
  int64_t* numerator;    // (rows, D)
  int64_t* denominator;  // (rows, 3), as in DecodeParams
  float* grid;           // (rows, 3)
  const int64_t* other_numerator;
  const int64_t* other_denominator;
  const float* other_grid;
  int64_t rows, head_dim;
};

/// Partial sums to outputs.
struct FinishParams {
  const int64_t* numerator;    // (B, T, H, D)
  const int64_t* denominator;  // (B, T, H, 3), as in DecodeParams
  const float* grid;           // (B, T, H, 3)
  const float* sinks;          // (H,) or null
  int64_t batch, tokens, heads, head_dim;
  void* out;  // (B, T, H, D)
  DType out_dtype;
  int64_t out_stride_b, out_stride_t, out_stride_h;
  float* lse;      // (B, H, T) or null
  uint8_t* valid;  // (B, T, H) or null
};

struct CacheReadParams {
  CacheView cache;
  const int32_t* block_table;  // (B, max_pages)
  int64_t block_table_stride, max_pages, batch;
  const int32_t* cu_seqlens;  // (B + 1,), stride 1
  void* k;                    // (rows, HK, D)
  void* v;
  DType k_dtype, v_dtype;
  int64_t k_stride_t, k_stride_h, v_stride_t, v_stride_h;
  int64_t rows;
};

/// The cache write of a decoding step, and the tables that its decode is told.
struct StepParams {
  CacheWriteParams write;  // B T tokens; cu_seqlens null: T of each request
  int64_t max_pages;       // columns of block_table
  const int32_t* q_lens;   // (B,), stride 1, or null
  int64_t tokens;          // T

  int32_t* lengths;       // (B,) keys after the step
  int32_t* token_counts;  // (B,) tokens that are no padding, a request's first
};

}  // namespace fold::plan
