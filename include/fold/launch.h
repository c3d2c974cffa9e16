#pragma once
#include <cstdint>

#include "fold/attention.h"
#include "fold/cache_ops.h"
#include "fold/decode.h"

// Operations on CUDA tensors. They run on a stream of the caller's, in memory of the caller's, and never wait for the
// device: what tensors hold (lengths, page ids, slots) is read by the kernels alone, so a captured graph may be
// replayed with other contents. All tensors of a call lie on one device.
namespace fold {

/// Where a call on CUDA tensors runs. Calls on CPU tensors do not look at it.
struct Launch {
  void* stream = nullptr;  ///< cudaStream_t of the tensors' device; null: its default stream
  TensorView workspace{};  ///< (bytes,) u8 on the same device, 256-byte aligned, in any state, at least as many as the
                           ///< operation's *_workspace says; free again for the stream's next call
};

/// Bytes of workspace, a function of shapes alone. 0 on the CPU.
FOLD_API int64_t cache_write_workspace(const CacheStorage& cache, const CacheWriteArgs& args);

/// cache_write of decode.h. On a CUDA device nobody looks at the tables before the kernels do. What they cannot make
/// sense of is left out: keys without a page in the pool, keys past block_table's width, tokens whose slot is not where
/// block_table puts them. There pages start at multiples of 16 bytes, here and for decode, or
/// fold::Error is thrown.
FOLD_API void cache_write(const CacheStorage& cache, const CacheWriteArgs& args, const Launch& launch);

/// decode and partial of decode.h. On a CUDA device lengths and page ids are looked at by the kernels alone: a page id
/// outside the pool counts as a row without keys.
FOLD_API int64_t decode_workspace(const CacheStorage& cache, const DecodeArgs& args);
FOLD_API void decode(const CacheStorage& cache, const DecodeArgs& args, const DecodeResults& results,
                     const Launch& launch);
FOLD_API void partial(const CacheStorage& cache, const DecodeArgs& args, int64_t begin, int64_t end,
                      const Partial& result, const Launch& launch);

/// add_partials and finish of decode.h; they need no workspace. On a CUDA device grids are looked at by the kernels
/// alone: a row whose grids differ becomes a poisoned one (grid NaN, sums 0), and one whose E is no power of two, from
/// 2^-100, is not valid.
FOLD_API void add_partials(const Partial& into, const Partial& other, const Launch& launch);
FOLD_API void finish(const Partial& partial, const TensorView& sinks, const TensorView& out, const TensorView& lse,
                     const TensorView& valid, const Launch& launch);

/// decode_step of cache_ops.h. On a CUDA device q_lens are cut to 0..T, and tokens are no padding as far as
/// slot_mapping has slots for them.
FOLD_API int64_t decode_step_workspace(const CacheStorage& cache, const StepArgs& args);
FOLD_API void decode_step(const CacheStorage& cache, const StepArgs& args, const DecodeResults& results,
                          const Launch& launch);

/// cache_read of cache_ops.h; it needs no workspace. On a CUDA device rows of no request are left as they are, and a
/// key without a page in the pool, or past block_table's width, reads as NaN.
FOLD_API void cache_read(const CacheStorage& cache, const TensorView& block_table, const TensorView& cu_seqlens,
                         const TensorView& k, const TensorView& v, const Launch& launch);

/// prefill_attention of cache_ops.h. On a CUDA device: what attention_forward takes there, hence bf16 or fp16. The
/// workspace has room for K and V of args.cached_keys and the chunk in q's dtype; with cached_keys 0 nothing is read of
/// the cache. Lengths and page ids are looked at by the kernels alone: a cached key without a page in the pool reads as
/// NaN, and from the first request on whose keys, with those of the ones before, are more than declared, requests see
/// no key.
FOLD_API int64_t prefill_attention_workspace(const CacheStorage& cache, const PrefillArgs& args, const TensorView& out,
                                             const TensorView& lse);
FOLD_API void prefill_attention(const CacheStorage& cache, const PrefillArgs& args, const TensorView& out,
                                const TensorView& lse, const Launch& launch);

/// attention_forward and attention_backward of attention.h. On a CUDA device: bf16 or fp16, head dim 64, 96, 128 or
/// (without a gradient) 256, and every row starts at a multiple of 16 bytes. cu_seqlens are looked at by the kernels
/// alone, which cut them to the tensors' rows.
FOLD_API int64_t attention_forward_workspace(const TensorView& q, const TensorView& k, const TensorView& v,
                                             const TensorView& out, const TensorView& lse,
                                             const AttentionOptions& options);
FOLD_API void attention_forward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                                const TensorView& lse, const AttentionOptions& options, const Launch& launch);
FOLD_API int64_t attention_backward_workspace(const AttentionBackwardTensors& tensors, const AttentionOptions& options);
FOLD_API void attention_backward(const AttentionBackwardTensors& tensors, const AttentionOptions& options,
                                 const Launch& launch);

}  // namespace fold
