#pragma once
#include "cuda/decode/range_task.cuh"

// What the warps of NarrowSummer share (sum_narrow.cuh).
namespace fold::cuda {

constexpr int kNoTile = -1;       ///< a warp's at the end of a range
constexpr int kSlots = 32;        ///< V rows of a tile that are multiplied in a round
constexpr int kLowSlots = 16;     ///< and V's b rows
constexpr int kFlushTiles = 512;  ///< 2^15 keys: no 32-bit sum of products of bytes overflows before

template <int D, int Quads>
struct NarrowShared {
  static constexpr int kRows = 4 * Quads;
  /// Tiles of a chunk, warps of a CTA. Of so many rows and channels four warps' registers would not hold the sums.
  static constexpr int kChunkTiles = D == 256 || (D == 128 && Quads == 4) ? 8 : 4;
  static constexpr int kThreads = 32 * kChunkTiles;
  static constexpr int kRowStride = kTile + 4;  // words; keeps rows off each other's banks

  struct Row {  // constants of a query row
    float sum_a, unit_0, neg_z, margin, k_l;
    float e_q, unit_1, margin_16, k_b;
    float v_h, v_l, v_b, per_e;
    int first_sum, sum_128, fit_shift;
  };
  struct Place {  // of a warp's tile
    Spot spot;
    int chunk;  // its chunk's first tile
    int tile;   // its index, or kNoTile
    bool settled;
    int of_pair;                           // by how many bits the block's own of a pair stands higher
    int next_slot, next_index, next_page;  // of the next chunk's tile: slot, its page's place in the table, that page
    unsigned bound, mean_scale;            // of its block, where it is settled, and of that one's neighbour
  };
  struct RowOfWarp {  // a warp's sums of a row, on their way to the group's
    unsigned long long den, value_mass, half_mass;
    int peak;
  };
  /// A warp's, and what the other warps read of its tile. One block: a single address leads to all of it.
  struct alignas(16) Warp {
    uint8_t k_h[kTile * D / 2];
    uint16_t k_scale[kTile], v_scale[kTile];
    // By scale slot; of keys read to level 2, D1 until then. Once all weights are known: the block's mean row and
    // codes.
    float x[kRows][kRowStride];
    unsigned weight[kRows][kRowStride];  // by V slot
    uint8_t code[kRows][80];
    uint16_t keys[kTile];  // whose V is read, 2^8: plane l; before that two lists of bytes, K's l and b
    Place place;
    Spot before;                   // of the tile before, once the next is sent for
    int live, slots, low;          // V rows read; with the mean row; V's b rows, which are the first
    int rounds, coded;             // until all of them are multiplied; whether dropped keys have codes
    alignas(16) int codes[kRows];  // C_b
    unsigned long long dropped[kRows];
    unsigned values, bytes;
    uint64_t barrier;
  };

  // Gathered, of each warp: V's h and l beside each other, then V's b; before that K's l or b.
  union {
    alignas(128) uint8_t rows[kChunkTiles][(kSlots + kLowSlots) * D];
    struct {  // (rows, D), on their way to the group's: a numerator without its factor 2^8, S of section 7 without ubar
      long long num[kRows * D], code[kRows * D];
    } sums;
  };
  Warp warp[kChunkTiles];
  uint4 scan[Quads][D / 64][32];  // level 0's query fragments
  int ubar[kRows][kThreads];      // sums of C_b ubar_b, of a thread's channel
  Row row[kRows];
  HeadSections offsets;
  unsigned long long value_mass[kRows], half_mass[kRows];
  int loud;        // whether some row may drop a weight of 2^26 or more
  unsigned every;  // all bits where some row reads every V, whatever its logit (which may be -inf), else none
};

}  // namespace fold::cuda
