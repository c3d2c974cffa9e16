#pragma once
#include <cstdint>

#include "cuda/attention/schedule.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/wgmma.cuh"

// Tiles, shared memory and barriers of the forward kernel.
namespace fold::cuda::attention {

/// Of a tile. Of fewer than 80 keys the products with queries would wait for shared memory.
constexpr int forward_keys(int64_t head_dim) { return head_dim == 256 ? 80 : 128; }
/// Consumer warpgroups, and query rows of a tile.
constexpr int forward_consumers(int64_t head_dim) { return head_dim == 64 ? 3 : 2; }
constexpr int forward_rows(int64_t head_dim) { return 64 * forward_consumers(head_dim); }

/// D channels, tiles of kRows query rows (64 of each consumer warpgroup) and kKeys keys. The first warpgroup brings the
/// data: its warps take items, copy, and look after values (two of them, see clean_values()).
template <typename T, int D>
struct ForwardShape {
  using Element = T;
  static constexpr int kDim = D;
  static constexpr int kConsumers = forward_consumers(D);
  static constexpr int kRows = forward_rows(D), kKeys = forward_keys(D);
  static constexpr int kStages = D == 64 ? 4 : 2;
  static constexpr int kKeyWords = (kKeys + 31) / 32;  // of a bit for each key
  static constexpr int kSteps = kKeys / 16;            // of a value product
  /// So many are issued before the maxima of the next tile's logits are taken, the others then; all before a masked
  /// tile's. At head dim 64 they take half as long, and three warpgroups are in each other's way; at 256 there are few.
  static constexpr int kStepsAhead = D == 64 || D == 256 ? kSteps : 1;
  static constexpr int kBlocks = (D + 63) / 64;  // of 64 channels; the last one may be part empty
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32, kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  // A warpgroup can take only what others gave: threads start with equal shares.
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1));
  static constexpr int kCleaners = 2;  // warps
  static constexpr int kItems = 2;     // items that are known ahead
};

template <typename Shape>
struct ForwardShared {
  alignas(1024) uint16_t q[Shape::kBlocks][Shape::kRows][64];
  alignas(1024) uint16_t k[Shape::kStages][Shape::kBlocks][Shape::kKeys][64];
  alignas(1024) uint16_t v[Shape::kStages][Shape::kBlocks][Shape::kKeys][64];
  Item items[Shape::kItems];
  // A bit for each key that clean_values() cut. Aligned, so that a load takes four words.
  alignas(16) uint32_t broken[Shape::kStages][Shape::kCleaners][Shape::kKeyWords];
  // Barriers, of stages where there are many. Filled by copies, emptied by consumers.
  uint64_t q_full, q_empty, k_full[Shape::kStages], k_empty[Shape::kStages], v_full[Shape::kStages],
      v_clean[Shape::kStages], v_empty[Shape::kStages], item_full[Shape::kItems], item_empty[Shape::kItems];
};

/// A place in a ring of N, and the parity of its barriers' phases.
template <int N>
struct Ring {
  unsigned count = 0;
  __device__ int at() const { return static_cast<int>(count % N); }
  __device__ uint32_t parity() const { return count / N & 1; }
};

/// What the kernel is given.
struct Forward {
  plan::ForwardParams params;
  Schedule schedule;
  float log2_scale;  // of the logits, not negative
  float sign;        // multiplies logits first: 1, or -1 where softmax_scale is negative, or 0
};

}  // namespace fold::cuda::attention
