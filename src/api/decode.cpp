#include "fold/decode.h"

#include <cmath>
#include <limits>

#include "api/cache_checks.h"
#include "api/checks.h"
#include "api/decode_checks.h"
#include "cpu/decode.h"
#include "numerics/planes.h"

namespace fold {
namespace {

using api::fail_value;
using api::require_contiguous;
using api::require_last_contiguous;
using api::require_size;
using api::require_tensor;

std::string at(const char* name, int64_t b) { return std::string(name) + "[" + std::to_string(b) + "]"; }

/// Lengths, page ids and draft masks: everything that is read to know which keys a row sees.
void check_requests(const DecodeArgs& args, const plan::DecodeParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t length = p.seqlens[b], q_len = p.q_lens != nullptr ? p.q_lens[b] : p.tokens;
    if (length < 0) fail_value(at("seqlens", b), std::to_string(length), "at least 0");
    if (q_len < 0 || q_len > p.tokens)
      fail_value(at("q_lens", b), std::to_string(q_len), "0.." + std::to_string(p.tokens));
    if (length == 0) continue;
    if (q_len > length)
      fail_value(at("seqlens", b), std::to_string(length), "at least the " + std::to_string(q_len) + " query tokens");
    api::require_pages(p.cache, b, p.block_table + b * p.block_table_stride, args.block_table.shape[1], length);
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
      fail_value("depth.shape", api::shape_text(depth), "broadcastable to (B, T, H)");
    }
    *strides[dim] = depth.shape[i] == 1 ? 0 : depth.strides[i];
  }
  p.depth = depth.as<float>();
}

plan::DecodeParams checked_params(const CacheStorage& cache, const DecodeArgs& args) {
  plan::DecodeParams p{};
  p.cache = api::cache_view(cache);
  require_tensor("q", args.q, 4, api::kFloatTypes);
  require_size("q", args.q, 3, cache.layout.head_dim, "the cache's head_dim");
  require_last_contiguous("q", args.q);
  p.batch = args.q.shape[0];
  p.tokens = args.q.shape[1];
  p.heads = args.q.shape[2];
  api::require_heads(p.heads, cache.layout.n_kv_heads);
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
    api::require_tree_nodes(p.tokens);
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

  p.qk_scale = api::log2_scale(args.softmax_scale, cache.layout.head_dim);
  if (args.window_left < -1) fail_value("window_left", std::to_string(args.window_left), "-1 (all keys) or more");
  if (args.splits < 0) fail_value("splits", std::to_string(args.splits), "at least 0");
  p.window_left = args.window_left;
  p.splits = args.splits;
  p.gates = args.gates;
  p.reference_shift = args.reference_shift;
  p.key_end = std::numeric_limits<int64_t>::max();
  check_requests(args, p);
  check_depth(p);
  return p;
}

/// A contiguous result tensor; its data, or null where it is not asked for.
template <typename T>
T* result(const char* name, const TensorView& t, DType dtype, std::initializer_list<int64_t> shape) {
  if (!t.defined()) return nullptr;
  require_tensor(name, t, static_cast<int>(shape.size()), {dtype});
  int dim = 0;
  for (const int64_t size : shape) require_size(name, t, dim++, size, "shape of the call");
  require_contiguous(name, t);
  return t.as<T>();
}

void check_output(const TensorView& out, int64_t batch, int64_t tokens, int64_t heads, int64_t head_dim) {
  require_tensor("out", out, 4, api::kFloatTypes);
  const int64_t sizes[4] = {batch, tokens, heads, head_dim};
  for (int i = 0; i < 4; ++i) require_size("out", out, i, sizes[i], "shape of q");
  require_last_contiguous("out", out);
  api::require_no_broadcast("out", out);
}

struct PartialView {
  int64_t *numerator, *denominator;
  float* grid;
};

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

/// E of every row that has a sum is a power of two, as decode makes them.
void check_grid(const PartialView& partial, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    const float z = partial.grid[3 * i], e = partial.grid[3 * i + 1];
    const bool empty = std::isinf(z) && z < 0 && e == 0;
    int exponent = 0;
    if (empty || std::isnan(e) || (std::isfinite(e) && e >= numerics::kMinScale && std::frexp(e, &exponent) == 0.5f)) {
      continue;
    }
    fail_value("grid of row " + std::to_string(i), std::to_string(e), "a power of two, from 2^-100");
  }
}

}  // namespace

plan::DecodeParams api::checked_decode(const CacheStorage& cache, const DecodeArgs& args,
                                       const DecodeResults& results) {
  plan::DecodeParams p = checked_params(cache, args);
  check_output(results.out, p.batch, p.tokens, p.heads, cache.layout.head_dim);
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
      result<int64_t>("bytes_read", results.bytes_read, DType::i64, {p.batch, p.tokens, cache.layout.n_kv_heads});
  return p;
}

void decode(const CacheStorage& cache, const DecodeArgs& args, const DecodeResults& results) {
  cpu::decode(api::checked_decode(cache, args, results));
}

void partial(const CacheStorage& cache, const DecodeArgs& args, int64_t begin, int64_t end, const Partial& out) {
  plan::DecodeParams p = checked_params(cache, args);
  if (begin < 0 || end < begin) {
    fail_value("key range", std::to_string(begin) + ".." + std::to_string(end), "0 <= begin <= end");
  }
  for (int64_t b = 0; b < p.batch; ++b) {
    for (const int64_t edge : {begin, end}) {
      if (edge % numerics::kTile != 0 && edge < p.seqlens[b]) {
        fail_value("key range edge", std::to_string(edge),
                   "multiples of 64 below the length " + std::to_string(p.seqlens[b]));
      }
    }
  }
  const PartialView view = checked_partial(out, p.batch, p.tokens, p.heads, cache.layout.head_dim);
  p.key_begin = begin;
  p.key_end = end;
  p.numerator = view.numerator;
  p.denominator = view.denominator;
  p.grid = view.grid;
  cpu::decode(p);
}

void add_partials(const Partial& into, const Partial& other) {
  const PartialView a = checked_partial(into), b = checked_partial(other);
  for (int i = 0; i < 4; ++i)
    require_size("numerator", other.numerator, i, into.numerator.shape[i], "the other partial's shape");
  const int64_t d = into.numerator.shape[3], rows = into.numerator.numel() / d;
  for (int64_t i = 0; i < 3 * rows; ++i) {
    if (a.grid[i] != b.grid[i] && !(std::isnan(a.grid[i]) && std::isnan(b.grid[i]))) {
      fail_value("grid of row " + std::to_string(i / 3), std::to_string(b.grid[i]),
                 "partials add on one grid: " + std::to_string(a.grid[i]));
    }
  }
  const auto add = [](int64_t& x, int64_t y) {
    x = static_cast<int64_t>(static_cast<uint64_t>(x) + static_cast<uint64_t>(y));
  };
  for (int64_t i = 0; i < 3 * rows; ++i) add(a.denominator[i], b.denominator[i]);
  for (int64_t i = 0; i < rows * d; ++i) add(a.numerator[i], b.numerator[i]);
}

void finish(const Partial& partial, const TensorView& sinks, const TensorView& out, const TensorView& lse,
            const TensorView& valid) {
  const PartialView view = checked_partial(partial);
  const int64_t batch = partial.numerator.shape[0], tokens = partial.numerator.shape[1],
                heads = partial.numerator.shape[2];
  const int64_t d = partial.numerator.shape[3];
  check_output(out, batch, tokens, heads, d);
  check_grid(view, batch * tokens * heads);
  if (sinks.defined()) {
    require_tensor("sinks", sinks, 1, {DType::f32});
    require_size("sinks", sinks, 0, heads, "query heads");
    require_contiguous("sinks", sinks);
  }
  cpu::FinishParams p{.numerator = view.numerator,
                      .denominator = view.denominator,
                      .grid = view.grid,
                      .sinks = sinks.defined() ? sinks.as<float>() : nullptr,
                      .batch = batch,
                      .tokens = tokens,
                      .heads = heads,
                      .head_dim = d,
                      .out = out.data,
                      .out_dtype = out.dtype,
                      .out_stride_b = out.strides[0],
                      .out_stride_t = out.strides[1],
                      .out_stride_h = out.strides[2],
                      .lse = result<float>("lse", lse, DType::f32, {batch, heads, tokens}),
                      .valid = result<uint8_t>("valid", valid, DType::u8, {batch, tokens, heads})};
  cpu::finish(p);
}

}  // namespace fold
