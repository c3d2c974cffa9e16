#pragma once
#include "fold/tensor.h"
#include "numerics/ieee.h"

// Rows of f32, bf16 or f16 elements to fp32 and back.
namespace fold::cpu {

/// out[i] = fp32(data[offset + i]), i < count. data: elements of `dtype`.
static inline void load_row(const void* data, DType dtype, int64_t offset, int64_t count, float* out) {
  switch (dtype) {
    case DType::bf16: {
      const uint16_t* in = static_cast<const uint16_t*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = numerics::from_bf16(in[i]);
      return;
    }
    case DType::f16: {
      const uint16_t* in = static_cast<const uint16_t*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = numerics::from_f16(in[i]);
      return;
    }
    default: {
      const float* in = static_cast<const float*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = in[i];
    }
  }
}

/// data[offset + i] = in[i] rounded to `dtype`, i < count.
static inline void store_row(const float* in, int64_t count, void* data, DType dtype, int64_t offset) {
  switch (dtype) {
    case DType::bf16: {
      uint16_t* out = static_cast<uint16_t*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = numerics::to_bf16(in[i]);
      return;
    }
    case DType::f16: {
      uint16_t* out = static_cast<uint16_t*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = numerics::to_f16(in[i]);
      return;
    }
    default: {
      float* out = static_cast<float*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = in[i];
    }
  }
}

}  // namespace fold::cpu
