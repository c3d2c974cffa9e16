#include <algorithm>
#include <cmath>

#include "cuda/attention/backward.h"

#ifdef FOLD_COUNT_GRID_OVERFLOWS
namespace fold::cuda::backward {
__device__ unsigned long long grid_overflows;
}
#endif
#include "cuda/attention/backward_finish.cuh"
#include "cuda/attention/backward_main.cuh"
#include "cuda/attention/backward_prepare.cuh"
#include "cuda/launch.h"

namespace fold::cuda {
namespace {

using backward::Args;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int rows_of_tile(int64_t head_dim) { return head_dim == 64 ? backward::Tiles<64>::kRows : backward::Tiles<128>::kRows; }

/// Tiles of all sequences (packed: of any lengths).
int64_t all_tiles(const plan::ForwardParams& p, int64_t dense_length, int64_t total, int64_t tile) {
  return p.cu_seqlens_q ? total / tile + p.batch : p.batch * ceil_div(dense_length, tile);
}

/// Sets the parts in which a key tile is walked at most: of dense sequences no more than they have.
template <int D>
void set_parts(Args& a) {
  constexpr int kFewHeads = 4, kUnits = 16;
  a.parts = a.kv_heads <= kFewHeads ? kUnits / a.kv_heads : 1;
  if (a.queries.cu_seqlens) return;
  const backward::Sequence sequence{0, 0, a.queries.length, 0, a.keys.length, 0, 0};
  a.parts =
      backward::parts_of<D>(a, sequence, {0, static_cast<int>(ceil_div(a.queries.length, backward::Tiles<D>::kRows))});
}

/// Units whose key tiles run at the same time: so many that their Q, dO and sums of dQ take half the L2 cache, or that
/// each multiprocessor has two tiles, a long one and a short one.
int64_t section(const plan::ForwardParams& p, int64_t heads_of_unit) {
  constexpr int64_t kBytes = 24 << 20, kTasks = 2 * 132;
  const int64_t bytes = p.seqlen_q * heads_of_unit * p.head_dim * (2 + 2 + 4);
  const int64_t tiles = ceil_div(p.seqlen_k, backward::Tiles<128>::kKeys);
  return std::max({int64_t{1}, kBytes / std::max<int64_t>(1, bytes), kTasks / std::max<int64_t>(1, tiles)});
}

Args shapes(const plan::BackwardParams& params) {
  const plan::ForwardParams& p = params.forward;
  const auto window = [](int64_t keys) { return static_cast<int>(std::min<int64_t>(keys, backward::kMaxWindow)); };
  // Packed rows count from the start of all sequences.
  const auto rows = [&](plan::RowsView view) {
    if (p.cu_seqlens_q) view.stride_b = 0;
    return view;
  };
  Args a{};
  a.out = rows(p.out);
  a.dout = rows(params.dout);
  a.dq = rows(params.dq);
  a.dk = rows(params.dk);
  a.dv = rows(params.dv);
  a.k = rows(p.k);
  a.v = rows(p.v);
  a.lse = rows(p.lse);
  a.sinks = p.sinks;
  a.dsinks = params.dsinks;
  a.queries = {p.cu_seqlens_q, static_cast<int>(p.seqlen_q), p.total_q};
  a.keys = {p.cu_seqlens_k, static_cast<int>(p.seqlen_k), p.total_k};
  a.batch = static_cast<int>(p.batch);
  a.heads = static_cast<int>(p.heads);
  a.kv_heads = static_cast<int>(p.kv_heads);
  a.group = static_cast<int>(p.heads / p.kv_heads);
  a.window_left = window(p.window_left);
  a.window_right = window(p.window_right);
  a.scale = p.softmax_scale;
  a.scale2 = static_cast<float>(p.softmax_scale * M_LOG2E);
  a.lse_unit = static_cast<float>(M_LOG2E);
  p.head_dim == 64 ? set_parts<64>(a) : set_parts<128>(a);
  a.units = (p.cu_seqlens_q ? 1 : a.batch) * a.kv_heads * a.parts;
  a.section = static_cast<int>(std::min<int64_t>(std::max(1, a.units), section(p, ceil_div(a.group, a.parts))));
  a.sections = std::max(1, a.units / a.section);
  a.tiles = all_tiles(p, p.seqlen_q, p.total_q, rows_of_tile(p.head_dim));
  a.norm_blocks = all_tiles(p, p.seqlen_k, p.total_k, backward::kNormBlock);
  a.tasks = all_tiles(p, p.seqlen_k, p.total_k, backward::Tiles<128>::kKeys) * p.kv_heads * a.parts;
  return a;
}

/// Takes the kernels' arrays out of the workspace; returns their bytes.
int64_t place_arrays(Args& a, int64_t head_dim, void* workspace) {
  int64_t bytes = 0;
  const auto place = [&](auto*& array, int64_t size) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(static_cast<char*>(workspace) + bytes);
    bytes += ceil_div(size * static_cast<int64_t>(sizeof(*array)), 256) * 256;
  };
  place(a.dirty, int64_t{a.batch} * a.kv_heads);
  place(a.key_norms, a.kv_heads * a.norm_blocks * backward::kNormBlock);
  place(a.block_norms, a.kv_heads * a.norm_blocks);
  place(a.rows, a.heads * a.tiles * backward::kRowNumbers * rows_of_tile(head_dim));
  place(a.sums, a.heads * a.tiles * backward::kTileSums);
  if (a.parts > 1) {
    place(a.dk_parts, a.parts * a.kv_heads * a.keys.total * head_dim);
    place(a.dv_parts, a.parts * a.kv_heads * a.keys.total * head_dim);
  }
  return bytes;
}

CUtensorMap row_map(const plan::ForwardParams& p, const plan::RowsView& view, int64_t length, int64_t total,
                    int64_t heads, int rows) {
  const bool packed = p.cu_seqlens_q != nullptr;
  // The driver looks at strides of dimensions of one element, too.
  const auto stride = [](int64_t size, int64_t x) { return size > 1 ? x : 8; };
  const int64_t sequences = packed ? 1 : p.batch, length_or_total = packed ? total : length;
  return ptx::tensor_map({.data = view.data,
                          .size = {p.head_dim, length_or_total, heads, sequences},
                          .stride = {stride(length_or_total, view.stride_row), stride(heads, view.stride_head),
                                     stride(sequences, view.stride_b)},
                          .rows = rows},
                         p.dtype == DType::bf16);
}

template <typename T, typename G, int D>
void run(const plan::BackwardParams& params, const Args& a, cudaStream_t stream) {
  const plan::ForwardParams& p = params.forward;
  constexpr int kRows = backward::Tiles<D>::kRows, kKeys = backward::Tiles<D>::kKeys;
  require_success(cudaMemsetAsync(a.dirty, 0, static_cast<size_t>(a.batch) * a.kv_heads * sizeof(*a.dirty), stream),
                  "backward: flags");
  const auto launch = [&](auto* kernel, int64_t blocks, int threads, size_t shared_bytes, const char* step,
                          const auto&... more) {
    if (blocks == 0) return;
    launch_kernel(kernel, {blocks, threads, shared_bytes, true}, stream, step, a, more...);
  };
  launch(backward::key_norms_kernel<T, D>, a.norm_blocks * a.kv_heads, backward::kPrepareThreads, 0,
         "backward: norms of keys");
  launch(backward::prepare_rows_kernel<T, D>, a.tiles * a.heads, backward::kPrepareThreads, 0, "backward: rows");
  if (a.keys.total > 0) {
    // Without query rows no map of theirs is used, but there must be one.
    const bool any_rows = a.queries.total > 0;
    const CUtensorMap k_map = row_map(p, p.k, p.seqlen_k, p.total_k, p.kv_heads, kKeys);
    const CUtensorMap v_map = row_map(p, p.v, p.seqlen_k, p.total_k, p.kv_heads, kKeys);
    const CUtensorMap q_map = any_rows ? row_map(p, p.q, p.seqlen_q, p.total_q, p.heads, kRows) : k_map;
    const CUtensorMap dout_map = any_rows ? row_map(p, params.dout, p.seqlen_q, p.total_q, p.heads, kRows) : k_map;
    launch(backward::main_kernel<T, G, D>, a.tasks, backward::kMainThreads, sizeof(backward::Shared<D>),
           "backward: gradients", q_map, k_map, v_map, dout_map);
  }
  if (a.parts > 1) {
    const int64_t blocks = all_tiles(p, p.seqlen_k, p.total_k, backward::kKeysOfBlock);
    launch(backward::add_parts_kernel<G, D>, blocks * a.kv_heads, backward::kFinishThreads, 0,
           "backward: parts of dK and dV");
  }
  launch(backward::finish_rows_kernel<G, D>, a.tiles * a.heads, backward::kFinishThreads, 0, "backward: dQ");
  if (a.dsinks) launch(backward::sink_gradients_kernel<D>, a.heads, backward::kFinishThreads, 0, "backward: sinks");
  if (a.queries.cu_seqlens) {
    launch(backward::clear_unused_kernel<G, D>, 32, backward::kFinishThreads, 0, "backward: unused rows");
  }
}

template <typename T, typename G>
void run(const plan::BackwardParams& params, const Args& a, cudaStream_t stream) {
  switch (params.forward.head_dim) {
    case 64:
      return run<T, G, 64>(params, a, stream);
    case 96:
      return run<T, G, 96>(params, a, stream);
    default:
      return run<T, G, 128>(params, a, stream);
  }
}

}  // namespace

int64_t attention_backward_workspace(const plan::BackwardParams& params) {
  Args a = shapes(params);
  return place_arrays(a, params.forward.head_dim, nullptr);
}

void attention_backward(const plan::BackwardParams& params, void* workspace, cudaStream_t stream) {
  Args a = shapes(params);
  if (a.batch == 0) return;
  place_arrays(a, params.forward.head_dim, workspace);
  const bool wide = params.grad_dtype == DType::f32;
  if (params.forward.dtype == DType::bf16) {
    wide ? run<__nv_bfloat16, float>(params, a, stream) : run<__nv_bfloat16, __nv_bfloat16>(params, a, stream);
  } else {
    wide ? run<__half, float>(params, a, stream) : run<__half, __half>(params, a, stream);
  }
}

#ifdef FOLD_COUNT_GRID_OVERFLOWS
unsigned long long take_grid_overflows() {
  unsigned long long count = 0;
  const unsigned long long zero = 0;
  require_success(cudaMemcpyFromSymbol(&count, backward::grid_overflows, sizeof(count)), "grid overflows");
  require_success(cudaMemcpyToSymbol(backward::grid_overflows, &zero, sizeof(zero)), "grid overflows");
  return count;
}
#endif

}  // namespace fold::cuda
