#pragma once
#include <cstdint>
#include <optional>

#include "fold/cache_layout.h"
#include "fold/tensor.h"

// Decode over a paged cache (docs/numerics.md). B requests, T query tokens a request (its newest keys, already
// written), H query heads, HK KV heads, D head dim. Every call checks its arguments first and throws fold::Error before
// it writes anything.
namespace fold {

/// Writes new tokens and, where they complete a block or reach a mark, the block's summary and the tail's fit.
struct CacheWriteArgs {
  TensorView k, v;          ///< (T_total, HK, D) f32, bf16 or f16; last stride 1; k and v may differ in strides
  TensorView block_table;   ///< (B, max_pages) i32: page ids of each request; entries past its length are never read
  TensorView seqlens;       ///< (B,) i32: keys each request holds *before* the call
  TensorView cu_seqlens;    ///< (B + 1,) i32: request b brings tokens cu_seqlens[b] .. cu_seqlens[b + 1]; tokens from
                            ///< cu_seqlens[B] on are ignored
  TensorView slot_mapping;  ///< optional (T_total,) i64: page * page_size + slot; -1 marks a padding token, which is
                            ///< skipped and takes no position. Others must agree with block_table
};

FOLD_API void cache_write(const CacheStorage& cache, const CacheWriteArgs& args);

struct DecodeArgs {
  TensorView q;            ///< (B, T, H, D) f32, bf16 or f16; last stride 1
  TensorView block_table;  ///< (B, max_pages) i32
  TensorView
      seqlens;  ///< (B,) i32: keys in the cache, the T new ones included; 0 marks a padding row (output 0, LSE -inf)
  TensorView q_lens;  ///< optional (B,) i32: query tokens of each request, <= T (rows past it are padding). Default T
  TensorView tree;    ///< optional (B, T) i64: bit j of node i is set if node i sees node j (itself included); T <= 64
  TensorView depth;   ///< optional f32, shape broadcastable to (B, T, H) by strides; log2 of the row's mass; +inf reads
                      ///< every V. Default +inf
  TensorView sinks;   ///< optional (H,) f32: one extra logit per head (natural log), in the denominator only
  double softmax_scale = 0;              ///< 0 stands for 1/sqrt(D)
  std::optional<int64_t> window_left{};  ///< keys before its own that a row sees; -1, and the default: all
  int splits = 0;  ///< parts that a request's keys of a KV head are cut into, as far as sensible; 0: chosen.
                   ///< Changes no bits
  const float* gates = nullptr;  ///< fitting only: 5 gates used instead of the depth's (K.l, K.b, V.h, V.l, V.b)
  float reference_shift = 0;     ///< testing only: added to every sampled reference
};

/// What a decode step returns; undefined views are not computed.
struct DecodeResults {
  TensorView out;            ///< (B, T, H, D) f32, bf16 or f16; last stride 1
  TensorView lse;            ///< (B, H, T) f32, natural log, contiguous
  TensorView kept_fraction;  ///< (B, T, H) f32, contiguous: keys whose V was read / visible keys
  TensorView dropped_mass;   ///< (B, T, H) f32, contiguous: share of the denominator held by dropped keys
  TensorView recomputed;  ///< (B, T, H) u8, contiguous: 1 where the reference or the value grid was wrong and the row
                          ///< ran again
  TensorView bytes_read;  ///< (B, T, HK) i64, contiguous: cache bytes the token's rows needed; any if all are NaN
};

FOLD_API void decode(const CacheStorage& cache, const DecodeArgs& args, const DecodeResults& results);

/// A partial sum over the keys [begin, end) of every request; ends that are not multiples of 64 must lie at or past the
/// length. Partials over disjoint ranges add to the bits of the whole.
struct Partial {
  TensorView numerator;  ///< (B, T, H, D) i64, rotated channels, unit E 2^-42

  /// (B, T, H, 3) i64: sums of weights (unit 2^-26), of weights times V's scales (unit E 2^-26), visible keys.
  TensorView denominator;

  /// (B, T, H, 3) f32: the declared reference Z (log2), E and the row's spread (log2 of its effective number of keys);
  /// NaN for a poisoned row, (-inf, 0, 0) for a row without keys.
  TensorView grid;
};

FOLD_API void partial(const CacheStorage& cache, const DecodeArgs& args, int64_t begin, int64_t end,
                      const Partial& result);

/// into += other. Throws if their grids differ.
FOLD_API void add_partials(const Partial& into, const Partial& other);

/// Normalises and rotates back. sinks as in DecodeArgs (counted here, once). A row whose reference or grid was wrong
/// (docs/numerics.md, section 8: it is not done) comes back as NaN with valid = 0 and has to be computed by decode();
/// the others have decode()'s bits. out (B, T, H, D), lse (B, H, T) f32 or undefined, valid (B, T, H) u8 or undefined.
FOLD_API void finish(const Partial& partial, const TensorView& sinks, const TensorView& out, const TensorView& lse,
                     const TensorView& valid);

}  // namespace fold
