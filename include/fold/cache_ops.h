#pragma once
#include <cstdint>

#include "fold/decode.h"

// Operations on a paged cache that combine the ones of decode.h. B requests, T query tokens a request, H query heads,
// HK KV heads, D head dim. As there, every argument is checked before anything is written.
namespace fold {

/// One decoding step: new keys, and the attention of their tokens.
struct StepArgs {
  TensorView k, v;            ///< (B T, HK, D) f32, bf16 or f16; last stride 1
  TensorView slot_mapping{};  ///< optional (B T,) i64: page * page_size + slot, or -1 for a token that is padding: it
                              ///< is not written, and its outputs are 0 (LSE -inf). Padding comes last in a request
  DecodeArgs decode;          ///< seqlens: keys each request holds *before* the step
};

/// cache_write, then decode. A request of length 0 whose first page id is negative is padding altogether.
FOLD_API void decode_step(const CacheStorage& cache, const StepArgs& args, const DecodeResults& results);

/// Reads keys back at their finest reading, rotated back: row cu_seqlens[b] + j of k and v is key j of request b, for
/// as many keys as the request has rows. block_table (B, max_pages) i32; cu_seqlens (B + 1,) i32; k, v (T_total, HK, D)
/// f32, bf16 or f16, last stride 1.
FOLD_API void cache_read(const CacheStorage& cache, const TensorView& block_table, const TensorView& cu_seqlens,
                         const TensorView& k, const TensorView& v);

/// A chunk of prompts, before its keys are written.
struct PrefillArgs {
  TensorView q;              ///< (T_total, H, D) f32, bf16 or f16; last stride 1
  TensorView k, v;           ///< (T_total, HK, D), dtype of q
  TensorView cu_seqlens;     ///< (B + 1,) i32: request b brings tokens cu_seqlens[b] .. cu_seqlens[b + 1]
  TensorView block_table;    ///< (B, max_pages) i32
  TensorView seqlens;        ///< (B,) i32: keys each request holds already
  TensorView sinks;          ///< optional (H,) f32
  double softmax_scale = 0;  ///< 0 stands for 1/sqrt(D)
  int64_t window_left = -1;  ///< keys before its own that a row sees; -1: all
  int64_t cached_keys = -1;  ///< at least as many as all requests hold between them; -1: what block_table has room for
};

/// Causal attention of the chunk over the cached keys (at their finest reading) and the chunk's own (as given).
/// out (T_total, H, D), dtype of q; lse (H, T_total) f32, natural log, or undefined. Nothing is written to the cache.
FOLD_API void prefill_attention(const CacheStorage& cache, const PrefillArgs& args, const TensorView& out,
                                const TensorView& lse);

}  // namespace fold
