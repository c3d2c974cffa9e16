#pragma once
#include "cuda/decode/range_task.cuh"
#include "cuda/decode/row_queue.cuh"

// What the warps of StreamSummer share (sum_stream.cuh).
namespace fold::cuda {

constexpr int kValueWarps = 4;  ///< of each kind: nibble planes, byte planes
constexpr int kStages = 2;      ///< tiles on their way to a scan warp
constexpr int kBatch = 16;      ///< candidates that are read deeper at once
constexpr int kBatches = 2;     ///< batches on their way to a scan warp
constexpr int kListed = 128;  ///< candidates that a scan warp may hold, more than a tile's and three batches' less one

/// A key that some row asks to read further, and how far.
struct alignas(16) Candidate {
  int page;         // in the pool
  unsigned at;      // slot, flags and depth, see below
  unsigned scales;  // e_k, e_v << 16, bf16 both
};
constexpr unsigned kSlotMask = 1023, kReadsLow = 1 << 10, kForced = 1 << 11, kLikelyByte = 1 << 12;
constexpr int kDeeperShift = 16;  ///< what the block's outliers add to V's gates

template <int D, int Quads>
struct StreamShared {
  static constexpr int kRows = 4 * Quads;
  static constexpr int kScanWarps = Quads <= 2 ? 8 : 4;  ///< more would leave them too few registers
  static constexpr int kThreads = 32 * (kScanWarps + 2 * kValueWarps);
  static constexpr int kMembers = Quads == 1 ? 1 : 4,
                       kTeams = kValueWarps / kMembers;  ///< value warps that share a block
  static constexpr int kNibbleBlocks = Quads == 1 ? 8 : 4, kByteBlocks = 4;

  struct Row {  // constants of a query row
    float sum_a, unit_0, neg_z, margin, k_l, k_b, v_h, v_l, v_b;
    float e_q, unit_1, margin_16, per_e;
    int first_sum, sum_128, sum_255;
  };
  struct Offsets {  // of the KV head's sections in a page
    int k_h, k_l, k_b, k_scale, v_h, v_l, v_b, v_scale, bound;
  };
  struct alignas(128) Stage {
    uint8_t k_h[kTile * D / 2];
    uint16_t k_scale[kTile], v_scale[kTile], bound[8];
    int tile, page, slot;  // slot of its first key
  };
  struct alignas(128) Batch {  // rows of its keys
    uint8_t h[kBatch * D / 2], l[kBatch * D / 2], b[kBatch * D];
  };
  struct Scan {
    Stage stage[kStages];
    Batch batch[kBatches];
    Candidate listed[kListed];
    unsigned long long den[Quads][32];  // of a lane's keys whose V is read
  };

  union {
    Scan scan[kScanWarps];
    unsigned long long num[2 * kTeams][kRows][D];  // of each team, once there is nothing more to scan
  };
  uint64_t barrier[kScanWarps][kStages];
  alignas(128) uint8_t nibble_rows[kNibbleBlocks][kQueueBlock * D], byte_rows[kByteBlocks][kQueueBlock * D];
  RowQueue<kRows, kNibbleBlocks> nibbles;
  RowQueue<kRows, kByteBlocks> bytes_of_v;
  uint4 level_0[Quads][D / 64][32];  // query fragments by lane
  uint4 level_1[Quads][D / 64][32], level_2[Quads][D / 64][32];
  Row row[kRows];
  Offsets offsets;
  unsigned long long den[kRows], mass[kRows], half_mass[kRows], dropped[kRows], values, bytes;
  int peak[kRows];
  int next_tile, scanning;  // first tile that no warp has taken; scan warps at work
  int tiles_of_page;
  unsigned per_page;  // 2^31 over that, rounded up: exact for every tile there can be
  int loud;           // whether some row may drop a weight of 2^22 or more
};

}  // namespace fold::cuda
