#pragma once
#include "cuda/decode/query_rows.cuh"
#include "cuda/decode/range_task.cuh"

// What the warps of DenseSummer share (sum_dense.cuh).
namespace fold::cuda {

template <int D, int Quads>
struct DenseShared {
  static constexpr int kRows = 4 * Quads;
  static constexpr int kWarps = D == 256 && Quads == 1 ? 6 : 4;
  static constexpr int kThreads = 32 * kWarps;
  /// Warps that share the channels of their tiles' values, so that each has registers for its sums.
  static constexpr int kTeam = D * Quads < 128 ? 1 : D * Quads <= 256 ? 2 : 4;
  static constexpr int kRowStride = kTile + 4;  // words; keeps rows off each other's banks
  static constexpr int kPairs = D / 64;

  struct RowOfWarp {  // a warp's sums of a row, on their way to the group's
    unsigned long long den, mass, half_mass;
    int peak;
  };
  struct alignas(128) Warp {
    uint8_t k_h[kTile * D / 2], k_l[kTile * D / 2];
    uint8_t v_h[kTile * D / 2], v_l[kTile * D / 2];  // place_of_value
    struct alignas(16) Scales {
      uint16_t k[kTile], v[kTile], bound[8];
    } scales[2];                           // of a tile with an even number and of an odd one
    alignas(16) unsigned reads_low[4][4];  // a byte a key: 0xFF where V's l is read
    union {
      unsigned weight[kRows][kRowStride];  // by scale slot; until it is known x, and before that D1 of some keys
      RowOfWarp of_warp[kRows];            // in the end; then the CTA's numerators, Quads rows a warp
      long long num[Quads][D];
    };
    alignas(16) uint8_t bytes[kTile];  // keys whose K's b is read; then scale slots of keys whose V's b is
    const uint8_t* v_b;                // V's plane b of the tile; null without one
    int listed;                        // how many V's b are
    unsigned keys;                     // seen, in the end
  };

  Warp warp[kWarps];
  uint4 fragment[Quads][2 * kPairs][32];  // of the queries, by lane: level 1's, level 2's
  QueryRow row[kRows];
  HeadSections offsets;
  unsigned long long mass[kRows], half_mass[kRows];
};

}  // namespace fold::cuda
