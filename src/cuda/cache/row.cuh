#pragma once
#include <cuda_fp16.h>

#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/rounding.cuh"
#include "fold/tensor.h"
#include "numerics/planes.h"
#include "numerics/quotient.h"

// A K or V row spread over a few lanes of a warp (docs/numerics.md, section 1). A lane holds runs of 16 consecutive
// channels, so that the first stages of the rotation stay within a lane, and the last one too.
namespace fold::cuda::cache {

template <int D>
struct RowShape {
  static constexpr int kRun = 16, kRuns = 2;
  static constexpr int kLanes = D / (kRun * kRuns);  ///< lanes that share a row
  static constexpr int kStep = kRun * kLanes;        ///< channels between a lane's runs
};

template <int D>
using RowPart = float[RowShape<D>::kRuns][16];

__device__ inline bool is_aligned(const void* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

/// Whether every row's parts can be fetched ahead: 16-bit elements, and 16 bytes at once.
__device__ inline bool can_fetch(const void* data, DType dtype, int64_t stride_t, int64_t stride_h) {
  return dtype != DType::f32 && is_aligned(data, 16) && stride_t % 8 == 0 && stride_h % 8 == 0;
}

/// Shared memory for the rows in flight: 8 elements of each of kThreads threads, four times over.
template <int kThreads>
using Fetched = uint4[4][kThreads];

/// Starts to copy a lane's part of a row. at: element of the row's first channel. lane: within the row.
template <int D, int kThreads>
__device__ void fetch_part(const void* data, int64_t at, int lane, Fetched<kThreads>& fetched) {
  using Shape = RowShape<D>;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t element = at + i / 2 * Shape::kStep + lane * Shape::kRun + i % 2 * 8;
    ptx::copy_16(ptx::shared_address(&fetched[i][threadIdx.x]), static_cast<const uint16_t*>(data) + element);
  }
}

/// bf16 or f16, as its bits, to fp32.
template <bool kBf16>
__device__ float from_half(uint32_t bits) {
  const uint16_t half = static_cast<uint16_t>(bits);
  return kBf16 ? numerics::from_bf16(half) : __half2float(__ushort_as_half(half));
}

/// The part that this thread fetched.
template <int D, bool kBf16, int kThreads>
__device__ void convert_fetched(const Fetched<kThreads>& fetched, RowPart<D>& x) {
  ptx::wait_copies();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 v = fetched[i][threadIdx.x];
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      x[i / 2][i % 2 * 8 + 2 * n] = from_half<kBf16>(words[n]);
      x[i / 2][i % 2 * 8 + 2 * n + 1] = from_half<kBf16>(words[n] >> 16);
    }
  }
}

/// A part of a row of any type at any address.
template <int D, typename Convert, typename T>
__device__ void load_part(const T* row, int lane, const Convert& convert, RowPart<D>& x) {
  using Shape = RowShape<D>;
#pragma unroll
  for (int run = 0; run < Shape::kRuns; ++run) {
#pragma unroll
    for (int i = 0; i < Shape::kRun; ++i) {
      x[run][i] = convert(__ldcs(row + run * Shape::kStep + lane * Shape::kRun + i));
    }
  }
}

/// Keeps what follows in its branch: the compiler would rather compute it always and select.
__device__ inline void rarely() { asm volatile(""); }

/// numerics::rotate of the rows of a warp. lane: within the row.
template <int D>
__device__ void rotate_row(RowPart<D>& x, int lane) {
  using Shape = RowShape<D>;
#pragma unroll
  for (int run = 0; run < Shape::kRuns; ++run) {
#pragma unroll
    for (int s = 1; s < Shape::kRun; s *= 2) {
#pragma unroll
      for (int i = 0; i < Shape::kRun; ++i) {
        if ((i & s) != 0) continue;
        const float a = x[run][i], b = x[run][i + s];
        x[run][i] = numerics::add(a, b);
        x[run][i + s] = numerics::sub(a, b);
      }
    }
  }
#pragma unroll
  for (int s = 1; s < Shape::kLanes; s *= 2) {
    const float sign = (lane & s) != 0 ? -1.0f : 1.0f;  // the upper lane subtracts itself from the lower one
#pragma unroll
    for (int run = 0; run < Shape::kRuns; ++run) {
#pragma unroll
      for (int i = 0; i < Shape::kRun; ++i) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, x[run][i], s);
        x[run][i] = numerics::fma(x[run][i], sign, other);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Shape::kRun; ++i) {
    const float a = x[0][i], b = x[1][i];
    x[0][i] = numerics::add(a, b);
    x[1][i] = numerics::sub(a, b);
  }
#pragma unroll
  for (int run = 0; run < Shape::kRuns; ++run) {
#pragma unroll
    for (int i = 0; i < Shape::kRun; ++i) x[run][i] = numerics::mul(x[run][i], numerics::rotation_scale(D));
  }
}

/// The scale of each of a warp's rows, which Lanes lanes share. A row that is not finite becomes zeros.
template <int Lanes, int Runs, int N>
__device__ uint16_t scale_row(float (&x)[Runs][N]) {
  float largest = 0.0f;
#pragma unroll
  for (int run = 0; run < Runs; ++run) {
#pragma unroll
    for (int i = 0; i < N; ++i) largest = ptx::max_magnitude(largest, x[run][i]);
  }
#pragma unroll
  for (int s = 1; s < Lanes; s *= 2) {
    largest = ptx::max_magnitude(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, s));
  }
  const uint16_t scale = numerics::row_scale(largest);
  if (scale == numerics::kBf16Nan) {
    rarely();
#pragma unroll
    for (int run = 0; run < Runs; ++run) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[run][i] = 0.0f;
    }
  }
  return scale;
}

// Adding these leaves a + 128 and b in the low byte.
constexpr float kRoundA = kRoundMagicFloat + 128, kRoundB = kRoundMagicFloat;

/// A row's scale as split_run wants it.
struct Divisor {
  float e, inverse;
  float e_256, inverse_256;  // of b's unit, e / 256
};

/// A row that is not finite has become zeros: any finite scale gives it its bytes.
__device__ inline Divisor divisor_of(uint16_t scale) {
  const float e = scale == numerics::kBf16Nan ? 1.0f : numerics::from_bf16(scale), inverse = __frcp_rn(e);
  return {e, inverse, numerics::mul(e, 0x1p-8f), numerics::mul(inverse, 256.0f)};
}

/// The bytes a and b of four channels: kRoundA + a takes the place of x, kRoundB + b that of b.
__device__ inline void split_four(float* x, const Divisor& by, float (&b)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = numerics::add(numerics::quotient(x[i], by.e, by.inverse), kRoundA);  // |x / e| <= 127.5
    b[i] = numerics::fma(-numerics::sub(a, kRoundA), by.e, x[i]);                        // exact, about e / 2 at most
    x[i] = a;
  }
  if (by.e >= numerics::kLargeRemainder) {
    rarely();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (fabsf(b[i]) >= numerics::kLargeRemainder) b[i] = copysignf(0.5f * by.e, b[i]);  // quotient 128 or -128
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float q = numerics::quotient(b[i], by.e_256, by.inverse_256);  // -128 at least, up to rounding
    b[i] = numerics::add(fminf(q, 127.0f), kRoundB);
  }
}

/// The low bytes of four floats.
__device__ inline uint32_t low_bytes(const float* x) {
  const uint32_t low = __byte_perm(__float_as_uint(x[0]), __float_as_uint(x[1]), 0x0040);
  const uint32_t high = __byte_perm(__float_as_uint(x[2]), __float_as_uint(x[3]), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

/// numerics::pack_h and pack_l of eight channels. a: bytes a + 128 of four each; their high nibble is the code h + 8.
__device__ inline uint32_t pack_h(uint32_t a0, uint32_t a1) {
  const auto pack = [](uint32_t w) { return (w & 0x00F000F0u) | (w >> 12 & 0x000F000Fu); };  // bytes 0 and 2
  return __byte_perm(pack(a0), pack(a1), 0x6420);
}
__device__ inline uint32_t pack_l(uint32_t a0, uint32_t a1) {
  const auto pack = [](uint32_t w) { return (w << 4 & 0x00F000F0u) | (w >> 8 & 0x000F000Fu); };
  return __byte_perm(pack(a0), pack(a1), 0x6420);
}

/// The finest readings of four split channels. a: kRoundA + a; b: kRoundB + b.
__device__ inline float4 finest_readings(const float* a, const float (&b)[4], bool has_l, bool has_b) {
  float r[4];
  if (has_b) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      r[i] = numerics::fma(numerics::sub(a[i], kRoundA), 256.0f, numerics::sub(b[i], kRoundB));
  } else if (has_l) {
    rarely();
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = numerics::mul(numerics::sub(a[i], kRoundA), 256.0f);
  } else {
    rarely();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint8_t code = numerics::pack_h(static_cast<int8_t>(numerics::sub(a[i], kRoundA)), 0);
      r[i] = static_cast<float>(numerics::reading({&code, nullptr, nullptr}, 0));
    }
  }
  return make_float4(r[0], r[1], r[2], r[3]);
}

/// to[i] = words[i]; `to` stands at a multiple of their size.
__device__ inline void store_words(void* to, const uint32_t (&words)[2]) {
  *static_cast<uint2*>(to) = make_uint2(words[0], words[1]);
}
__device__ inline void store_words(void* to, const uint32_t (&words)[4]) {
  *static_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace fold::cuda::cache
