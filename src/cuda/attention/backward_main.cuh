#pragma once
#include "cuda/attention/backward_copies.cuh"
#include "cuda/attention/backward_keys.cuh"
#include "cuda/ptx/launch_order.cuh"

// The main loop of the backward. A CTA owns a tile of 128 keys of one KV head: it walks the tiles of query rows that
// see its keys, of one of the group's query heads after the other (or a part of those tiles), in order, so dK and dV
// are sums of its own; its shares of dQ are rounded onto the rows' grids and added as integers.
//
// Two warpgroups have 64 keys each (backward_keys.cuh). Of a third one, a thread copies tiles and two warps send dQ
// (backward_copies.cuh).
namespace fold::cuda::backward {

/// T: of the inputs; G: of the gradients.
template <typename T, typename G, int D>
__global__ void __launch_bounds__(kMainThreads, 1)
    main_kernel(const Args a, const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap dout_map) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& sh = *reinterpret_cast<Shared<D>*>(memory);
  ptx::let_next_kernel_start();
  const bool copies = threadIdx.x == kKeyThreads;
  if (copies) {  // everything that leads to the first copies, by the thread that starts them
    const auto barrier = [](uint64_t& at, uint32_t arrivals) { ptx::init_barrier(ptx::shared_address(&at), arrivals); };
    barrier(sh.k_full, 1);
    barrier(sh.v_full, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier(sh.q_full[i], 1);
      barrier(sh.dout_full[i], 1);
      barrier(sh.empty[i], kKeyWarps);
    }
    for (uint64_t& full : sh.ds_full) barrier(full, kKeyWarps);
    for (int i = 0; i < 2; ++i) {
      barrier(sh.dq_full[i], kKeyWarps / 2);
      barrier(sh.dq_empty[i], 1);
    }
    ptx::fence_barrier_init();
    sh.task = find_task<D>(a, blockIdx.x);
  }
  ptx::wait_for_earlier_kernels();
  if (copies && sh.task.steps > 0) {
    copy_tiles<D>(a, sh, 0, min(kStages, sh.task.steps), q_map, k_map, v_map, dout_map);
  }
  __syncthreads();
  if (sh.task.steps < 0) return;
  if (threadIdx.x >= kKeyThreads) {
    ptx::give_registers<24>();
    const int warp = static_cast<int>(threadIdx.x - kKeyThreads) / 32;
    if (sh.task.steps == 0) return;
    if (copies) copy_tiles<D>(a, sh, kStages, sh.task.steps, q_map, k_map, v_map, dout_map);
    if (warp == 1 || warp == 2) send_pieces<D>(a, sh, warp - 1);
  } else {
    ptx::take_registers<240>();
    if (sh.task.steps > 0) {
      sum_keys<T, G, D>(a, sh);
    } else {
      const float zeros[D / 2] = {};
      store_keys<G, D>(a, sh.task, zeros, zeros);
    }
  }
}

}  // namespace fold::cuda::backward
