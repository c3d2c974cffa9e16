#pragma once
#include <cstdint>

// Functions of the bit-exact numerics (docs/numerics.md) run on host and device. On the host they have internal
// linkage: the same header is compiled for several instruction sets, and the linker must not merge the copies.
#if defined(__CUDACC__)
#define FOLD_HD static __host__ __device__ __forceinline__
#else
#define FOLD_HD static inline __attribute__((always_inline, unused))
#endif

namespace fold::numerics {

constexpr int kTile = 64;          ///< keys of a block (docs/numerics.md, section 2)
constexpr int kMaxHeadDim = 256;   ///< decode head dims: 64, 128, 256
constexpr int kFraction = 26;      ///< fraction bits of a fixed-point weight
constexpr int kNewest = 63;        ///< newest keys scored exactly for Z
constexpr int kSamples = 128;      ///< stratum centres scored for Z
constexpr int kTrimmed = 1;        ///< largest samples left out of the extrapolation
constexpr int kRank = 16;          ///< directions of the tail's correction
constexpr int kFirstMark = 1024;   ///< first length at which the tail is fitted
constexpr int kFitSlotKeys = 256;  ///< marks are at least this far apart: one fit slot per so many keys

}  // namespace fold::numerics
