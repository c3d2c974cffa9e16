#pragma once
#include <cstdint>

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
/// block_table puts them.
FOLD_API void cache_write(const CacheStorage& cache, const CacheWriteArgs& args, const Launch& launch);

/// decode and partial of decode.h. On a CUDA device lengths and page ids are looked at by the kernels alone: a page id
/// outside the pool counts as a row without keys.
FOLD_API int64_t decode_workspace(const CacheStorage& cache, const DecodeArgs& args);
FOLD_API void decode(const CacheStorage& cache, const DecodeArgs& args, const DecodeResults& results,
                     const Launch& launch);
FOLD_API void partial(const CacheStorage& cache, const DecodeArgs& args, int64_t begin, int64_t end,
                      const Partial& result, const Launch& launch);

}  // namespace fold
