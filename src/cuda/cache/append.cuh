#pragma once
#include "cuda/cache/blocks.cuh"
#include "cuda/cache/bringing.cuh"
#include "cuda/cache/row_warp.cuh"
#include "cuda/ptx/launch_order.cuh"

// The cache write of a decoding step (docs/cuda.md). A step brings few keys to a request, so what counts is the time
// until the last of them is written: a thread block has one KV head of one block of a request, its groups of lanes a
// row of K or V each, and the rows are read as soon as the request's length is known.
namespace fold::cuda::cache {

struct Append {
  Write write;  // cu_seqlens null; counts, lengths: written here
  Bringing bringing;
  int32_t* lengths;  // (B,) keys after the step
  int blocks;        // that a request can touch
};

/// slot: of the tile's first key.
template <int D>
__device__ SidePlanes tile_planes(const plan::HeadPage& page, Side side, int slot) {
  const auto at = [slot](auto* plane, int width) { return plane == nullptr ? nullptr : plane + slot * width; };
  if (side == kK) return {at(page.k_h, D / 2), at(page.k_l, D / 2), at(page.k_b, D), at(page.k_scale, 1)};
  return {at(page.v_h, D / 2), at(page.v_l, D / 2), at(page.v_b, D), at(page.v_scale, 1)};
}

template <int D>
struct AppendShared {
  float products[kTile * D];  // of V: reading * mean_unit, at product_at
  BlockSums<D> sums;
};

/// What a complete block's summary adds up.
template <int D>
__device__ void stored_products(const SidePlanes& v, float* products) {
  using Row = WideRow<D>;
  constexpr int kGroups = BlockShape<D>::kThreads / Row::kLanes;
  const int group = static_cast<int>(threadIdx.x) / Row::kLanes, lane = static_cast<int>(threadIdx.x) % Row::kLanes;
#pragma unroll 4
  for (int row = group; row < kTile; row += kGroups) {
    const float unit = numerics::mean_unit(v.scale[numerics::scale_slot(row)]);
#pragma unroll
    for (int word = 0; word < Row::kWords; ++word) {
      const int channel = word * Row::kStep + 4 * lane;
      const float4 r = stored_readings<D>(v, row, channel);
      *reinterpret_cast<float4*>(products + product_at<D>(row, channel)) = make_float4(
          numerics::mul(unit, r.x), numerics::mul(unit, r.y), numerics::mul(unit, r.z), numerics::mul(unit, r.w));
    }
  }
}

/// The bound and, with the tail model, the summary of a block whose rows are all there. Not inlined: most steps do
/// without, and registers are short.
template <int D>
__device__ __noinline__ void complete_block(const plan::CacheView& cache, Location at, int head, AppendShared<D>& s) {
  const plan::HeadPage page = plan::head_page(cache, at.page, head);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 32) {
    const uint16_t bound = block_bound(page.k_scale + at.slot, page.v_scale + at.slot, thread);
    if (thread == 0) page.bound[at.slot / kTile] = bound;
  }
  if (!cache.layout.tail) return;
  clear_sums<D>(s.sums);
  stored_products<D>(tile_planes<D>(page, kV, at.slot), s.products);
  __syncthreads();
  summarise<D>(page, at.slot, s.products, s.sums);
}

/// Grid: for every request and block that it can touch, its heads.
template <int D>
__global__ void __launch_bounds__(BlockShape<D>::kThreads, 1024 / BlockShape<D>::kThreads)
    append_rows(const __grid_constant__ Append a) {
  using Row = WideRow<D>;
  constexpr int kGroups = BlockShape<D>::kThreads / Row::kLanes, kOfWarp = 32 / Row::kLanes;
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<AppendShared<D>*>(shared_bytes);
  const plan::CacheWriteParams& p = a.write.params;
  const int thread = static_cast<int>(threadIdx.x), heads = static_cast<int>(p.cache.layout.n_kv_heads);
  const int head = static_cast<int>(blockIdx.x) % heads, at_block = static_cast<int>(blockIdx.x) / heads;
  const int request = at_block / a.blocks, block = at_block % a.blocks;
  const Brought brought = tokens_brought(a.bringing, request);
  if (head == 0 && block == 0 && thread == 0) {
    a.lengths[request] = static_cast<int32_t>(brought.before + brought.count);
    a.write.counts[request] = brought.count;
  }
  if (blockIdx.x == 0) clear_fit_counters(a.write);

  const int64_t start = (brought.before / kTile + block) * kTile;
  const int64_t end = min(brought.before + brought.count, a.write.room);
  const int first = static_cast<int>(max(brought.before - start, int64_t{0}));
  const int count = static_cast<int>(min(end - start, int64_t{kTile})) - first;
  if (count <= 0) return;
  const Location at = locate_key(a.write, request, start);
  const plan::HeadPage page = plan::head_page(p.cache, at.page, head);
  const int64_t first_token = token_range(a.write, request).first + (start + first - brought.before);
  const int group = thread / Row::kLanes, lane = thread % Row::kLanes;
  // All lanes of a warp take part while one of its groups has a row.
  for (int i = group; i / kOfWarp * kOfWarp < 2 * count; i += kGroups) {
    const Side side = i % 2 == 0 ? kK : kV;
    const int64_t token = first_token + i / 2;
    const Source from = source_of(p, side);
    const int64_t slot = at.page * p.cache.layout.page_size + at.slot + first + i / 2;
    bool stored = i < 2 * count;
    Row row = {};
    if (stored) {
#pragma unroll
      for (int word = 0; word < Row::kWords; ++word) {
        load_four(from.data, from.dtype, from.element(static_cast<int>(token), head) + word * Row::kStep + 4 * lane,
                  row.x[word]);
      }
      stored = at.page >= 0 && (p.slot_mapping == nullptr || p.slot_mapping[token] == slot);
    }
    rotate_row<D>(row, lane);
    const uint16_t scale = scale_row<Row::kLanes>(row.x);
    if (stored) store_row<D>(row, scale, tile_planes<D>(page, side, at.slot), first + i / 2, lane);
  }
  if (first + count != kTile || at.page < 0) return;
  __syncthreads();  // all rows of the block are there
  complete_block<D>(p.cache, at, head, s);
}

}  // namespace fold::cuda::cache
