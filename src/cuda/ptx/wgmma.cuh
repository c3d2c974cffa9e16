#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// Warpgroup matrix products d += A B on Hopper's tensor cores: A is 64 x 16, B 16 x N, 16-bit elements, fp32 sums. All
// 128 threads of a warpgroup call together. Thread 32 w + 4 g + c holds of the sums d[4 i + ..]: row 16 w + g, columns
// 8 i + 2 c and one more (d[4 i], d[4 i + 1]), and the same columns of row 16 w + g + 8 (d[4 i + 2], d[4 i + 3]). A in
// registers has that layout too, rounded to pairs: a[0], a[1] rows g and g + 8 of k = 2 c, 2 c + 1; a[2], a[3] the same
// of k + 8. So the sums of 16 columns, rounded, are the A of a next product.
//
// Products run asynchronously: arrive(); multiplications; commit(); wait<n>(). Sums and register operands must not be
// touched in between.
namespace fold::cuda::ptx {

/// Which index of an operand in shared memory is contiguous: k (the index summed over), or the row of A / column of B.
enum class Major { k, mn };

/// Bytes of a row of a swizzled block in shared memory: 64 elements. Blocks of 8 rows start at multiples of 1024 bytes.
constexpr int kSwizzleRow = 128;

/// Describes an operand as 128-byte rows (64 elements) with the 128-byte swizzle, as bulk tensor copies leave them.
/// address: of the first element, in a tile that starts at a multiple of 1024 bytes.
/// Major::k: a row is a row of A (column of B), 64 of its k. The next 16 k are 32 bytes further; k + 64 is another
/// tile. Major::mn: a row is one k, for 64 rows of A (columns of B). The next 16 k are 2048 bytes further. The next 64
/// rows (columns) are `block_stride` bytes further.
template <Major M>
__device__ inline uint64_t operand(uint32_t address, uint32_t block_stride = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{8 * kSwizzleRow / 16} << 32;
  return kSwizzle128 | kEightRows | uint64_t{block_stride / 16} << 16 | (address & 0x3ffff) / 16;
}

/// The operand that many bytes further: only the address changes, which is cheaper than operand() anew.
__device__ inline uint64_t further(uint64_t operand, uint32_t bytes) {
  return (operand & ~uint64_t{0xffffffff}) | (static_cast<uint32_t>(operand) + bytes / 16);
}

/// Before the first product that reads registers (sums, A) which were written by other instructions.
__device__ inline void wgmma_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Ends a group of products.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until at most N groups are unfinished.
template <int N>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/// Keeps the compiler from moving accesses of these registers across this point: after a wait, and before arrive.
template <int N>
__device__ inline void keep_registers(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// The same number, of which the compiler does not know so: what is computed from it is computed anew, not kept in
/// registers from one pass of a loop to the next.
__device__ inline int anew(int x) {
  int same;
  asm volatile("mov.u32 %0, %1;" : "=r"(same) : "r"(x));
  return same;
}

#define FOLD_TEXT_32                                                                                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FOLD_TEXT_40 FOLD_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FOLD_TEXT_48 FOLD_TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FOLD_TEXT_64 FOLD_TEXT_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FOLD_TEXT_88                                                                             \
  FOLD_TEXT_64                                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87"
#define FOLD_TEXT_96 FOLD_TEXT_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FOLD_TEXT_128                                                                                    \
  FOLD_TEXT_96                                                                                           \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FOLD_SUMS_8(i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FOLD_SUMS_32 FOLD_SUMS_8(0), FOLD_SUMS_8(8), FOLD_SUMS_8(16), FOLD_SUMS_8(24)
#define FOLD_SUMS_40 FOLD_SUMS_32, FOLD_SUMS_8(32)
#define FOLD_SUMS_48 FOLD_SUMS_40, FOLD_SUMS_8(40)
#define FOLD_SUMS_64 FOLD_SUMS_48, FOLD_SUMS_8(48), FOLD_SUMS_8(56)
#define FOLD_SUMS_88 FOLD_SUMS_64, FOLD_SUMS_8(64), FOLD_SUMS_8(72), FOLD_SUMS_8(80)
#define FOLD_SUMS_96 FOLD_SUMS_88, FOLD_SUMS_8(88)
#define FOLD_SUMS_128 FOLD_SUMS_96, FOLD_SUMS_8(96), FOLD_SUMS_8(104), FOLD_SUMS_8(112), FOLD_SUMS_8(120)

// n: columns; r: sums of a thread; the numbers of the operands that follow them.
#define FOLD_WGMMA_SHARED(type, n, r, a, b, keep, ta, tb)                                         \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #keep                                   \
               ", 0;\n"                                                                           \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FOLD_TEXT_##r \
               "}, %" #a ", %" #b ", keep, 1, 1, %" #ta ", %" #tb ";\n}"                          \
               : FOLD_SUMS_##r                                                                    \
               : "l"(lhs), "l"(rhs), "r"(int{accumulate}), "n"(A == Major::mn), "n"(B == Major::mn))
#define FOLD_WGMMA_REGISTERS(type, n, r, a0, a1, a2, a3, b, keep, tb)                                \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #keep                                      \
               ", 0;\n"                                                                              \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FOLD_TEXT_##r    \
               "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", keep, 1, 1, %" #tb ";\n}"      \
               : FOLD_SUMS_##r                                                                       \
               : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "l"(rhs), "r"(int{accumulate}), \
                 "n"(B == Major::mn))

template <int N>
constexpr bool kHasWgmma = N == 64 || N == 80 || N == 96 || N == 128 || N == 176 || N == 192 || N == 256;

#define FOLD_WGMMA_SHARED_ALL(type)                                              \
  if constexpr (N == 64) FOLD_WGMMA_SHARED(type, 64, 32, 32, 33, 34, 35, 36);    \
  if constexpr (N == 80) FOLD_WGMMA_SHARED(type, 80, 40, 40, 41, 42, 43, 44);    \
  if constexpr (N == 96) FOLD_WGMMA_SHARED(type, 96, 48, 48, 49, 50, 51, 52);    \
  if constexpr (N == 128) FOLD_WGMMA_SHARED(type, 128, 64, 64, 65, 66, 67, 68);  \
  if constexpr (N == 176) FOLD_WGMMA_SHARED(type, 176, 88, 88, 89, 90, 91, 92);  \
  if constexpr (N == 192) FOLD_WGMMA_SHARED(type, 192, 96, 96, 97, 98, 99, 100); \
  if constexpr (N == 256) FOLD_WGMMA_SHARED(type, 256, 128, 128, 129, 130, 131, 132)
#define FOLD_WGMMA_REGISTERS_ALL(type)                                                        \
  if constexpr (N == 64) FOLD_WGMMA_REGISTERS(type, 64, 32, 32, 33, 34, 35, 36, 37, 38);      \
  if constexpr (N == 80) FOLD_WGMMA_REGISTERS(type, 80, 40, 40, 41, 42, 43, 44, 45, 46);      \
  if constexpr (N == 96) FOLD_WGMMA_REGISTERS(type, 96, 48, 48, 49, 50, 51, 52, 53, 54);      \
  if constexpr (N == 128) FOLD_WGMMA_REGISTERS(type, 128, 64, 64, 65, 66, 67, 68, 69, 70);    \
  if constexpr (N == 176) FOLD_WGMMA_REGISTERS(type, 176, 88, 88, 89, 90, 91, 92, 93, 94);    \
  if constexpr (N == 192) FOLD_WGMMA_REGISTERS(type, 192, 96, 96, 97, 98, 99, 100, 101, 102); \
  if constexpr (N == 256) FOLD_WGMMA_REGISTERS(type, 256, 128, 128, 129, 130, 131, 132, 133, 134)

/// d = A B (+ d where accumulate), A and B in shared memory (operand<A>(), operand<B>()). T: __nv_bfloat16 or __half.
template <typename T, int N, Major A, Major B>
__device__ inline void wgmma(float (&d)[N / 2], uint64_t lhs, uint64_t rhs, bool accumulate) {
  static_assert(kHasWgmma<N>);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    FOLD_WGMMA_SHARED_ALL("bf16");
  } else {
    FOLD_WGMMA_SHARED_ALL("f16");
  }
}

/// The same with A in registers.
template <typename T, int N, Major B>
__device__ inline void wgmma(float (&d)[N / 2], const uint32_t (&lhs)[4], uint64_t rhs, bool accumulate) {
  static_assert(kHasWgmma<N>);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    FOLD_WGMMA_REGISTERS_ALL("bf16");
  } else {
    FOLD_WGMMA_REGISTERS_ALL("f16");
  }
}

#undef FOLD_WGMMA_REGISTERS_ALL
#undef FOLD_WGMMA_SHARED_ALL
#undef FOLD_WGMMA_REGISTERS
#undef FOLD_WGMMA_SHARED
#undef FOLD_SUMS_128
#undef FOLD_SUMS_96
#undef FOLD_SUMS_88
#undef FOLD_SUMS_64
#undef FOLD_SUMS_48
#undef FOLD_SUMS_40
#undef FOLD_SUMS_32
#undef FOLD_SUMS_8
#undef FOLD_TEXT_128
#undef FOLD_TEXT_96
#undef FOLD_TEXT_88
#undef FOLD_TEXT_64
#undef FOLD_TEXT_48
#undef FOLD_TEXT_40
#undef FOLD_TEXT_32

/// Two sums as a register of an A operand; `low` is the smaller k.
template <typename T>
__device__ inline uint32_t pair(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

/// exp2 by the special function unit: about 2 units in the last place, exp2(-inf) = 0.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace fold::cuda::ptx
