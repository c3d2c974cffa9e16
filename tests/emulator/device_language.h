#pragma once
#include "emulator.h"

// CUDA C++ as far as the kernels use it, for a host compiler. Included before anything else.

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define EMU_NOINLINE __attribute__((noinline))
#define __forceinline__ inline __attribute__((always_inline))

struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) longlong2 {
  long long x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emu {

inline float max_f32(float a, float b) {
  if (a != a) return b != b ? __builtin_bit_cast(float, 0x7FFFFFFF) : b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
inline float min_f32(float a, float b) {
  if (a != a) return b != b ? __builtin_bit_cast(float, 0x7FFFFFFF) : b;
  if (b != b) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
inline float device_nan(float x) { return x != x ? __builtin_bit_cast(float, 0x7FFFFFFF) : x; }

}  // namespace emu

#define threadIdx (emu::current->thread)
#define blockIdx (emu::current->block)
#define blockDim (emu::current->block_dim)
#define gridDim (emu::current->grid_dim)
using std::isfinite;
using std::isnan;
#define fmaxf(a, b) emu::max_f32(a, b)
#define fminf(a, b) emu::min_f32(a, b)

// Collectives.
inline unsigned emu_lane() { return threadIdx.x % 32; }
template <typename T>
T __shfl_sync(unsigned mask, T v, int lane, EMU_WHERE) {
  return emu::result<T>(emu::collective("shfl", mask, emu::deposit(v, lane & 31), emu::combine_shuffle, where));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T v, int bits, EMU_WHERE) {
  return emu::result<T>(emu::collective("shfl_xor", mask, emu::deposit(v, static_cast<int>(emu_lane()) ^ bits),
                                        emu::combine_shuffle, where));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T v, int by, EMU_WHERE) {
  const int lane = static_cast<int>(emu_lane());
  return emu::result<T>(
      emu::collective("shfl_up", mask, emu::deposit(v, lane >= by ? lane - by : lane), emu::combine_shuffle, where));
}
template <typename T>
T __shfl_down_sync(unsigned mask, T v, int by, EMU_WHERE) {
  const int lane = static_cast<int>(emu_lane());
  return emu::result<T>(emu::collective("shfl_down", mask, emu::deposit(v, lane + by < 32 ? lane + by : lane),
                                        emu::combine_shuffle, where));
}
/// Within sections of `width` lanes.
template <typename T>
T __shfl_sync(unsigned mask, T v, int lane, int width, EMU_WHERE) {
  const int section = static_cast<int>(emu_lane()) & ~(width - 1);
  return emu::result<T>(
      emu::collective("shfl", mask, emu::deposit(v, section | (lane & (width - 1))), emu::combine_shuffle, where));
}
inline unsigned __ballot_sync(unsigned mask, bool v, EMU_WHERE) {
  return emu::result<unsigned>(emu::collective("ballot", mask, emu::deposit(unsigned{v}), emu::combine_ballot, where));
}
inline bool __any_sync(unsigned mask, bool v, EMU_WHERE) { return __ballot_sync(mask, v, where) != 0; }
inline bool __all_sync(unsigned mask, bool v, EMU_WHERE) { return __ballot_sync(mask, v, where) == 0xFFFFFFFFu; }
inline unsigned __reduce_max_sync(unsigned mask, unsigned v, EMU_WHERE) {
  return emu::result<unsigned>(emu::collective("redux.max", mask, emu::deposit(v), emu::combine_max_u, where));
}
inline int __reduce_max_sync(unsigned mask, int v, EMU_WHERE) {
  return emu::result<int>(emu::collective("redux.max", mask, emu::deposit(v), emu::combine_max_s, where));
}
template <typename T>
T __reduce_add_sync(unsigned mask, T v, EMU_WHERE) {
  static_assert(sizeof(T) == 4);
  return emu::result<T>(emu::collective("redux.add", mask, emu::deposit(v), emu::combine_add, where));
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, EMU_WHERE) {
  emu::collective("syncwarp", mask, {}, emu::combine_nothing, where);
}
inline void __syncthreads(EMU_WHERE) { emu::barrier(0, blockDim.x, true, true, where); }
inline bool __syncthreads_and(bool v, EMU_WHERE) { return emu::barrier(0, blockDim.x, true, v, where); }
inline int __syncthreads_or(bool v, EMU_WHERE) { return !emu::barrier(0, blockDim.x, true, !v, where); }
inline void __threadfence() { emu::maybe_yield(); }
inline void __threadfence_block() { emu::maybe_yield(); }
inline void __nanosleep(unsigned, EMU_WHERE) { emu::sleep(where); }

// Atomics.
template <typename T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  emu::maybe_yield();
  return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}
template <typename T>
T atomicSub(T* p, std::type_identity_t<T> v) {
  emu::maybe_yield();
  return __atomic_fetch_sub(p, v, __ATOMIC_ACQ_REL);
}
template <typename T>
T atomicOr(T* p, std::type_identity_t<T> v) {
  emu::maybe_yield();
  return __atomic_fetch_or(p, v, __ATOMIC_ACQ_REL);
}
template <typename T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  emu::maybe_yield();
  return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL);
}
template <typename T>
T atomicMax(T* p, std::type_identity_t<T> v) {
  emu::maybe_yield();
  T old = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
  return old;
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
template <typename T>
void __stwb(T* p, T value) {
  *p = value;
}
template <typename T>
T __ldcg(const T* p) {
  using Unit = std::conditional_t<(sizeof(T) > 8), uint64_t, T>;  // what is longer comes in pieces, as on a device
  T value;
  for (size_t i = 0; i < sizeof(T) / sizeof(Unit); ++i)
    __atomic_load(reinterpret_cast<const Unit*>(p) + i, reinterpret_cast<Unit*>(&value) + i, __ATOMIC_ACQUIRE);
  return value;
}

// Integers.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t pick) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t s = pick >> (4 * i);
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (s & 7))) & 0xFF;
    if (s & 8) byte = byte & 0x80 ? 0xFF : 0;
    r |= byte << (8 * i);
  }
  return r;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i)
    c += static_cast<int8_t>(static_cast<uint32_t>(a) >> (8 * i)) *
         static_cast<int8_t>(static_cast<uint32_t>(b) >> (8 * i));
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += (a >> (8 * i) & 0xFF) * (b >> (8 * i) & 0xFF);
  return c;
}
inline uint32_t __vadd4(uint32_t a, uint32_t b) {
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= ((a >> (8 * i)) + (b >> (8 * i)) & 0xFF) << (8 * i);
  return r;
}
inline uint32_t __vneg4(uint32_t a) { return __vadd4(~a, 0x01010101); }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
  shift &= 31;
  return shift == 0 ? high : high << shift | low >> (32 - shift);
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
inline double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }

// Floating point, one rounding each; NaN as the device makes it.
inline float __fmul_rn(float a, float b) { return emu::device_nan(a * b); }
inline float __fadd_rn(float a, float b) { return emu::device_nan(a + b); }
inline float __fsub_rn(float a, float b) { return emu::device_nan(a - b); }
inline float __fdiv_rn(float a, float b) { return emu::device_nan(a / b); }
inline float __fmaf_rn(float a, float b, float c) { return emu::device_nan(__builtin_fmaf(a, b, c)); }
inline float __fsqrt_rn(float a) { return emu::device_nan(__builtin_sqrtf(a)); }
inline float __frcp_rn(float a) { return emu::device_nan(1.0f / a); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
inline int __float2int_rn(float a) { return static_cast<int>(__builtin_rintf(a)); }
inline unsigned __float2uint_rn(float a) {
  if (!(a > 0.0f)) return 0;
  return a < 4294967296.0f ? static_cast<unsigned>(static_cast<int64_t>(__builtin_rintf(a))) : 0xFFFFFFFFu;
}

#define EMU_MIN_MAX(R, A, B)                                                                                       \
  inline R min(A a, B b) { return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(a) : static_cast<R>(b); } \
  inline R max(A a, B b) { return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(b) : static_cast<R>(a); }
EMU_MIN_MAX(int, int, int)
EMU_MIN_MAX(unsigned, unsigned, unsigned)
EMU_MIN_MAX(unsigned, unsigned, int)
EMU_MIN_MAX(unsigned, int, unsigned)
EMU_MIN_MAX(long, long, long)
EMU_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMU_MIN_MAX(long long, long long, long long)
EMU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
