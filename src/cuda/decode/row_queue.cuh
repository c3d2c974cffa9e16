#pragma once
#include "cuda/ptx/async_copy.cuh"

// V rows that are to be weighted and added, on their way from the scan warps of a CTA to its value warps: a ring of
// blocks of 32. Any scan warp appends to the block that is open, so blocks are full whatever each warp finds; sums of
// integers do not mind the order.
namespace fold::cuda {

constexpr int kQueueBlock = 32;

/// Blocks: places in the ring.
template <int Rows, int Blocks>
struct alignas(16) RowQueue {
  static constexpr int kBlocks = Blocks;
  struct alignas(8) Entry {
    int page;     // -1: none, its weights are 0
    unsigned at;  // slot and flags of a Candidate
  };
  Entry entry[Blocks][kQueueBlock];
  unsigned weight[Blocks][Rows][kQueueBlock + 4];  // rows on banks of their own
  uint64_t full[Blocks], empty[Blocks];
  unsigned tail;  // entries reserved
  int end;        // no block from this one on has rows; large until that is known

  /// A warp. readers: warps that read a block.
  __device__ void init(int lane, int readers) {
    if (lane < Blocks) {
      ptx::init_barrier(ptx::shared_address(&full[lane]), kQueueBlock);
      ptx::init_barrier(ptx::shared_address(&empty[lane]), readers);
    }
    if (lane != 0) return;
    tail = 0;
    end = 0x7FFFFFFF;
  }
  /// A warp, once every warp is done.
  __device__ void invalidate(int lane) {
    if (lane >= Blocks) return;
    ptx::invalidate_barrier(ptx::shared_address(&full[lane]));
    ptx::invalidate_barrier(ptx::shared_address(&empty[lane]));
  }

  // Writers.

  /// Returns once the block's place in the ring may be written.
  __device__ void wait_writable(int block) {
    if (block < Blocks) return;
    ptx::wait_barrier(ptx::shared_address(&empty[block % Blocks]), (block / Blocks + 1) % 2);
  }
  /// `count` entries from position `first` on have been written. One thread, after its warp's __syncwarp().
  __device__ void publish(unsigned first, int count) {
    const int block = static_cast<int>(first / kQueueBlock),
              here = min(count, kQueueBlock - static_cast<int>(first % kQueueBlock));
    ptx::arrive(ptx::shared_address(&full[block % Blocks]), here);
    if (count > here) ptx::arrive(ptx::shared_address(&full[(block + 1) % Blocks]), count - here);
  }
  /// The last writer's warp: fills the open block up and tells the readers that no more come, by a block without rows.
  __device__ void close(int lane) {
    const unsigned first = tail;
    const int block = static_cast<int>(first / kQueueBlock), used = static_cast<int>(first % kQueueBlock);
    if (used > 0) {
      wait_writable(block);
      if (lane >= used) {
        entry[block % Blocks][lane] = {-1, 0};
        for (int r = 0; r < Rows; ++r) weight[block % Blocks][r][lane] = 0;
      }
      __syncwarp();
      if (lane == 0) publish(first, kQueueBlock - used);
    }
    if (lane != 0) return;
    const int last = block + (used > 0);
    end = last;
    wait_writable(last);
    publish(static_cast<unsigned>(last) * kQueueBlock, kQueueBlock);
  }

  // Readers.

  /// Of a full block.
  __device__ bool is_end(int block) const { return block >= *const_cast<const volatile int*>(&end); }
  /// One thread of a reading warp, after its warp's last use of the block.
  __device__ void release_buffer(int buffer) { ptx::arrive(ptx::shared_address(&empty[buffer])); }
};

}  // namespace fold::cuda
