#pragma once
#include "cpu/decode_group.h"
#include "cpu/isa.h"

// What an instruction set implements of decode. Every set computes the same bits.
namespace fold::cpu {

/// Sums of one range of tiles, merged into the group by the caller.
struct RangeSums {
  std::vector<int64_t> num;  // (G, D)
  int64_t den[kMaxRows], mass[kMaxRows], dropped[kMaxRows];
  float peak[kMaxRows];
  int64_t values_read, bytes;
};

struct DecodeKernels {
  /// numerics::rotate, then numerics::split_row. x: (head_dim,), rotated in place; a, b: (head_dim,)
  uint16_t (*split_row)(float* x, int head_dim, int8_t* a, int8_t* b);

  /// Adds tiles [tile_begin, tile_end) of a group whose z is set (docs/numerics.md, sections 6 and 7).
  void (*sum_range)(const Group& group, int64_t tile_begin, int64_t tile_end, RangeSums& sums);

  /// Logits of `count` (<= 64) visible keys at the sampled reference's level (docs/numerics.md, section 5). keys:
  /// (count,) physical; logits: (G, 64).
  void (*score_keys)(const Group& group, const int64_t* keys, int count, float* logits);

  /// fix(logits[i] - largest). out: (count,)
  void (*weigh_logits)(const float* logits, int64_t count, float largest, uint32_t* out);
};

DecodeKernels decode_kernels_portable();
#if defined(__x86_64__)
DecodeKernels decode_kernels_avx2();
DecodeKernels decode_kernels_avx512();
#endif

/// The kernels of the set in use (isa.h).
inline DecodeKernels decode_kernels() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return decode_kernels_avx512();
  if (isa() == Isa::avx2) return decode_kernels_avx2();
#endif
  return decode_kernels_portable();
}

}  // namespace fold::cpu
