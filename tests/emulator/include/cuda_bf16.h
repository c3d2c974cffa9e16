#pragma once
#include <bit>
#include <cstdint>

struct __nv_bfloat16 {
  uint16_t bits;
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};
