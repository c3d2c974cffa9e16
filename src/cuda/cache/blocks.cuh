#pragma once
#include "cuda/cache/requests.cuh"
#include "cuda/cache/row.cuh"
#include "cuda/ptx/launch_order.cuh"
#include "numerics/block.h"
#include "numerics/summary.h"

// New rows and the summaries of the blocks they complete (docs/numerics.md, sections 1 and 2). A thread block has one
// 64-key block of one request and a few KV heads; nothing it writes is read by another one.
namespace fold::cuda::cache {

template <int D>
struct BlockShape : RowShape<D> {
  static constexpr int kThreads = kTile * RowShape<D>::kLanes;  ///< one group of lanes a key
  static constexpr int kHalf = kThreads / 2;                    ///< threads for each half of a summary
  static constexpr int kResident = 768 / kThreads;              ///< thread blocks of a multiprocessor: 80 registers
  static_assert(D <= kHalf);
};

/// A thread block's work. It lies in shared memory because registers are short.
struct BlockTask {
  Request request;
  int64_t page, start;  // the block's page and its first key
  uint8_t* bytes;       // of the page
  int slot;             // of the first key
  int first_head, head_count;
  int first_row, first_new, count;  // rows taken of each head, the call's from first_new on
};

/// What a summary is made of, beside the products.
template <int D>
struct BlockSums {
  uint32_t codes[4][D / 8];  // of K, see add_codes
  uint32_t mean_magnitude;   // bits of the mean row's largest magnitude
};

template <int D>
__device__ void clear_sums(BlockSums<D>& sums) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 4 * (D / 8)) sums.codes[0][thread] = 0;
  if (thread == 0) sums.mean_magnitude = 0;
}

template <int D>
struct BlockShared {
  Fetched<BlockShape<D>::kThreads> fetched;
  float products[kTile * D];  // of V: reading * mean_unit, at product_at
  BlockSums<D> sums[2];       // for one head, and zeros for the next
  LocateShared locate;
  BlockTask task;
};

/// Where the product of a row's channel stands: a lane's 16-byte pieces are permuted so that eight lanes, which write a
/// piece each, use all memory banks.
template <int D>
__device__ int product_at(int row, int channel) {
  constexpr int kLanes = RowShape<D>::kLanes;
  const int lane = channel / 16 % kLanes;
  const int swap = (row * kLanes + lane) / 2 % 4;
  return row * D + (channel ^ (swap << 2));
}

/// Blocks that get new keys.
__device__ inline unsigned touched_blocks(const Request& r) {
  if (r.new_length == r.length) return 0;
  return static_cast<unsigned>((r.new_length - 1) / kTile - r.length / kTile + 1);
}

enum Side { kK, kV };

/// K or V of a call.
struct Source {
  const void* data;
  DType dtype;
  int64_t stride_t, stride_h;

  __device__ int64_t element(int token, int head) const { return token * stride_t + head * stride_h; }
  __device__ bool ahead() const { return can_fetch(data, dtype, stride_t, stride_h); }
};

__device__ inline Source source_of(const plan::CacheWriteParams& p, Side side) {
  if (side == kK) return {p.k, p.k_dtype, p.k_stride_t, p.k_stride_h};
  return {p.v, p.v_dtype, p.v_stride_t, p.v_stride_h};
}

/// A group of lanes' key and head: where they come from and where they go.
struct KeyAt {
  int token;  // -1: the call does not bring it
  int head, row;
};

/// Fetches a key's row, where it can be done ahead.
template <int D>
__device__ void fetch_row(const plan::CacheWriteParams& p, Side side, const KeyAt& key, int lane, BlockShared<D>& s) {
  const Source from = source_of(p, side);
  if (key.token >= 0 && from.ahead()) fetch_part<D>(from.data, from.element(key.token, key.head), lane, s.fetched);
}

/// The row that was fetched, or could not be.
template <int D>
__device__ void take_row(const plan::CacheWriteParams& p, Side side, const KeyAt& key, int lane,
                         const BlockShared<D>& s, RowPart<D>& x) {
  const Source from = source_of(p, side);
  const int64_t element = from.element(key.token, key.head);
  const auto* halves = static_cast<const uint16_t*>(from.data) + element;
  if (from.dtype == DType::f32) {
    load_part<D>(
        static_cast<const float*>(from.data) + element, lane, [](float v) { return v; }, x);
  } else if (from.dtype == DType::bf16) {
    if (from.ahead()) {
      convert_fetched<D, true>(s.fetched, x);
    } else {
      load_part<D>(halves, lane, from_half<true>, x);
    }
  } else {
    if (from.ahead()) {
      convert_fetched<D, false>(s.fetched, x);
    } else {
      load_part<D>(halves, lane, from_half<false>, x);
    }
  }
}

/// Writes a warp's new rows of K or V. products or null: also leaves each row's products there, those of earlier keys
/// from the planes. fetch_next: fetches the next row; lane: within the row.
template <int D, typename FetchNext>
__device__ void write_rows(const plan::CacheWriteParams& p, Side side, const KeyAt& key, int lane, BlockShared<D>& s,
                           const FetchNext& fetch_next, float* products) {
  using Shape = RowShape<D>;
  const BlockTask& page = s.task;
  const PageSections& sections = p.cache.sections;
  const int64_t first = key.head * p.cache.layout.page_size + page.slot, index = first + key.row;
  const auto h = plan::section<uint8_t>(page.bytes, side == kK ? sections.k_h : sections.v_h, index * (D / 2));
  const auto l = plan::section<uint8_t>(page.bytes, side == kK ? sections.k_l : sections.v_l, index * (D / 2));
  const auto b = plan::section<int8_t>(page.bytes, side == kK ? sections.k_b : sections.v_b, index * D);
  const auto stored_scale = plan::section<uint16_t>(page.bytes, side == kK ? sections.k_scale : sections.v_scale,
                                                    first + numerics::scale_slot(key.row));
  const bool is_new = key.token >= 0;
  RowPart<D> x = {};
  if (is_new) take_row<D>(p, side, key, lane, s, x);
  fetch_next();
  uint16_t scale = 0;
  if (__any_sync(kWarp, is_new)) {
    rotate_row<D>(x, lane);
    scale = scale_row<RowShape<D>::kLanes>(x);
  }
  if (!is_new) {
    if (products == nullptr) return;
    const float unit = numerics::mean_unit(*stored_scale);
    for (int channel = lane; channel < D; channel += Shape::kLanes) {
      const float reading = static_cast<float>(numerics::reading({h, l, b}, channel));
      products[product_at<D>(key.row, channel)] = numerics::mul(unit, reading);
    }
    return;
  }
  if (lane == 0) *stored_scale = scale;
  const Divisor divisor = divisor_of(scale);
#pragma unroll
  for (int run = 0; run < Shape::kRuns; ++run) {
    const int channel = run * Shape::kStep + lane * Shape::kRun;
    uint32_t a_bytes[4], b_bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float b_four[4];
      split_four(x[run] + 4 * i, divisor, b_four);
      a_bytes[i] = low_bytes(x[run] + 4 * i);
      b_bytes[i] = low_bytes(b_four);
      if (products == nullptr) continue;
      const float unit = numerics::mean_unit(scale);
      const float4 r = finest_readings(x[run] + 4 * i, b_four, l != nullptr, b != nullptr);
      *reinterpret_cast<float4*>(products + product_at<D>(key.row, channel + 4 * i)) = make_float4(
          numerics::mul(unit, r.x), numerics::mul(unit, r.y), numerics::mul(unit, r.z), numerics::mul(unit, r.w));
    }
    store_words(h + channel / 2, {pack_h(a_bytes[0], a_bytes[1]), pack_h(a_bytes[2], a_bytes[3])});
    if (l != nullptr) {
      store_words(l + channel / 2, {pack_l(a_bytes[0], a_bytes[1]), pack_l(a_bytes[2], a_bytes[3])});
    }
    if (b != nullptr) store_words(b + channel, b_bytes);
  }
}

/// numerics::block_bound, by one warp. k_scale, v_scale: (64,)
__device__ inline uint16_t block_bound(const uint16_t* k_scale, const uint16_t* v_scale, int lane) {
  uint32_t bound = 0;
#pragma unroll
  for (int i = 0; i < kTile; i += 32) {
    bound = max(bound, static_cast<uint32_t>(v_scale[i + lane]));
    if (k_scale[i + lane] == numerics::kBf16Nan) bound = numerics::kBf16Nan;
  }
  return static_cast<uint16_t>(__reduce_max_sync(kWarp, bound));
}

/// Adds K's codes up, by kHalf threads. A word of plane h holds channels 8 i .. 8 i + 7; sums 0 and 1 are of its high
/// nibbles in bytes 0, 2 and 1, 3, sums 2 and 3 of the low ones, 16 bits each. k_h: (64, D/2)
template <int D>
__device__ void add_codes(const uint8_t* k_h, int thread, BlockSums<D>& sums) {
  constexpr int kWords = D / 8, kGroups = BlockShape<D>::kHalf / kWords, kRows = kTile / kGroups;
  static_assert(kRows * 15 < 256);  // a byte holds a thread's sum
  const int word = thread % kWords, first = thread / kWords * kRows;
  uint32_t high = 0, low = 0;
#pragma unroll
  for (int row = first; row < first + kRows; ++row) {
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(k_h + row * (D / 2) + 4 * word);
    high += codes >> 4 & 0x0F0F0F0Fu;
    low += codes & 0x0F0F0F0Fu;
  }
  atomicAdd(&sums.codes[0][word], high & 0x00FF00FFu);
  atomicAdd(&sums.codes[1][word], high >> 8 & 0x00FF00FFu);
  atomicAdd(&sums.codes[2][word], low & 0x00FF00FFu);
  atomicAdd(&sums.codes[3][word], low >> 8 & 0x00FF00FFu);
}

template <int D>
__device__ int code_sum(int channel, const BlockSums<D>& sums) {
  const int byte = channel / 2;
  const uint32_t pair = sums.codes[2 * (channel % 2) + byte % 2][byte / 4];
  return static_cast<int>(pair >> (byte % 4 / 2 * 16) & 0xFFFF);
}

/// The summary of a block whose rows, and products, are all there. page: of this head; slot: of the block's first key.
template <int D>
__device__ void summarise(const plan::HeadPage& page, int64_t slot, float* products, BlockSums<D>& sums) {
  using Shape = BlockShape<D>;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t block = slot / kTile;
  float mean = 0.0f;
  if (thread < D) {
#pragma unroll 16
    for (int row = 0; row < kTile; ++row) mean = numerics::add(mean, products[product_at<D>(row, thread)]);
    const uint32_t largest = __reduce_max_sync(kWarp, numerics::bits_of(mean) & 0x7FFFFFFFu);
    if (thread % 32 == 0) atomicMax(&sums.mean_magnitude, largest);
  } else if (thread >= Shape::kHalf) {
    add_codes<D>(page.k_h + slot * (D / 2), thread - Shape::kHalf, sums);
  }
  __syncthreads();
  if (thread >= D) return;
  const uint16_t scale = numerics::row_scale(numerics::float_of(sums.mean_magnitude));
  const float e = numerics::from_bf16(scale);
  const bool poisoned = scale == numerics::kBf16Nan;
  const float a = poisoned ? 0.0f : numerics::clamp_int8(numerics::rne(numerics::div(mean, e)));
  page.mean[block * D + thread] = static_cast<int8_t>(a);
  page.ubar[block * D + thread] = numerics::mean_code(code_sum<D>(thread, sums));
  if (thread == 0) page.mean_scale[block] = scale;
}

/// What this thread block of write_blocks does; false: nothing.
__device__ inline bool find_task(const Write& w, LocateShared& shared, BlockTask& task) {
  const plan::CacheView& cache = w.params.cache;
  const int heads = static_cast<int>(cache.layout.n_kv_heads), shares = (heads + w.head_step - 1) / w.head_step;
  const auto blocks = [&w](int request) { return touched_blocks(request_of(w, request)); };
  const Located place = locate(blockIdx.x / shares, w.params.batch, blocks, shared);
  if (place.owner < 0) return false;
  if (threadIdx.x == 0) {
    const Request r = request_of(w, place.owner);
    const int64_t start = (r.length / kTile + place.offset) * kTile;
    const Location at = locate_key(w, place.owner, start);
    const int first_head = static_cast<int>(blockIdx.x) % shares * w.head_step;
    const int first_new = static_cast<int>(max(r.length - start, int64_t{0}));
    const int last_new = static_cast<int>(min(r.new_length - start, int64_t{kTile}));
    // Where there are summaries, all rows of one head after the other; else the new ones of all heads.
    const int first_row = cache.layout.tail && last_new == kTile ? 0 : first_new;
    task = {.request = r,
            .page = at.page,
            .start = start,
            .bytes = cache.pages + at.page * cache.page_stride,
            .slot = at.slot,
            .first_head = first_head,
            .head_count = min(w.head_step, heads - first_head),
            .first_row = first_row,
            .first_new = first_new,
            .count = last_new - first_row};
  }
  __syncthreads();
  return task.page >= 0;
}

/// Grid: for every block that a call may touch (touched_blocks, in the requests' order), its heads, head_step at once.
template <int D>
__global__ void __launch_bounds__(BlockShape<D>::kThreads, BlockShape<D>::kResident)
    write_blocks(const __grid_constant__ Write w) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  using Shape = BlockShape<D>;
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<BlockShared<D>*>(shared_bytes);
  const plan::CacheWriteParams& p = w.params;
  BlockTask& task = s.task;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % Shape::kLanes;
  if (blockIdx.x == 0) clear_fit_counters(w);
  clear_sums(s.sums[0]);
  if (!find_task(w, s.locate, task)) return;

  const bool complete = task.first_row + task.count == kTile, summarised = complete && p.cache.layout.tail;
  const auto key_of = [&](int pass) -> KeyAt {
    const int group = thread / Shape::kLanes;
    int head = pass, row = group;  // of kTile rows a head
    if (task.count != kTile) {
      head = (pass * kTile + group) / task.count;
      row = task.first_row + (pass * kTile + group) % task.count;
    }
    const KeyAt padding = {-1, task.first_head + head, row};
    if (head >= task.head_count || row < task.first_new) return padding;
    const int token = token_of(w, task.request, task.start + row - task.request.length);
    const int64_t slot = task.page * p.cache.layout.page_size + task.slot + row;
    if (p.slot_mapping != nullptr && p.slot_mapping[token] != slot) return padding;
    return {token, task.first_head + head, row};
  };
  const int passes = (task.count * task.head_count + kTile - 1) / kTile;
  fetch_row<D>(p, kK, key_of(0), lane, s);
#pragma unroll 1
  for (int step = 0; step < 2 * passes; ++step) {  // K, then V
    const Side side = step % 2 == 0 ? kK : kV;
    const int pass = step / 2;
    const auto fetch_next = [&] {
      if (step + 1 < 2 * passes) fetch_row<D>(p, side == kK ? kV : kK, key_of((step + 1) / 2), lane, s);
    };
    write_rows<D>(p, side, key_of(pass), lane, s, fetch_next, side == kV && summarised ? s.products : nullptr);
    if (side == kK || !summarised) continue;
    __syncthreads();
    clear_sums(s.sums[(pass + 1) % 2]);
    summarise<D>(plan::head_page(p.cache, task.page, task.first_head + pass), task.slot, s.products, s.sums[pass % 2]);
  }
  if (!complete) return;
  __syncthreads();
  for (int head = thread / 32; head < task.head_count; head += Shape::kThreads / 32) {
    const plan::HeadPage page = plan::head_page(p.cache, task.page, task.first_head + head);
    const uint16_t bound = block_bound(page.k_scale + task.slot, page.v_scale + task.slot, thread % 32);
    if (thread % 32 == 0) page.bound[task.slot / kTile] = bound;
  }
}

}  // namespace fold::cuda::cache
