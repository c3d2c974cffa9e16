#pragma once
#include "cuda/decode/query_rows.cuh"
#include "cuda/decode/range_task.cuh"
#include "cuda/decode/row_queue.cuh"

// What the warps of StreamSummer share (sum_stream.cuh).
namespace fold::cuda {

constexpr int kStages = 2;    ///< tiles on their way to a scan warp
constexpr int kBatch = 16;    ///< candidates that are read deeper at once
constexpr int kListed = 128;  ///< candidates that a scan warp may hold, more than a tile's and two batches' less one
constexpr int kMembers = 2;   ///< value warps that share a block's channels

/// Where a tile's keys are: page in the pool, slot of the first.
struct Place {
  int page, slot;
};

/// A key that some row asks to read further, and how far.
struct Candidate {
  int page;         // in the pool
  unsigned at;      // slot, flags and depth, see below
  unsigned scales;  // e_k, e_v << 16, bf16 both
};
constexpr unsigned kSlotMask = 1023, kReadsLow = 1 << 10, kForced = 1 << 11, kLikelyByte = 1 << 12;
constexpr int kDeeperShift = 16;  ///< what the block's outliers add to V's gates

template <int D, int Quads>
struct StreamShared {
  static constexpr int kRows = 4 * Quads;
  static constexpr int kCtas = Quads == 1 ? 2 : 1;                         ///< a multiprocessor
  static constexpr int kScanWarps = Quads == 1 ? 6 : Quads == 2 ? 12 : 8;  ///< more would leave them too few registers
  static constexpr int kKinds = Quads == 1 ? 1 : 2;  ///< of value warps: for all planes, or for nibbles and for bytes
  static constexpr int kValueWarps = kKinds * kMembers;
  static constexpr int kThreads = 32 * (kScanWarps + kValueWarps);
  static constexpr int kPairs = D / 64,
                       kFragments = 1 + 2 * kPairs;  ///< of a query: level 0 has one, the others kPairs
  static constexpr int kNibbleBlocks = Quads == 1 ? 4 : 6, kByteBlocks = Quads == 1 ? 3 : Quads == 2 ? 6 : 4;
  // Else a warp could be two rounds of the ring ahead of another, which a barrier's parity does not tell from none.
  static_assert(kQueueBlock * kByteBlocks >= kScanWarps * kBatch && kNibbleBlocks >= kByteBlocks);

  struct alignas(16) Stage {
    uint8_t k_h[kTile * D / 2];
    uint16_t k_scale[kTile], v_scale[kTile], bound[8];
    Place place;
  };
  struct Scan {
    Stage stage[kStages];
    uint4 k_b[2][D / 64][32];  // a batch's rows of plane b: what each lane asked for of its two keys
    Candidate listed[kListed];
    unsigned long long den[Quads][32];  // of a lane's keys whose V is read
    float peak[Quads][32];              // likewise
  };

  union {
    Scan scan[kScanWarps];
    unsigned long long num[2][kRows][D];  // of nibbles and of bytes, once there is nothing more to scan
  };
  uint64_t barrier[kScanWarps][kStages + 1];  // of the tiles, and of k_b
  uint64_t met;                               // of all warps, a lane each
  alignas(128) uint8_t nibble_rows[kNibbleBlocks][kQueueBlock * D], byte_rows[kByteBlocks][kQueueBlock * D];
  RowQueue<kRows, kNibbleBlocks> nibbles;
  RowQueue<kRows, kByteBlocks> bytes_of_v;
  uint4 fragment[Quads][kFragments][32];  // of the queries, by lane: level 0's, level 1's, level 2's
  QueryRow row[kRows];
  HeadSections offsets;
  unsigned long long den[kRows], mass[kRows], half_mass[kRows], dropped[kRows], values, bytes;
  int peak[kRows];
  int scanning;    // scan warps at work
  int loud;        // whether some row may drop a weight of 2^22 or more
  unsigned every;  // all bits where some row reads every V, whatever its logit (which may be -inf), else none
};

}  // namespace fold::cuda
