#include "api/decode_checks.h"

#include <cmath>
#include <limits>

#include "api/cache_checks.h"
#include "numerics/config.h"

namespace fold::api {
namespace {

std::string at(const char* name, int64_t b) { return std::string(name) + "[" + std::to_string(b) + "]"; }

/// Lengths, page ids and draft masks: everything that is read to know which keys a row sees.
void check_requests(int64_t max_pages, const plan::DecodeParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t length = p.seqlens[b], q_len = p.q_lens != nullptr ? p.q_lens[b] : p.tokens;
    if (length < 0) fail_value(at("seqlens", b), std::to_string(length), "at least 0");
    if (q_len < 0 || q_len > p.tokens)
      fail_value(at("q_lens", b), std::to_string(q_len), "0.." + std::to_string(p.tokens));
    if (length == 0) continue;
    if (q_len > length)
      fail_value(at("seqlens", b), std::to_string(length), "at least the " + std::to_string(q_len) + " query tokens");
    require_pages(p.cache, b, p.block_table + b * p.block_table_stride, max_pages, length);
    for (int64_t i = 0; p.tree != nullptr && i < q_len; ++i) {
      const uint64_t path = p.tree[b * p.tree_stride + i], self = uint64_t{1} << i;
      if ((path & self) == 0 || path > (self | (self - 1))) {
        fail_value("tree[" + std::to_string(b) + "][" + std::to_string(i) + "]", std::to_string(path),
                   "a node sees itself and nodes before it");
      }
    }
  }
}

void check_depth(const plan::DecodeParams& p) {
  if (p.depth == nullptr) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t t = 0; t < p.tokens; ++t) {
      for (int64_t h = 0; h < p.heads; ++h) {
        const float depth = p.depth[b * p.depth_stride_b + t * p.depth_stride_t + h * p.depth_stride_h];
        if (std::isnan(depth) || depth == -std::numeric_limits<float>::infinity()) {
          fail_value("depth", std::to_string(depth), "a finite number, or +inf to read every V");
        }
      }
    }
  }
}

/// Strides of a tensor broadcast to (B, T, H).
void broadcast_depth(const TensorView& depth, plan::DecodeParams& p) {
  if (depth.ndim > 3) fail_value("depth.ndim", std::to_string(depth.ndim), "at most 3: broadcastable to (B, T, H)");
  require_tensor("depth", depth, depth.ndim, {DType::f32});
  const int64_t sizes[3] = {p.batch, p.tokens, p.heads};
  int64_t* strides[3] = {&p.depth_stride_b, &p.depth_stride_t, &p.depth_stride_h};
  for (int i = 0; i < depth.ndim; ++i) {
    const int dim = 3 - depth.ndim + i;
    if (depth.shape[i] != 1 && depth.shape[i] != sizes[dim]) {
      fail_value("depth.shape", shape_text(depth), "broadcastable to (B, T, H)");
    }
    *strides[dim] = depth.shape[i] == 1 ? 0 : depth.strides[i];
  }
  p.depth = depth.as<float>();
}

}  // namespace

plan::DecodeParams shaped_decode(const CacheStorage& cache, const DecodeArgs& args) {
  plan::DecodeParams p{};
  p.cache = cache_view(cache);
  require_tensor("q", args.q, 4, kFloatTypes);
  require_size("q", args.q, 3, cache.layout.head_dim, "the cache's head_dim");
  require_last_contiguous("q", args.q);
  p.batch = args.q.shape[0];
  p.tokens = args.q.shape[1];
  p.heads = args.q.shape[2];
  require_heads(p.heads, cache.layout.n_kv_heads);
  p.q = args.q.data;
  p.q_dtype = args.q.dtype;
  p.q_stride_b = args.q.strides[0];
  p.q_stride_t = args.q.strides[1];
  p.q_stride_h = args.q.strides[2];

  require_tensor("block_table", args.block_table, 2, {DType::i32});
  require_size("block_table", args.block_table, 0, p.batch, "batch of q");
  require_last_contiguous("block_table", args.block_table);
  p.block_table = args.block_table.as<int32_t>();
  p.block_table_stride = args.block_table.strides[0];
  require_tensor("seqlens", args.seqlens, 1, {DType::i32});
  require_size("seqlens", args.seqlens, 0, p.batch, "batch of q");
  require_contiguous("seqlens", args.seqlens);
  p.seqlens = args.seqlens.as<int32_t>();
  if (args.q_lens.defined()) {
    require_tensor("q_lens", args.q_lens, 1, {DType::i32});
    require_size("q_lens", args.q_lens, 0, p.batch, "batch of q");
    require_contiguous("q_lens", args.q_lens);
    p.q_lens = args.q_lens.as<int32_t>();
  }
  if (args.tree.defined()) {
    require_tensor("tree", args.tree, 2, {DType::i64});
    require_size("tree", args.tree, 0, p.batch, "batch of q");
    require_size("tree", args.tree, 1, p.tokens, "query tokens");
    require_last_contiguous("tree", args.tree);
    require_tree_nodes(p.tokens);
    p.tree = args.tree.as<uint64_t>();
    p.tree_stride = args.tree.strides[0];
  }
  if (args.sinks.defined()) {
    require_tensor("sinks", args.sinks, 1, {DType::f32});
    require_size("sinks", args.sinks, 0, p.heads, "query heads");
    require_contiguous("sinks", args.sinks);
    p.sinks = args.sinks.as<float>();
  }
  if (args.depth.defined()) broadcast_depth(args.depth, p);

  p.qk_scale = log2_scale(args.softmax_scale, cache.layout.head_dim);
  p.window_left = args.window_left.value_or(-1);
  if (p.window_left < -1) fail_value("window_left", std::to_string(p.window_left), "-1 (all keys) or more");
  if (args.splits < 0) fail_value("splits", std::to_string(args.splits), "at least 0");
  p.splits = args.splits;
  p.gates = args.gates;
  p.reference_shift = args.reference_shift;
  p.key_end = std::numeric_limits<int64_t>::max();
  return p;
}

plan::DecodeParams device_decode(const CacheStorage& cache, const DecodeArgs& args) {
  const plan::DecodeParams p = shaped_decode(cache, args);
  require_device_pages(p.cache);
  return p;
}

plan::DecodeParams checked_decode(const CacheStorage& cache, const DecodeArgs& args) {
  const plan::DecodeParams p = shaped_decode(cache, args);
  check_requests(args.block_table.shape[1], p);
  check_depth(p);
  return p;
}

void check_output(const TensorView& out, int64_t batch, int64_t tokens, int64_t heads, int64_t head_dim) {
  require_tensor("out", out, 4, kFloatTypes);
  const int64_t sizes[4] = {batch, tokens, heads, head_dim};
  for (int i = 0; i < 4; ++i) require_size("out", out, i, sizes[i], "shape of q");
  require_last_contiguous("out", out);
  require_no_broadcast("out", out);
}

PartialView checked_partial(const Partial& partial, int64_t batch, int64_t tokens, int64_t heads, int64_t head_dim) {
  if (!partial.numerator.defined() || !partial.denominator.defined() || !partial.grid.defined()) {
    fail_value("partial", "an incomplete one", "numerator, denominator and grid are required");
  }
  return {result<int64_t>("numerator", partial.numerator, DType::i64, {batch, tokens, heads, head_dim}),
          result<int64_t>("denominator", partial.denominator, DType::i64, {batch, tokens, heads, 3}),
          result<float>("grid", partial.grid, DType::f32, {batch, tokens, heads, 3})};
}

PartialView checked_partial(const Partial& partial) {
  const TensorView& n = partial.numerator;
  require_tensor("numerator", n, 4, {DType::i64});
  const int64_t d = n.shape[3];
  if (d != 64 && d != 128 && d != 256) fail_value("head_dim", std::to_string(d), "supported: 64, 128, 256");
  return checked_partial(partial, n.shape[0], n.shape[1], n.shape[2], d);
}

void set_results(plan::DecodeParams& p, const DecodeResults& results) {
  check_output(results.out, p.batch, p.tokens, p.heads, p.cache.layout.head_dim);
  p.out = results.out.data;
  p.out_dtype = results.out.dtype;
  p.out_stride_b = results.out.strides[0];
  p.out_stride_t = results.out.strides[1];
  p.out_stride_h = results.out.strides[2];
  p.lse = result<float>("lse", results.lse, DType::f32, {p.batch, p.heads, p.tokens});
  p.kept_fraction = result<float>("kept_fraction", results.kept_fraction, DType::f32, {p.batch, p.tokens, p.heads});
  p.dropped_mass = result<float>("dropped_mass", results.dropped_mass, DType::f32, {p.batch, p.tokens, p.heads});
  p.recomputed = result<uint8_t>("recomputed", results.recomputed, DType::u8, {p.batch, p.tokens, p.heads});
  p.bytes_read =
      result<int64_t>("bytes_read", results.bytes_read, DType::i64, {p.batch, p.tokens, p.cache.layout.n_kv_heads});
}

void set_partial(plan::DecodeParams& p, int64_t begin, int64_t end, const Partial& out, bool on_host) {
  if (begin < 0 || end < begin) {
    fail_value("key range", std::to_string(begin) + ".." + std::to_string(end), "0 <= begin <= end");
  }
  for (int64_t b = 0; on_host && b < p.batch; ++b) {
    for (const int64_t edge : {begin, end}) {
      if (edge % numerics::kTile != 0 && edge < p.seqlens[b]) {
        fail_value("key range edge", std::to_string(edge),
                   "multiples of 64 below the length " + std::to_string(p.seqlens[b]));
      }
    }
  }
  const PartialView view = checked_partial(out, p.batch, p.tokens, p.heads, p.cache.layout.head_dim);
  p.key_begin = begin;
  p.key_end = end;
  p.numerator = view.numerator;
  p.denominator = view.denominator;
  p.grid = view.grid;
}

}  // namespace fold::api
