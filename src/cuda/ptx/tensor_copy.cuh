#pragma once
#include <cudaTypedefs.h>

#include <array>
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/ptx/async_copy.cuh"

// Bulk copies of boxes of tensors between global and shared memory, and a warpgroup's share of the
// registers.
namespace fold::cuda::ptx {

/// A tensor of 16-bit elements as the copy engine sees it. size[0] is contiguous; stride[i] (elements) is that of
/// dimension i + 1. Boxes of 64 x rows x 1 x 1 elements land as rows of 128 bytes with the 128-byte swizzle, in a place
/// that is a multiple of 1024 bytes; what lies outside the tensor arrives as zeros.
struct TensorBoxes {
  const void* data;               // 16-byte aligned
  std::array<int64_t, 4> size;    // each below 2^32
  std::array<int64_t, 3> stride;  // multiples of 8, where the size is not 1
  int rows;                       // of a box, at most 256
};

/// Made on the host, passed to the kernel as a __grid_constant__ parameter. Throws if the driver refuses.
inline CUtensorMap tensor_map(const TensorBoxes& boxes, bool bf16) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    require_success(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
        "tensor maps");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  constexpr int kRank = 4;
  cuuint64_t size[kRank], stride[kRank - 1];
  const cuuint32_t box[kRank] = {64, static_cast<cuuint32_t>(boxes.rows), 1, 1}, step[kRank] = {1, 1, 1, 1};
  for (int i = 0; i < kRank; ++i) size[i] = static_cast<cuuint64_t>(boxes.size[static_cast<size_t>(i)]);
  for (int i = 0; i + 1 < kRank; ++i) {  // that of a dimension of size 1 may be anything
    stride[i] = size[i + 1] == 1 ? 0 : static_cast<cuuint64_t>(boxes.stride[static_cast<size_t>(i)]) * 2;
  }
  CUtensorMap map;
  const CUresult result =
      encode(&map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, kRank,
             const_cast<void*>(boxes.data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw std::runtime_error("tensor maps: the driver's error " + std::to_string(result));
  return map;
}

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// One box, from the element (channel, row, head, sequence); by one thread. Completes on the barrier, with all bytes of
/// the box wherever it lies.
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, uint32_t barrier, int channel, int row, int head,
                                int sequence) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(channel), "r"(row), "r"(head), "r"(sequence)
      : "memory");
}

/// Adds int32 values of shared memory to as many of global memory, atomically; by one thread. Addresses and bytes:
/// multiples of 16.
__device__ inline void bulk_add_i32(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
/// Ends a group of the thread's copies and additions out of shared memory.
__device__ inline void commit_bulk() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Until at most N of the thread's groups still read shared memory.
template <int N>
__device__ inline void wait_bulk_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

/// wait_barrier for what takes long: the thread sleeps until the barrier wakes it, and leaves the issue slots to
/// others.
__device__ inline void sleep_on_barrier(uint32_t barrier, uint32_t parity) {
  constexpr uint32_t kMostNanoseconds = 10'000'000;
  uint32_t over;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(over)
        : "r"(barrier), "r"(parity), "r"(kMostNanoseconds)
        : "memory");
  } while (over == 0);
}

/// Registers of each thread of the warpgroup from here on, a multiple of 8.
template <int N>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace fold::cuda::ptx
