#pragma once
#include <cstdint>

#include "plan/decode_params.h"

namespace fold::plan {

/// All keys that a chunk of prompts attends to, laid out one request behind the other for attention over whole
/// sequences: what a request has cached, at its finest reading, then its tokens' own as given. B requests, HK KV heads,
/// D head dim. A request that would have keys past the room for them has none, nor do those behind it.
struct PrefillKeysParams {
  CacheView cache;
  const int32_t* block_table;  // (B, max_pages)
  int64_t block_table_stride, max_pages, batch;
  const int32_t* seqlens;     // (B,), stride 1: keys in the cache
  const int32_t* cu_seqlens;  // (B + 1,), stride 1: rows of k and v
  const void* k;              // (tokens, HK, D), rows start at multiples of 16 bytes
  const void* v;
  DType dtype;  // of k, v and what is written: bf16 or fp16
  int64_t k_stride_t, k_stride_h, v_stride_t, v_stride_h;
  int64_t tokens;

  int32_t* key_starts;  // (B + 1,) written: request b's keys are rows key_starts[b] .. key_starts[b + 1]
  void* keys;           // (rows, HK, D) written, contiguous
  void* values;         // likewise
  int64_t rows;
};

}  // namespace fold::plan
