#pragma once
#include "cuda/cache/row.cuh"

// A K or V row spread over as many lanes of a warp as it has words of four channels, at most all: where rows are few,
// none of them takes long.
namespace fold::cuda::cache {

template <int D>
struct WideRow {
  static constexpr int kLanes = D / 4 < 32 ? D / 4 : 32;  ///< that share a row
  static constexpr int kStep = 4 * kLanes;                ///< channels between a lane's words
  static constexpr int kWords = D / kStep;                ///< of a lane
  float x[kWords][4];
};

/// Four channels of a row of any type at any address. All are read before one is converted.
__device__ inline void load_four(const void* data, DType dtype, int64_t element, float (&x)[4]) {
  uint32_t bits[4];
  if (dtype == DType::f32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = __ldcs(static_cast<const uint32_t*>(data) + element + i);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = __ldcs(static_cast<const uint16_t*>(data) + element + i);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = dtype == DType::f32    ? numerics::float_of(bits[i])
           : dtype == DType::bf16 ? from_half<true>(bits[i])
                                  : from_half<false>(bits[i]);
  }
}

/// numerics::rotate of the rows of a warp. lane: within the row.
template <int D>
__device__ void rotate_row(WideRow<D>& row, int lane) {
  using Row = WideRow<D>;
  const auto butterfly = [](float& low, float& high) {
    const float a = low, b = high;
    low = numerics::add(a, b);
    high = numerics::sub(a, b);
  };
#pragma unroll
  for (int word = 0; word < Row::kWords; ++word) {
    float(&x)[4] = row.x[word];
    butterfly(x[0], x[1]);
    butterfly(x[2], x[3]);
    butterfly(x[0], x[2]);
    butterfly(x[1], x[3]);
#pragma unroll
    for (int s = 1; s < Row::kLanes; s *= 2) {
      const float sign = (lane & s) != 0 ? -1.0f : 1.0f;  // the upper lane subtracts itself from the lower one
#pragma unroll
      for (float& value : x) value = numerics::fma(value, sign, __shfl_xor_sync(0xFFFFFFFFu, value, s));
    }
  }
  if constexpr (Row::kWords == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) butterfly(row.x[0][i], row.x[1][i]);
  }
#pragma unroll
  for (auto& word : row.x) {
#pragma unroll
    for (float& value : word) value = numerics::mul(value, numerics::rotation_scale(D));
  }
}

/// K's or V's planes and scales of a 64-key tile.
struct SidePlanes {
  uint8_t *h, *l;   // (64, D/2); l may be null
  int8_t* b;        // (64, D) or null
  uint16_t* scale;  // (64,), permuted
};

/// Splits a rotated row and stores it as row `at` of a tile.
template <int D>
__device__ void store_row(WideRow<D>& row, uint16_t scale, const SidePlanes& to, int at, int lane) {
  const Divisor divisor = divisor_of(scale);
  if (lane == 0) to.scale[numerics::scale_slot(at)] = scale;
#pragma unroll
  for (int word = 0; word < WideRow<D>::kWords; ++word) {
    const int element = at * D + word * WideRow<D>::kStep + 4 * lane;
    float b_four[4];
    split_four(row.x[word], divisor, b_four);
    const uint32_t a = low_bytes(row.x[word]);
    *reinterpret_cast<uint16_t*>(to.h + element / 2) = static_cast<uint16_t>(pack_h(a, a));
    if (to.l != nullptr) *reinterpret_cast<uint16_t*>(to.l + element / 2) = static_cast<uint16_t>(pack_l(a, a));
    if (to.b != nullptr) *reinterpret_cast<uint32_t*>(to.b + element) = low_bytes(b_four);
  }
}

/// The finest readings of four channels of a stored row, from channel `first` on.
template <int D>
__device__ float4 stored_readings(const SidePlanes& from, int at, int first) {
  const int element = at * D + first;
  const uint32_t h = *reinterpret_cast<const uint16_t*>(from.h + element / 2);
  const uint32_t l = from.l == nullptr ? 0 : *reinterpret_cast<const uint16_t*>(from.l + element / 2);
  const uint32_t b = from.b == nullptr ? 0 : *reinterpret_cast<const uint32_t*>(from.b + element);
  const uint8_t h_bytes[2] = {static_cast<uint8_t>(h), static_cast<uint8_t>(h >> 8)};
  const uint8_t l_bytes[2] = {static_cast<uint8_t>(l), static_cast<uint8_t>(l >> 8)};
  const int8_t b_bytes[4] = {static_cast<int8_t>(b), static_cast<int8_t>(b >> 8), static_cast<int8_t>(b >> 16),
                             static_cast<int8_t>(b >> 24)};
  float reading[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    reading[i] = static_cast<float>(from.b != nullptr   ? numerics::reading({h_bytes, l_bytes, b_bytes}, i)
                                    : from.l != nullptr ? numerics::reading({h_bytes, l_bytes, nullptr}, i)
                                                        : numerics::reading({h_bytes, nullptr, nullptr}, i));
  }
  return make_float4(reading[0], reading[1], reading[2], reading[3]);
}

}  // namespace fold::cuda::cache
