#pragma once
#include <cstdint>

// Counting, by a whole thread block.
namespace fold::cuda {

constexpr unsigned kWarp = 0xFFFFFFFFu;  ///< all lanes

struct ScanShared {
  unsigned warps[32];
};

/// The sum over the threads before this one; `total` becomes that over all threads.
__device__ inline unsigned exclusive_sum(unsigned n, unsigned& total, ScanShared& shared) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned sum = n;
  for (unsigned step = 1; step < 32; step *= 2) {
    const unsigned before = __shfl_up_sync(kWarp, sum, step);
    if (lane >= step) sum += before;
  }
  __syncthreads();  // shared may still be in use
  if (lane == 31) shared.warps[warp] = sum;
  __syncthreads();
  unsigned earlier = 0;
  total = 0;
  for (unsigned i = 0; i < blockDim.x / 32; ++i) {
    earlier += i < warp ? shared.warps[i] : 0;
    total += shared.warps[i];
  }
  return earlier + sum - n;
}

/// The index-th of things that owners 0, 1, ... have count(owner) of each, in order.
struct Located {
  int owner;        // -1: there are not so many
  unsigned offset;  // among its owner's
  unsigned total;
};

struct LocateShared {
  ScanShared scan;
  int owner;
  unsigned offset;
};

template <typename Count>
__device__ Located locate(unsigned index, int64_t owners, Count count, LocateShared& shared) {
  unsigned total = 0;
  __syncthreads();  // shared may still be in use
  if (threadIdx.x == 0) shared.owner = -1;
  for (int64_t first = 0; first < owners; first += blockDim.x) {
    const int owner = static_cast<int>(first + threadIdx.x);
    const unsigned n = owner < owners ? count(owner) : 0;
    unsigned sum = 0;
    const unsigned before = total + exclusive_sum(n, sum, shared.scan);
    if (index - before < n) {  // wraps for an earlier index
      shared.owner = owner;
      shared.offset = index - before;
    }
    total += sum;
  }
  __syncthreads();
  return {shared.owner, shared.offset, total};
}

}  // namespace fold::cuda
