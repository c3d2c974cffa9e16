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

/// Buffers of one fit (docs/numerics.md, section 9). *Words* hold two adjacent keys as 16-bit halves, the earlier one
/// low; they are laid out in panels of kPanel channels: (channels / kPanel, kPairs, kPanel).
constexpr int kPanel = 64;
constexpr int kChunk = 2 * numerics::kTile;  ///< keys summed in 32 bits
constexpr int kPairs = kChunk / 2;
struct FitBuffers {
  uint32_t* centred;  // (kPairs, D) words of 64 u - usum
  uint32_t* right;    // (kPairs, 2 D) words of y, then of u
  int64_t* sums;      // (D, 2 D): B, then A on and below its diagonal
  double *a, *y, *c;  // (D, D)
  double *x, *v;      // (D, 16)
};

/// One fit as stored. p, u: (16, D); f: (16,)
struct FitOut {
  int8_t *p, *u;
  float* f;
};

struct CacheKernels {
  /// Converts, rotates and splits a row of `head_dim` elements; returns its scale.
  uint16_t (*write_row)(const void* data, DType dtype, int64_t offset, int head_dim, const RowOut& out);

  /// numerics::block_ubar and numerics::block_mean.
  void (*block_ubar)(const uint8_t* k_h, int head_dim, uint8_t* ubar);
  uint16_t (*block_mean)(const numerics::PlaneRow& v, const uint16_t* v_scale, int head_dim, int8_t* mean);

  /// Words of one block as half `half` (0, 1) of a chunk. k_h: (64, D/2); v: planes of its first key; v_scale: (64,),
  /// permuted; e_exponent: E_M = 2^e_exponent.
  void (*pack_block)(const uint8_t* k_h, const numerics::PlaneRow& v, const uint16_t* v_scale, int e_exponent,
                     int head_dim, int half, const FitBuffers& buffers);

  /// Adds a chunk's products to the sums.
  void (*add_chunk)(int head_dim, const FitBuffers& buffers);

  /// Steps 1 to 7, from the sums.
  void (*solve_fit)(int head_dim, int e_exponent, const FitBuffers& buffers, const FitOut& out);
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
