#pragma once
#include "cuda/attention/backward_layout.cuh"
#include "cuda/ptx/launch_order.cuh"

// From the sums of the main loop to gradients: dQ off its grid, the sinks' gradients, and zeros behind packed
// sequences.
namespace fold::cuda::backward {

constexpr int kFinishThreads = 256;

/// A tile of query rows of one head, a piece of the sums for each warp.
template <typename G, int D>
__global__ void __launch_bounds__(kFinishThreads) finish_rows_kernel(const Args a) {
  constexpr int kRows = Tiles<D>::kRows;
  ptx::wait_for_earlier_kernels();
  const int64_t tile = blockIdx.x / static_cast<unsigned>(a.heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.heads));
  const Sequence s = sequence<D>(a, sequence_of(a, a.queries, tile, kRows));
  const int first = static_cast<int>(tile - s.first_tile) * kRows;
  if (first >= s.q_len) return;
  const int piece = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int4* sums =
      reinterpret_cast<const int4*>(a.sums + (head * a.tiles + tile) * kTileSums + piece * kPieceSums) + lane;
  const float* scale = a.rows + ((head * a.tiles + tile) * kRowNumbers + kScale) * kRows;
  const int r = 16 * (D == 64 ? piece : piece % 4) + lane / 4;
  const int channel = D == 64 ? 0 : piece / 4 * 64;
  int4 x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = sums[32 * i];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + r + 8 * half;
    const float factor = a.scale / scale[r + 8 * half];
    float dq[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      dq[2 * i] = static_cast<float>(half ? x[i].z : x[i].x) * factor;
      dq[2 * i + 1] = static_cast<float>(half ? x[i].w : x[i].y) * factor;
    }
    store_row(row_address<G>(a.dq, s, s.q_begin, row, head) + channel, dq, row < s.q_len ? min(D - channel, 64) : 0);
  }
}

constexpr int kKeysOfBlock = 16;  // divides Tiles::kKeys

/// dK and dV where key tiles were walked in parts: their sums, in order. A block of keys of one KV head.
template <typename G, int D>
__global__ void __launch_bounds__(kFinishThreads) add_parts_kernel(const Args a) {
  ptx::wait_for_earlier_kernels();
  const int64_t block = blockIdx.x / static_cast<unsigned>(a.kv_heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.kv_heads));
  const Sequence s = sequence<D>(a, sequence_of(a, a.keys, block, kKeysOfBlock));
  const int first = static_cast<int>(block - first_tile(a.keys, s.index, kKeysOfBlock)) * kKeysOfBlock;
  if (first >= s.k_len) return;  // between packed sequences
  const int parts = parts_of<D>(a, s, tiles_seeing<D>(a, s, first / Tiles<D>::kKeys * Tiles<D>::kKeys));
  if (parts == 1) return;
  const int64_t first_key = a.keys.cu_seqlens ? s.k_begin : s.index * int64_t{a.keys.length};
  for (int i = static_cast<int>(threadIdx.x); i < kKeysOfBlock * (D / 4); i += kFinishThreads) {
    const int key = first + i / (D / 4), channel = i % (D / 4) * 4;
    if (key >= s.k_len) return;
    const auto add = [&](const float* sums, const plan::RowsView& view) {
      const float4* x = reinterpret_cast<const float4*>(sums + (head * a.keys.total + first_key + key) * D + channel);
      float4 sum = *x;
      for (int part = 1; part < parts; ++part) {
        const float4 more = x[part * a.kv_heads * a.keys.total * (D / 4)];
        sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
      }
      G* to = row_address<G>(view, s, s.k_begin, key, head) + channel;
      store_pair(to, sum.x, sum.y);
      store_pair(to + 2, sum.z, sum.w);
    };
    add(a.dk_parts, a.dk);
    add(a.dv_parts, a.dv);
  }
}

/// dsink = -sum over rows of exp(sink - lse) Delta, since the sink's value is zero: a head each thread block, in fp64,
/// in an order that the shapes fix.
template <int D>
__global__ void __launch_bounds__(kFinishThreads) sink_gradients_kernel(const Args a) {
  constexpr int kRows = Tiles<D>::kRows;
  __shared__ double parts[kFinishThreads];
  ptx::wait_for_earlier_kernels();
  const int head = static_cast<int>(blockIdx.x);
  const float sink = a.sinks[head] * a.lse_unit;
  double sum = 0.0;
  for (int b = 0; b < a.batch; ++b) {
    const Sequence s = sequence<D>(a, b);
    for (int row = threadIdx.x; row < s.q_len; row += kFinishThreads) {
      const float* numbers =
          a.rows + (head * a.tiles + s.first_tile + row / kRows) * (kRowNumbers * kRows) + place_of_row(row % kRows);
      // A unit of the logits in base 2 differs from one of scale2 by a rounding.
      sum -= static_cast<double>(exp2f(sink - numbers[kLse * kRows])) * numbers[kDelta * kRows];
    }
  }
  parts[threadIdx.x] = sum;
  __syncthreads();
  for (int n = kFinishThreads / 2; n > 0; n /= 2) {
    if (threadIdx.x < static_cast<unsigned>(n)) parts[threadIdx.x] += parts[threadIdx.x + n];
    __syncthreads();
  }
  if (threadIdx.x == 0) a.dsinks[head] = static_cast<float>(parts[0]);
}

/// Rows and keys behind the last packed sequence.
template <typename G, int D>
__global__ void __launch_bounds__(kFinishThreads) clear_unused_kernel(const Args a) {
  ptx::wait_for_earlier_kernels();
  const auto clear = [&](const plan::RowsView& x, int64_t first, int64_t last, int heads) {
    const int64_t pairs = (last - first) * heads * (D / 2);
    for (int64_t i = blockIdx.x * int64_t{kFinishThreads} + threadIdx.x; i < pairs;
         i += int64_t{gridDim.x} * kFinishThreads) {
      const int64_t row = i / (D / 2);
      store_pair(row_address<G>(x, Sequence{}, 0, first + row / heads, static_cast<int>(row % heads)) + i % (D / 2) * 2,
                 0.0f, 0.0f);
    }
  };
  clear(a.dq, a.queries.begin(a.batch), a.queries.total, a.heads);
  clear(a.dk, a.keys.begin(a.batch), a.keys.total, a.kv_heads);
  clear(a.dv, a.keys.begin(a.batch), a.keys.total, a.kv_heads);
}

}  // namespace fold::cuda::backward
