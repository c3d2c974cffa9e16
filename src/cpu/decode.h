#pragma once
#include "plan/decode_params.h"

namespace fold::cpu {

/// One decode step, or (params.numerator set) the partial sums of one. Arguments are checked by the caller.
void decode(const plan::DecodeParams& params);

/// Partial sums to outputs. B requests, T tokens, H heads, D head dim.
struct FinishParams {
  const int64_t* numerator;    // (B, T, H, D)
  const int64_t* denominator;  // (B, T, H, 3), as in DecodeParams
  const float* grid;           // (B, T, H, 3)
  const float* sinks;          // (H,) or null
  int64_t batch, tokens, heads, head_dim;
  void* out;  // (B, T, H, D)
  DType out_dtype;
  int64_t out_stride_b, out_stride_t, out_stride_h;
  float* lse;      // (B, H, T) or null
  uint8_t* valid;  // (B, T, H) or null
};
void finish(const FinishParams& params);

}  // namespace fold::cpu
