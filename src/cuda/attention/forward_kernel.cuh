#pragma once
#include <type_traits>

#include "cuda/attention/forward_rows.cuh"
#include "cuda/attention/forward_shape.cuh"

// out and lse. Persistent thread blocks take items (a tile of rows of one head); one warp copies Q, K and V, the
// consumer warpgroups own 64 rows each and take turns, so that one's softmax runs beside another's products. A row
// meets its key tiles from the last to the first, cut from the sequence's first key, so its bits depend on its sequence
// alone.
namespace fold::cuda::attention {

template <typename Shape>
struct ForwardKernel {
  using T = typename Shape::Element;
  using Shared = ForwardShared<Shape>;
  static constexpr int kStages = Shape::kStages, kItems = Shape::kItems, kKeys = Shape::kKeys, kBlocks = Shape::kBlocks;
  static constexpr uint32_t kTileBytes = sizeof(Shared::k) / kStages;

  const Forward& f;
  Shared& shared;

  static __device__ uint32_t address(const void* p) { return ptx::shared_address(p); }

  __device__ void init_barriers() {
    constexpr int kConsumerWarps = 4 * Shape::kConsumers;
    ptx::init_barrier(address(&shared.q_full), 1);
    ptx::init_barrier(address(&shared.q_empty), kConsumerWarps);
    for (int i = 0; i < kStages; ++i) {
      ptx::init_barrier(address(&shared.k_full[i]), 1);
      ptx::init_barrier(address(&shared.v_full[i]), 1);
      ptx::init_barrier(address(&shared.v_clean[i]), Shape::kCleaners);
      ptx::init_barrier(address(&shared.k_empty[i]), kConsumerWarps);
      ptx::init_barrier(address(&shared.v_empty[i]), kConsumerWarps);
    }
    for (int i = 0; i < kItems; ++i) {
      ptx::init_barrier(address(&shared.item_full[i]), 1);
      ptx::init_barrier(address(&shared.item_empty[i]), kConsumerWarps + Shape::kCleaners + 1);
    }
    ptx::fence_barrier_init();
  }

  /// A number that all threads of the warp have, known as such to the compiler.
  static __device__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

  /// Once per warp.
  static __device__ void arrive(const uint64_t& barrier) {
    if (threadIdx.x % 32 == 0) ptx::arrive(address(&barrier));
  }

  /// The next item, for every warp but the one that takes them; until end_item().
  __device__ const Item& next_item(const Ring<kItems>& ring) {
    ptx::wait_barrier(address(&shared.item_full[ring.at()]), ring.parity());
    return shared.items[ring.at()];
  }
  __device__ void end_item(Ring<kItems>& ring) {
    __syncwarp();
    arrive(shared.item_empty[ring.at()]);
    ++ring.count;
  }

  __device__ void copy_tile(const CUtensorMap& map, void* to, uint64_t& barrier, int row, int head, int sequence,
                            int rows) {
    ptx::expect_bytes(address(&barrier), static_cast<uint32_t>(kBlocks * rows * ptx::kSwizzleRow));
    for (int block = 0; block < kBlocks; ++block) {
      ptx::copy_box(address(to) + static_cast<uint32_t>(block * rows * ptx::kSwizzleRow), map, address(&barrier),
                    64 * block, row, head, sequence);
    }
  }

  /// One thread, while another one initialises the barriers.
  __device__ void take_first_item() { set_item(shared.items[0], f.params, f.schedule, blockIdx.x, kKeys); }

  /// One thread: fills the ring of items behind the first.
  __device__ void take_items() {
    Ring<kItems> items;
    while (true) {
      const bool last = shared.items[items.at()].sequence < 0;
      ptx::arrive(address(&shared.item_full[items.at()]));
      if (last) return;
      ++items.count;
      const unsigned taken = f.schedule.taken != nullptr ? atomicAdd(f.schedule.taken, 1) : 0;
      ptx::sleep_on_barrier(address(&shared.item_empty[items.at()]), items.parity() ^ 1);
      set_item(shared.items[items.at()], f.params, f.schedule, gridDim.x + taken, kKeys);
    }
  }

  /// One thread.
  __device__ void copy_items(const CUtensorMap& q_map, const CUtensorMap& k_map, const CUtensorMap& v_map) {
    const int group = static_cast<int>(f.params.heads / f.params.kv_heads);
    Ring<kItems> items;
    Ring<1> queries;
    Ring<kStages> keys, values;
    while (true) {
      const Item& item = next_item(items);
      if (item.sequence < 0) return;
      const int head = item.head / group;
      const int sequence = f.params.cu_seqlens_q == nullptr ? item.sequence : 0;
      const auto copy_next = [&](const CUtensorMap& map, auto& places, uint64_t* full, uint64_t* empty,
                                 Ring<kStages>& ring, int tile) {
        const int at = ring.at();
        ptx::sleep_on_barrier(address(&empty[at]), ring.parity() ^ 1);
        copy_tile(map, places[at], full[at], item.k_begin + tile * kKeys, head, sequence, kKeys);
        ++ring.count;
      };
      const auto copy_keys = [&](int tile) { copy_next(k_map, shared.k, shared.k_full, shared.k_empty, keys, tile); };
      // In the order of use: the next tile's keys before a tile's values.
      if (item.tiles_begin < item.tiles_end) {
        ptx::sleep_on_barrier(address(&shared.q_empty), queries.parity() ^ 1);
        ++queries.count;
        copy_tile(q_map, shared.q, shared.q_full, item.q_begin + item.first_row, item.head, sequence, Shape::kRows);
        copy_keys(item.tiles_end - 1);
      }
      for (int tile = item.tiles_end - 1; tile >= item.tiles_begin; --tile) {
        if (tile > item.tiles_begin) copy_keys(tile - 1);
        copy_next(v_map, shared.v, shared.v_full, shared.v_empty, values, tile);
      }
      ptx::arrive(address(&shared.item_empty[items.at()]));
      ++items.count;
    }
  }

  /// Cleaners: where a tile is masked, some rows must not see some values, which may lie behind the sequence's end, in
  /// another sequence. A weight of zero times such a value is zero, unless the value is not finite: that one is set to
  /// zero, and its key is remembered for the rows that do see it.
  __device__ void clean() {
    Ring<kItems> items;
    Ring<kStages> stages;
    while (true) {
      const Item& item = next_item(items);
      if (item.sequence < 0) return;
      for (int tile = item.tiles_end - 1; tile >= item.tiles_begin; --tile) {
        ptx::sleep_on_barrier(address(&shared.v_full[stages.at()]), stages.parity());
        __syncwarp();  // no lane sleeps on when another gives the tile away
        if (item.masked(tile)) clean_values(stages.at());
        arrive(shared.v_clean[stages.at()]);
        ++stages.count;
      }
      end_item(items);
    }
  }

  __device__ void clean_values(int stage) {
    const int cleaner = static_cast<int>(threadIdx.x) / 32 - 2, lane = threadIdx.x % 32;
    uint32_t* const broken = shared.broken[stage][cleaner];
    if (lane < Shape::kKeyWords) broken[lane] = 0;
    __syncwarp();
    auto* const chunks = reinterpret_cast<uint4*>(shared.v[stage]);
#pragma unroll 2
    for (int i = cleaner * 32 + lane; i < static_cast<int>(kTileBytes / 16); i += Shape::kCleaners * 32) {
      uint4 chunk = chunks[i];
      const bool finite =
          (not_finite<T>(chunk.x) | not_finite<T>(chunk.y) | not_finite<T>(chunk.z) | not_finite<T>(chunk.w)) == 0;
      if (finite) continue;
      const int key = i / 8 % kKeys;
      atomicOr(&broken[key / 32], 1u << key % 32);
      for (uint32_t* word : {&chunk.x, &chunk.y, &chunk.z, &chunk.w}) {
        *word &= ~(not_finite<T>(*word) / 0x8000 * 0xffff);
      }
      chunks[i] = chunk;
    }
    ptx::fence_async();
    __syncwarp();
  }

  /// Turns of the consumers: each issues its products when the others have issued theirs; an item's last value product
  /// takes none.
  static __device__ void wait_turn(int consumer) { ptx::sync_named(1 + consumer, 128 * Shape::kConsumers); }
  static __device__ void end_turn(int consumer) {
#pragma unroll
    for (int i = 1; i < Shape::kConsumers; ++i) {
      ptx::arrive_named(1 + (consumer + i) % Shape::kConsumers, 128 * Shape::kConsumers);
    }
  }

  __device__ void multiply_keys(float (&s)[kKeys / 2], int consumer, int stage) {
    const uint64_t q = ptx::operand<ptx::Major::k>(address(shared.q) + ptx::anew(consumer) * 64 * ptx::kSwizzleRow);
    const uint64_t k = ptx::operand<ptx::Major::k>(address(shared.k[stage]));
    ptx::wgmma_arrive();
#pragma unroll
    for (int i = 0; i < Shape::kDim / 16; ++i) {
      const int block = i / 4 * ptx::kSwizzleRow, within = i % 4 * 32;
      ptx::wgmma<T, kKeys, ptx::Major::k, ptx::Major::k>(s, ptx::further(q, block * Shape::kRows + within),
                                                         ptx::further(k, block * kKeys + within), i > 0);
    }
    ptx::wgmma_commit();
  }

  /// Steps Begin .. End - 1 of a value product, 16 keys each.
  template <int Begin, int End>
  __device__ void add_values(float (&o)[Shape::kDim / 2], const uint32_t (&p)[Shape::kSteps][4], int stage) {
    const uint64_t v = ptx::operand<ptx::Major::mn>(address(shared.v[stage]), kKeys * ptx::kSwizzleRow);
    ptx::wgmma_arrive();
#pragma unroll
    for (int i = Begin; i < End; ++i) {
      ptx::wgmma<T, Shape::kDim, ptx::Major::mn>(o, p[i], ptx::further(v, i * 16 * ptx::kSwizzleRow), true);
    }
    ptx::wgmma_commit();
  }

  __device__ void consume() {
    const int consumer = uniform(static_cast<int>(threadIdx.x) / 128) - 1;
    Ring<kItems> items;
    Ring<kStages> stages;
    Ring<1> queries;
#pragma unroll 1
    for (int before = 0; before < consumer; ++before) ptx::arrive_named(1 + before, 128 * Shape::kConsumers);
    while (true) {
      const Item& item = next_item(items);
      if (item.sequence < 0) return;
      Rows<T, Shape::kDim, kKeys> rows(f, item, consumer);
      if (item.tiles_begin < item.tiles_end) {
        ptx::wait_barrier(address(&shared.q_full), queries.parity());
        ++queries.count;
        sum_tiles(rows, item, consumer, stages);
      }
      rows.write();
      end_item(items);
    }
  }

  __device__ void sum_tiles(Rows<T, Shape::kDim, kKeys>& rows, const Item& item, int consumer, Ring<kStages>& stages) {
    constexpr int kAhead = Shape::kStepsAhead, kSteps = Shape::kSteps;
    float s[kKeys / 2];
    uint32_t p[kSteps][4];
    const int first = uniform(item.tiles_begin), whole_begin = uniform(item.whole_begin);
    const int whole_end = uniform(item.whole_end);
    // Item::masked, from registers.
    const auto masked = [&](int tile) { return tile < whole_begin || tile >= whole_end; };
    int tile = uniform(item.tiles_end) - 1;
    const auto multiplied_keys = [&] {
      ptx::keep_registers(s);
      arrive(shared.k_empty[stages.at()]);
      if (tile == first) arrive(shared.q_empty);
    };
    ptx::wait_barrier(address(&shared.k_full[stages.at()]), stages.parity());
    wait_turn(consumer);
    multiply_keys(s, consumer, stages.at());
    end_turn(consumer);
    ptx::wgmma_wait<0>();
    multiplied_keys();
    rows.sign_and_mask(s, tile, masked(tile));
    rows.weigh(s, rows.raise(s, rows.largest(s)));
    rows.round(s, p);
    bool keys_there = false, values_there = false;
    // A tile's logits are multiplied, and their maxima taken, beside the value product of the tile before; they become
    // weights behind it, beside other warpgroups' products. The code is there twice, so that few branches stand between
    // the products of most tiles: for a tile without a mask behind one without, and for the others.
    const auto add_tile = [&](auto whole) {
      constexpr bool kWhole = decltype(whole)::value;
      const Ring<kStages> before = stages;
      ++stages.count;
      if (!keys_there) ptx::wait_barrier(address(&shared.k_full[stages.at()]), stages.parity());
      wait_turn(consumer);
      multiply_keys(s, consumer, stages.at());
      if (!values_there) ptx::wait_barrier(address(&shared.v_clean[before.at()]), before.parity());
      add_values<0, kAhead>(rows.sums, p, before.at());
      // Asked before the answers are needed, as they take a while. This thread has waited for the phases before these,
      // so a parity is enough to tell.
      const Ring<kStages> next{stages.count + 1};
      keys_there = tile > first && ptx::phase_is_over(address(&shared.k_full[next.at()]), next.parity());
      values_there = ptx::phase_is_over(address(&shared.v_clean[stages.at()]), stages.parity());
      if constexpr (kAhead == kSteps) end_turn(consumer);
      ptx::wgmma_wait<1>();
      multiplied_keys();
      // Above head dim 64 the value product's later steps would wait in a full queue: the maxima are taken before they
      // are issued.
      PerRow most;
      if constexpr (kWhole) most = rows.largest(s);
      if constexpr (kAhead < kSteps) {
        add_values<kAhead, kSteps>(rows.sums, p, before.at());
        end_turn(consumer);
      }
      if constexpr (!kWhole) {
        rows.sign_and_mask(s, tile, masked(tile));
        most = rows.largest(s);
      }
      const Reference reference = rows.raise(s, most);
      ptx::wgmma_wait<0>();
      ptx::keep_registers(rows.sums);
      if constexpr (!kWhole) {
        if (masked(tile + 1)) rows.add_broken(tile + 1, shared.broken[before.at()]);
      }
      arrive(shared.v_empty[before.at()]);
      rows.scale(reference);
      rows.weigh(s, reference);
      rows.round(s, p);
    };
#pragma unroll 1
    while (--tile >= first) {
      if (masked(tile) || masked(tile + 1) || f.sign != 1) {
        add_tile(std::false_type{});
      } else {
        add_tile(std::true_type{});
      }
    }
    if (!values_there) ptx::wait_barrier(address(&shared.v_clean[stages.at()]), stages.parity());
    add_values<0, kSteps>(rows.sums, p, stages.at());
    ptx::wgmma_wait<0>();
    ptx::keep_registers(rows.sums);
    if (masked(first)) rows.add_broken(first, shared.broken[stages.at()]);
    arrive(shared.v_empty[stages.at()]);
    ++stages.count;
  }
};

template <typename Shape>
__global__ __launch_bounds__(Shape::kThreads, 1) void forward_kernel(const __grid_constant__ Forward f,
                                                                     const __grid_constant__ CUtensorMap q_map,
                                                                     const __grid_constant__ CUtensorMap k_map,
                                                                     const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  ForwardKernel<Shape> kernel{f, *reinterpret_cast<ForwardShared<Shape>*>(shared_bytes)};
  if (threadIdx.x == 0) kernel.take_first_item();
  if (threadIdx.x == 32) {
    ptx::prefetch_map(q_map);
    ptx::prefetch_map(k_map);
    ptx::prefetch_map(v_map);
    kernel.init_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::give_registers<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) kernel.take_items();
    if (threadIdx.x == 32) kernel.copy_items(q_map, k_map, v_map);
    if (threadIdx.x >= 64) kernel.clean();
  } else {
    ptx::take_registers<Shape::kConsumerRegisters>();
    kernel.consume();
  }
}

}  // namespace fold::cuda::attention
