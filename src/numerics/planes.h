#pragma once
#include "numerics/ieee.h"

// Rotation and nested planes: docs/numerics.md, section 1.
namespace fold::numerics {

/// fp32(1/sqrt(D)) of the supported head dims.
FOLD_HD float rotation_scale(int head_dim) {
  return head_dim == 64 ? 0.125f : head_dim == 128 ? 0x1.6a09e6p-4f : 0.0625f;
}

/// Orthonormal Hadamard rotation in place; x: (head_dim,).
FOLD_HD void rotate(float* x, int head_dim) {
  for (int s = 1; s < head_dim; s *= 2) {
    for (int base = 0; base < head_dim; base += 2 * s) {
      for (int i = base; i < base + s; ++i) {
        const float a = x[i], b = x[i + s];
        x[i] = add(a, b);
        x[i + s] = sub(a, b);
      }
    }
  }
  const float scale = rotation_scale(head_dim);
  for (int i = 0; i < head_dim; ++i) x[i] = mul(x[i], scale);
}

/// What plane h alone stands for: the middle of the sixteen values that share a code, kHalfReading / 256 above 16 h.
constexpr int kHalfReading = 1920;

constexpr float kMinScale = 0x1p-100f;

/// The bf16 scale of a row whose largest magnitude is amax; NaN for a row that is not finite.
FOLD_HD uint16_t row_scale(float amax) {
  if (!is_finite(amax)) return kBf16Nan;
  const float e = div(amax, 127.0f);
  return to_bf16_up(e > kMinScale ? e : kMinScale);
}

FOLD_HD float clamp_int8(float v) {
  v = v > -128.0f ? v : -128.0f;
  return v < 127.0f ? v : 127.0f;
}

/// x ~ e (a + b / 256). x: (head_dim,) rotated; a, b: (head_dim,). Returns the bf16 scale e.
FOLD_HD uint16_t split_row(const float* x, int head_dim, int8_t* a, int8_t* b) {
  uint32_t amax = 0;  // magnitudes order like their bits, NaN above all
  for (int i = 0; i < head_dim; ++i) {
    const uint32_t u = bits_of(x[i]) & 0x7FFFFFFFu;
    amax = u > amax ? u : amax;
  }
  const uint16_t scale = row_scale(float_of(amax));
  if (scale == kBf16Nan) {
    for (int i = 0; i < head_dim; ++i) a[i] = b[i] = 0;
    return scale;
  }
  const float e = from_bf16(scale);
  for (int i = 0; i < head_dim; ++i) {
    const float va = clamp_int8(rne(div(x[i], e)));
    const float vb = clamp_int8(rne(div(mul(sub(x[i], mul(va, e)), 256.0f), e)));
    a[i] = static_cast<int8_t>(va);
    b[i] = static_cast<int8_t>(vb);
  }
  return scale;
}

// Nibble planes. Byte i of a row holds channel 2i in its high nibble and channel 2i + 1 in its low one.
FOLD_HD int code_h(int8_t a) { return (a >> 4) + 8; }  ///< 0..15; stands for 16 (code - 8) + 7.5
FOLD_HD int code_l(int8_t a) { return a & 15; }
FOLD_HD uint8_t pack_h(int8_t even, int8_t odd) { return static_cast<uint8_t>(code_h(even) << 4 | code_h(odd)); }
FOLD_HD uint8_t pack_l(int8_t even, int8_t odd) { return static_cast<uint8_t>(code_l(even) << 4 | code_l(odd)); }
FOLD_HD int nibble(uint8_t byte, int channel) { return channel % 2 == 0 ? byte >> 4 : byte & 15; }

/// Where the scale of a key stands, relative to the start of its 64-key tile's scales.
FOLD_HD constexpr int scale_slot(int key_in_tile) { return 8 * (key_in_tile % 8) + key_in_tile / 8; }

/// One row of the stored planes; l and b are null where the cache does not keep them.
struct PlaneRow {
  const uint8_t* h;  // (head_dim / 2,)
  const uint8_t* l;  // (head_dim / 2,) or null
  const int8_t* b;   // (head_dim,) or null
};

/// The reading of a channel in units of e/256, using the planes given: R_h, R_l or R_b.
FOLD_HD int reading(const PlaneRow& row, int channel) {
  const int h = nibble(row.h[channel / 2], channel) - 8;
  if (row.l == nullptr) return 4096 * h + kHalfReading;
  const int a = 16 * h + nibble(row.l[channel / 2], channel);
  return 256 * a + (row.b == nullptr ? 0 : row.b[channel]);
}

/// The exponent k of the smallest power of two 2^k not below a positive bf16.
FOLD_HD int pow2_ceil_exponent(uint16_t b) { return (b >> 7) - 127 + ((b & 0x7F) != 0 ? 1 : 0); }

}  // namespace fold::numerics
