#pragma once
#include "cuda/counting.cuh"
#include "plan/backend.h"
#include "plan/cache_access.h"

// What a cache write brings to each request. Tables, lengths and slots were seen by nobody before the kernels, so
// whatever does not make sense in them is made harmless here: no page outside the pool is touched, no row of k or v
// outside the tensors is read.
namespace fold::cuda::cache {

using numerics::kTile;

constexpr int kMaxFitBlocks = 128;              ///< thread blocks that compute fits
constexpr int kMaxFitSlots = 288;               ///< parts of fits whose sums are kept at once
constexpr int kFitCounters = kMaxFitSlots + 1;  ///< arrivals at fits, by the slot of their first part, and tickets

struct Write {
  plan::CacheWriteParams params;
  int32_t tokens;      // T_total
  int64_t room;        // keys that a row of block_table has pages for
  int head_step;       // KV heads of a thread block that writes rows
  int32_t* token_of;   // (tokens,): real token k of a request stands at its first token + k; null: the first are real
  int32_t* counts;     // (B,) real tokens of each request; null: all are
  uint32_t* counters;  // (kFitCounters,)
};

/// For the kernel behind this one; by a thread block.
__device__ inline void clear_fit_counters(const Write& w) {
  for (unsigned i = threadIdx.x; i < kFitCounters; i += blockDim.x) w.counters[i] = 0;
}

/// Tokens [first, last) are a request's.
struct TokenRange {
  int first, last;
};

__device__ inline TokenRange token_range(const Write& w, int request) {
  if (w.params.cu_seqlens == nullptr) {  // all bring as many
    const int each = w.tokens / static_cast<int>(w.params.batch);
    return {request * each, (request + 1) * each};
  }
  const int first = min(max(w.params.cu_seqlens[request], 0), w.tokens);
  return {first, min(max(w.params.cu_seqlens[request + 1], first), w.tokens)};
}

/// A request that holds `length` keys and will hold new_length.
struct Request {
  int64_t length, new_length;
  int first_token;
};

__device__ inline Request request_of(const Write& w, int index) {
  const TokenRange range = token_range(w, index);
  const int64_t length = w.params.seqlens[index];
  const int64_t count = w.counts != nullptr ? w.counts[index] : range.last - range.first;
  if (length < 0) return {0, 0, range.first};
  return {length, max(length, min(length + count, w.room)), range.first};
}

/// The token that becomes a request's k-th new key.
__device__ inline int token_of(const Write& w, const Request& r, int64_t k) {
  const int64_t at = r.first_token + k;
  return w.token_of != nullptr ? w.token_of[at] : static_cast<int>(at);
}

/// Where a request's key lies.
struct Location {
  int64_t page;  // -1: not in the pool
  int slot;
};

/// key: below w.room, which 31 bits hold.
__device__ inline Location locate_key(const Write& w, int request, int64_t key) {
  const plan::CacheView& cache = w.params.cache;
  const unsigned page_size = static_cast<unsigned>(cache.layout.page_size),
                 index = static_cast<unsigned>(key) / page_size;
  const int64_t id = w.params.block_table[request * w.params.block_table_stride + index];
  return {id >= 0 && id < cache.num_pages ? id : -1, static_cast<int>(static_cast<unsigned>(key) - index * page_size)};
}

}  // namespace fold::cuda::cache
