#pragma once
#include "plan/backend.h"

// What a decoding step brings to each request: found out by the kernel that writes the cache, and by the one that
// prepares the decode beside it.
namespace fold::cuda::cache {

/// What says so before the step. Read past L1: a kernel may ask before those before it have been waited for.
struct Bringing {
  const int32_t* seqlens;       // (B,) keys before the step
  const int32_t* q_lens;        // (B,) or null
  const int64_t* slot_mapping;  // (B T,) or null
  const int32_t* block_table;   // (B, max_pages)
  int64_t block_table_stride, max_pages;
  int tokens;  // T
};

inline Bringing bringing_of(const plan::StepParams& p) {
  return {.seqlens = p.write.seqlens,
          .q_lens = p.q_lens,
          .slot_mapping = p.write.slot_mapping,
          .block_table = p.write.block_table,
          .block_table_stride = p.write.block_table_stride,
          .max_pages = p.max_pages,
          .tokens = static_cast<int>(p.tokens)};
}

/// Tokens a request brings to the keys it holds.
struct Brought {
  int64_t before;
  int count;
};

/// By a whole warp. Numbers that make no sense bring nothing: q_lens are cut to 0..T, and a request of a negative
/// length, or whose keys would be too many for 32 bits, brings no token.
__device__ inline Brought tokens_brought(const Bringing& b, int request) {
  const int64_t before = __ldcg(b.seqlens + request);
  int count = b.tokens;
  if (b.q_lens != nullptr) count = min(max(__ldcg(b.q_lens + request), 0), count);
  if (b.slot_mapping != nullptr) {
    const int64_t* const slots = b.slot_mapping + int64_t{request} * b.tokens;
    int given = 0;
    for (int t = static_cast<int>(threadIdx.x) % 32; t < b.tokens; t += 32) {
      given += __ldcg(reinterpret_cast<const long long*>(slots + t)) >= 0;
    }
    count = min(count, __reduce_add_sync(0xFFFFFFFFu, given));
  }
  const bool padding = before == 0 && (b.max_pages == 0 || __ldcg(b.block_table + request * b.block_table_stride) < 0);
  if (padding || before < 0 || before + count > INT32_MAX) count = 0;
  return {max(before, int64_t{0}), count};
}

}  // namespace fold::cuda::cache
