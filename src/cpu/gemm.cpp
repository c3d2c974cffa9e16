#include "cpu/gemm.h"

#include "cpu/isa.h"

namespace fold::cpu {

const TileKernels& tile_kernels([[maybe_unused]] DType dtype) {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return dtype == DType::bf16 ? avx512_bf16_kernels() : avx512_kernels();
  if (isa() == Isa::avx2) return avx2_kernels();
#endif
  return portable_kernels();
}

void transpose_words(const Word* tile, int64_t rows, int64_t words, int64_t ld, Word* out) {
  constexpr int64_t kBlock = 16;  // a cache line of the tile is used whole
  for (int64_t w0 = 0; w0 < words; w0 += kBlock) {
    const int64_t w1 = w0 + kBlock < words ? w0 + kBlock : words;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t w = w0; w < w1; ++w) out[w * ld + r] = tile[r * words + w];
    }
  }
}

}  // namespace fold::cpu
