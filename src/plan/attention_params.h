#pragma once
#include <cstdint>
#include <limits>

#include "fold/tensor.h"

// The contract between the API (which checks), the plan and every backend for attention over whole sequences.
// B sequences, S rows of a sequence, T rows of all sequences (dense: T = B * S), H query heads, HK KV heads, D head
// dim. Strides count elements. A dense batch is addressed (sequence, row, head); packed sequences leave stride_b unused
// and count rows from cu_seqlens.
namespace fold::plan {

/// A GPU takes fewer query rows, and fewer keys: their numbers are 32-bit there.
constexpr int64_t kMostDeviceRows = int64_t{1} << 30;

constexpr int64_t kUnlimitedWindow = std::numeric_limits<int64_t>::max() / 4;

/// Rows of one tensor; channels are contiguous.
struct RowsView {
  void* data;
  int64_t stride_b, stride_row, stride_head;
};

struct ForwardParams {
  RowsView q;                   // (B, Sq, H, D) or (Tq, H, D)
  RowsView k;                   // (B, Sk, HK, D) or (Tk, HK, D)
  RowsView v;                   // as k
  RowsView out;                 // as q
  RowsView lse;                 // fp32 (B, H, Sq) or (H, Tq), natural log; data null: not wanted
  const float* sinks;           // (H,), natural log, or null
  const int32_t* cu_seqlens_q;  // (B + 1,), or null: dense
  const int32_t* cu_seqlens_k;  // (B + 1,), or null: dense
  DType dtype;                  // of q, k, v and out
  int64_t batch, heads, kv_heads, head_dim;
  int64_t seqlen_q, seqlen_k;         // dense: rows of a sequence
  int64_t total_q, total_k;           // rows of all sequences, including any behind the last packed one
  int64_t window_left, window_right;  // keys seen beside i + Sk - Sq, inclusive; causal: window_right = 0
  float softmax_scale;
};

struct BackwardParams {
  ForwardParams forward;  // out and lse are read
  RowsView dout;          // as q, of forward.dtype
  RowsView dq;            // as q, of grad_dtype
  RowsView dk, dv;        // as k, of grad_dtype
  float* dsinks;          // (H,), or null
  DType grad_dtype;
};

}  // namespace fold::plan
