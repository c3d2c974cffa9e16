#include <algorithm>
#include <cmath>

#include "cuda/attention/forward.h"
#include "cuda/attention/forward_kernel.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace fold::cuda {
namespace {

using namespace attention;

constexpr int64_t kCounterBytes = 256;
constexpr int64_t kSectionBytes = int64_t{32} << 20;  ///< of keys and values that are read in turn: about half of L2

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Row tiles of a sequence, or (packed) at most of all: each sequence, and the rows behind them, may end in a part.
int64_t most_tiles(const plan::ForwardParams& p) {
  const int rows = forward_rows(p.head_dim);
  return p.cu_seqlens_q == nullptr ? ceil_div(p.seqlen_q, rows) : p.total_q / rows + p.batch + 1;
}

struct Counters {
  unsigned taken, packed_tiles;
};
static_assert(sizeof(Counters) <= kCounterBytes);

/// x (S, heads, D) of each sequence, or (T, heads, D) packed, in boxes of `rows`.
CUtensorMap rows_map(const plan::RowsView& x, const plan::ForwardParams& p, int64_t total, int64_t seqlen,
                     int64_t heads, int rows) {
  const bool packed = p.cu_seqlens_q != nullptr;
  return ptx::tensor_map({.data = x.data,
                          .size = {p.head_dim, packed ? total : seqlen, heads, packed ? 1 : p.batch},
                          .stride = {x.stride_row, x.stride_head, packed ? 0 : x.stride_b},
                          .rows = rows},
                         p.dtype == DType::bf16);
}

template <typename Shape>
void launch(const Forward& f, int64_t items, int multiprocessors, cudaStream_t stream) {
  const plan::ForwardParams& p = f.params;
  const CUtensorMap q = rows_map(p.q, p, p.total_q, p.seqlen_q, p.heads, Shape::kRows);
  // Without keys nothing is copied, but there is no map of nothing.
  const bool keys = p.total_k > 0;
  const CUtensorMap k = keys ? rows_map(p.k, p, p.total_k, p.seqlen_k, p.kv_heads, Shape::kKeys) : q;
  const CUtensorMap v = keys ? rows_map(p.v, p, p.total_k, p.seqlen_k, p.kv_heads, Shape::kKeys) : q;
  launch_kernel(forward_kernel<Shape>,
                {std::min<int64_t>(items, multiprocessors), Shape::kThreads, sizeof(ForwardShared<Shape>)}, stream,
                "attention, forward", f, q, k, v);
}

template <typename T>
void launch_for_dim(const Forward& f, int64_t items, int multiprocessors, cudaStream_t stream) {
  switch (f.params.head_dim) {
    case 64:
      return launch<ForwardShape<T, 64>>(f, items, multiprocessors, stream);
    case 96:
      return launch<ForwardShape<T, 96>>(f, items, multiprocessors, stream);
    case 128:
      return launch<ForwardShape<T, 128>>(f, items, multiprocessors, stream);
    default:
      return launch<ForwardShape<T, 256>>(f, items, multiprocessors, stream);
  }
}

}  // namespace

int64_t attention_forward_workspace(const plan::ForwardParams& p) {
  return kCounterBytes + (p.cu_seqlens_q == nullptr ? 0 : most_tiles(p) * int64_t{sizeof(RowTile)});
}

void attention_forward(const plan::ForwardParams& p, void* workspace, cudaStream_t stream) {
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t tiles = most_tiles(p), lanes = packed ? p.heads : p.heads * p.batch, items = tiles * lanes;
  if (p.total_q == 0 || items == 0) return;
  if (items >= plan::kMostDeviceRows) throw std::runtime_error("attention, forward: too many tiles and heads");
  const int multiprocessors = cuda::multiprocessors();
  const int64_t group = p.heads / p.kv_heads;
  const int64_t head_bytes = std::max<int64_t>(1, (packed ? p.total_k : p.seqlen_k) * p.head_dim * 4);
  auto* const counters = static_cast<Counters*>(workspace);
  auto* const list = reinterpret_cast<RowTile*>(static_cast<uint8_t*>(workspace) + kCounterBytes);
  const double scale = std::fabs(double{p.softmax_scale});
  const float sign = p.softmax_scale > 0 ? 1.0f : p.softmax_scale < 0 ? -1.0f : 0.0f;
  const Forward f{
      .params = p,
      .schedule = {.window_left = static_cast<int>(std::min<int64_t>(p.window_left, plan::kMostDeviceRows - 1)),
                   .window_right = static_cast<int>(std::min<int64_t>(p.window_right, plan::kMostDeviceRows - 1)),
                   .rows = forward_rows(p.head_dim),
                   .tiles = static_cast<unsigned>(tiles),
                   .lanes = static_cast<unsigned>(lanes),
                   .section =
                       static_cast<unsigned>(group * std::clamp<int64_t>(kSectionBytes / head_bytes, 1, lanes / group)),
                   .taken = packed || items > multiprocessors ? &counters->taken : nullptr,
                   .packed = packed ? list : nullptr,
                   .packed_tiles = packed ? &counters->packed_tiles : nullptr},
      .log2_scale = scale == 0 ? 1.0f : static_cast<float>(scale * 1.4426950408889634),
      .sign = sign};
  if (packed) {
    launch_kernel(list_row_tiles, {1, kListThreads, 0}, stream, "attention, the list of row tiles", p, f.schedule,
                  forward_keys(p.head_dim), list, &counters->packed_tiles);
  } else if (f.schedule.taken != nullptr) {
    require_success(cudaMemsetAsync(&counters->taken, 0, sizeof(counters->taken), stream), "attention, forward");
  }
  p.dtype == DType::bf16 ? launch_for_dim<__nv_bfloat16>(f, items, multiprocessors, stream)
                         : launch_for_dim<__half>(f, items, multiprocessors, stream);
}

}  // namespace fold::cuda
