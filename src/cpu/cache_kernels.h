#pragma once
#include "cpu/isa.h"
#include "fold/tensor.h"
#include "numerics/planes.h"

// What an instruction set implements of cache writes. Every set computes the same bits.
namespace fold::cpu {

/// The planes of one row; l and b are null where the cache does not keep them.
struct RowOut {
  uint8_t* h;  // (head_dim / 2,)
  uint8_t* l;  // (head_dim / 2,)
  int8_t* b;   // (head_dim,)
};

struct CacheKernels {
  /// Converts, rotates and splits a row of `head_dim` elements; returns its scale.
  uint16_t (*write_row)(const void* data, DType dtype, int64_t offset, int head_dim, const RowOut& out);

  /// numerics::block_ubar and numerics::block_mean.
  void (*block_ubar)(const uint8_t* k_h, int head_dim, uint8_t* ubar);
  uint16_t (*block_mean)(const numerics::PlaneRow& v, const uint16_t* v_scale, int head_dim, int8_t* mean);
};

CacheKernels cache_kernels_portable();
#if defined(__x86_64__)
CacheKernels cache_kernels_avx2();
CacheKernels cache_kernels_avx512();
#endif

/// The kernels of the set in use (isa.h).
inline CacheKernels cache_kernels() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return cache_kernels_avx512();
  if (isa() == Isa::avx2) return cache_kernels_avx2();
#endif
  return cache_kernels_portable();
}

}  // namespace fold::cpu
