#include "cpu/gemm_tiles.h"

namespace fold::cpu {
namespace {

/// Four floats in the compiler's own vector type: SSE2, NEON or plain scalar code, whatever the target has.
struct Portable {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  static constexpr int kLanes = 4, kRows = 4, kVectors = 2;

  static F load(const float* p) {
    F x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  static void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
  static F set1(float x) { return F{x, x, x, x}; }
  static F set1_word(const Word* p) { return set1(numerics::float_of(*p)); }
  static F mul(F a, F b) { return a * b; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) { return a > b ? a : b; }
  static float sum(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  static float max_lane(F x) {
    const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
  }
  static float first_lane(F x) { return x[0]; }

  // Adding 1.5 * 2^23 leaves the integer part, rounded to nearest even, in the low bits; |x| < 2^22.
  static F round(F x) { return (x + 0x1.8p23f) - 0x1.8p23f; }
  static F times_pow2(F p, F n) {
    const I bits = (__builtin_convertvector(n, I) + 127) << 23;
    return p * reinterpret_cast<F>(bits);
  }
  static F keep(F x, float other, int32_t column, int32_t first, int32_t last) {
    const I lane = I{0, 1, 2, 3} + column;
    return (lane >= first) & (lane < last) ? x : set1(other);
  }

  static void add_rounded(int32_t* at, F x) {
    for (int i = 0; i < kLanes; ++i) at[i] += static_cast<int32_t>(numerics::rne(x[i]));
  }

  static F load_bf16(const uint16_t* p) {
    return F{numerics::from_bf16(p[0]), numerics::from_bf16(p[1]), numerics::from_bf16(p[2]),
             numerics::from_bf16(p[3])};
  }
  static F load_f16(const uint16_t* p) {
    return F{numerics::from_f16(p[0]), numerics::from_f16(p[1]), numerics::from_f16(p[2]), numerics::from_f16(p[3])};
  }
  static void store_bf16(uint16_t* p, F x) {
    for (int i = 0; i < kLanes; ++i) p[i] = numerics::to_bf16(x[i]);
  }
  static void store_f16(uint16_t* p, F x) {
    for (int i = 0; i < kLanes; ++i) p[i] = numerics::to_f16(x[i]);
  }
};

}  // namespace

const TileKernels& portable_kernels() {
  static constexpr TileKernels table = Tiles<Portable, FloatWords<Portable>>::kernels();
  return table;
}

}  // namespace fold::cpu
