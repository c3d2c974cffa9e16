#pragma once

// 16-bit floating point, as far as the kernels use it.
using __half = _Float16;
inline __half __ushort_as_half(unsigned short x) { return __builtin_bit_cast(__half, x); }
inline float __half2float(__half x) { return static_cast<float>(x); }
struct __half2 {
  __half x, y;
};
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
