#pragma once
#include <cstddef>
#include <cstdint>

#include "fold/tensor.h"

// Kernels on tiles of attention, one table per instruction set and element format.
//
// A *word* is 32 bits holding `pack` consecutive elements of the dimension that a product contracts over: one fp32, or
// two bf16 (low half first). The same register-blocked product serves both: a word of the left operand is broadcast
// against a vector of words, each of its own column, of the right operand.
//
// Tiles of an (S, D) matrix X, Dp = D padded to 16 with zeros:
//   rows    (S, Dp / pack)   words of adjacent channels: left operand where channels are contracted
//   columns (Dp / pack, S)   the transpose of rows: right operand where channels are contracted
//   pairs   (S / pack, Dp)   words of adjacent rows: right operand where rows are contracted
namespace fold::cpu {

using Word = uint32_t;

/// c (rows, cols) = or += a (rows, words) * b (words, cols). `cols` is a multiple of 16. Rows are computed in blocks
/// that divide kRowBlock: the buffers behind a and c hold a multiple of it.
struct GemmArgs {
  const Word* a;
  ptrdiff_t a_row, a_word;  // strides
  const Word* b;
  ptrdiff_t b_word;  // stride; columns are contiguous
  float* c;
  ptrdiff_t c_row;
  int64_t rows, cols, words;
  bool accumulate;
};
constexpr int64_t kRowBlock = 12;  ///< a multiple of the rows of every register block

/// One step of the online softmax. `scores` holds raw dot products.
struct SoftmaxArgs {
  const float* scores;  // (rows, ld)
  int64_t ld, rows, cols;
  const int32_t *first, *last;  // (rows,) visible columns [first, last)
  float scale;                  // softmax_scale * log2(e)
  float *max, *sum;             // (rows,) running, base-2 logits
  float* out;                   // (rows, out_ld), rescaled when a maximum grows
  int64_t out_ld;
  Word* weights;  // (rows, weights_ld) words of adjacent keys
  int64_t weights_ld;
};

/// P = 2^(scale * S - lse2 - lse2_low) and dS = P (dP - delta), zero where a row does not see the key.
struct GradientArgs {
  const float *scores, *dp;  // (rows, ld)
  int64_t ld, rows, cols;    // rows: a multiple of pack
  const int32_t *first, *last;
  float scale;
  const float *lse2, *lse2_low, *delta;  // (rows,)
  Word *p_pairs, *ds_pairs;              // (rows / pack, ld) words of adjacent rows
  Word* ds_rows;  // (rows, ld / pack) words of adjacent keys; for pack 1 the same buffer as ds_pairs
};

/// grid (rows, grid_ld) += rne(x * multiplier[row]).
struct GridAddArgs {
  const float* x;  // (rows, ld)
  int64_t ld, rows, cols;
  const float* multiplier;
  int32_t* grid;
  int64_t grid_ld;
};

struct TileKernels {
  int pack;
  /// rows tile (padded_rows, Dp / pack) of strided source rows; what is not finite, and the padding, becomes zero.
  void (*load_rows)(const void* src, DType dtype, int64_t stride, int64_t rows, int64_t padded_rows, int64_t head_dim,
                    Word* tile);
  /// pairs tile (rows / pack, Dp) of a rows tile; `rows` is a multiple of pack.
  void (*pairs)(const Word* tile, int64_t rows, int64_t padded_dim, Word* out);
  void (*gemm)(const GemmArgs&);
  void (*softmax)(const SoftmaxArgs&);
  void (*gradient)(const GradientArgs&);
  void (*add_to_grid)(const GridAddArgs&);
  /// One row to fp32; dst holds D padded to 16, padding zero.
  void (*to_float)(const void* src, DType dtype, int64_t head_dim, float* dst);
  /// Euclidean norm of a to_float row; +inf where an element is not finite.
  float (*norm)(const float* row, int64_t padded_dim);
  float (*dot)(const float* a, const float* b, int64_t padded_dim);
  /// row[i] * factor rounded to dtype.
  void (*store)(const float* row, float factor, int64_t head_dim, DType dtype, void* dst);
};

/// The kernels for inputs of this type on the current instruction set: bf16 words where the processor multiplies
/// them, fp32 words otherwise.
const TileKernels& tile_kernels(DType dtype);

const TileKernels& portable_kernels();
#if defined(__x86_64__)
const TileKernels& avx2_kernels();
const TileKernels& avx512_kernels();
const TileKernels& avx512_bf16_kernels();
#endif

/// columns tile (padded_dim / pack words, ld) of a rows tile.
void transpose_words(const Word* tile, int64_t rows, int64_t words, int64_t ld, Word* out);

}  // namespace fold::cpu
