#pragma once
#include <cstdint>
#include <optional>

#include "fold/tensor.h"

// Attention over whole sequences, forward and backward.
//
// B sequences, Sq query rows and Sk keys of a sequence, Tq and Tk rows of all sequences packed together, H query heads,
// HK KV heads (H a multiple of HK; query head h reads KV head h / (H / HK)), D head dim, 1 to 256.
//
// The bits of a sequence's results depend on its own shape and data alone: not on the rest of the batch, whether it is
// packed or padded, the number of threads, or the run. What a query row sees is all that its results depend on: masked
// keys and rows behind the last sequence may hold anything, NaN included. docs/training.md has the numerics.
namespace fold {

struct AttentionOptions {
  std::optional<double> softmax_scale;  ///< 1 / sqrt(D) by default
  bool causal = false;                  ///< row i sees keys up to i + Sk - Sq (bottom-right aligned)
  int64_t window_left = -1;             ///< keys seen before i + Sk - Sq, besides it; -1: all
  int64_t window_right = -1;            ///< keys seen after i + Sk - Sq; -1: all
  TensorView sinks;                     ///< (H,) fp32, natural log: one more logit per head, in the denominator only
  TensorView cu_seqlens_q;              ///< (B + 1,) int32: packed sequences, row ranges of q; both or neither
  TensorView cu_seqlens_k;              ///< (B + 1,) int32: row ranges of k and v
};

/// out = softmax(softmax_scale * q k^T) v over the visible keys.
///
/// Dense: q (B, Sq, H, D), k and v (B, Sk, HK, D), out as q, lse (B, H, Sq).
/// Packed (cu_seqlens given): q (Tq, H, D), k and v (Tk, HK, D), out as q, lse (H, Tq).
/// q, k, v and out share one dtype: bf16, fp16 or fp32. lse is fp32, the natural logarithm of the softmax's denominator
/// (sink included); leave the view undefined if it is not wanted.
///
/// A row that sees no key, and a row behind the last packed sequence, has out 0 and lse -inf. A NaN in a visible key
/// gives NaN in the rows that see it. The last dimension of every tensor is contiguous; all other strides are free, 0
/// included for inputs.
///
/// Throws fold::Error (what, got, allowed) before anything is written.
FOLD_API void attention_forward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                                const TensorView& lse, const AttentionOptions& options = {});

/// Tensors of the backward: shapes and dtypes of the forward.
struct AttentionBackwardTensors {
  TensorView q, k, v;
  TensorView out, lse;    ///< what attention_forward wrote
  TensorView dout;        ///< as out
  TensorView dq, dk, dv;  ///< written; as q, k, v, all of that dtype or all fp32
  TensorView dsinks;      ///< written; (H,) fp32, summed over all sequences; may be undefined
};

/// Gradients of attention_forward under the same options. A row that sees no key contributes nothing; a key that no row
/// sees has gradient 0. Workspace: O(rows * H * D), never rows * keys.
///
/// Throws fold::Error (what, got, allowed) before anything is written.
FOLD_API void attention_backward(const AttentionBackwardTensors& tensors, const AttentionOptions& options = {});

}  // namespace fold
