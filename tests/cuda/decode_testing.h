#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <random>

#include "cpu/decode.h"
#include "cuda/decode/decode.h"
#include "device_memory.h"
#include "fold/cache_ops.h"
#include "fold/decode.h"
#include "plan/cache_access.h"

// What the decode tests on a device share: caches on both sides, and one step on each.
namespace {

using fold::CacheLayout;
using fold::DType;
using fold::TensorView;
using fold::plan::DecodeParams;

constexpr float kDense = std::numeric_limits<float>::infinity();
constexpr int32_t kNoPage = 0x7FFFFFF0;  // what stands behind a request's pages: reading it would fault

using fold::testing::check;
using fold::testing::expect_same;
using fold::testing::OnDevice;

struct Case {
  CacheLayout layout{.n_kv_heads = 2, .head_dim = 128};
  int64_t group = 4;
  std::vector<int32_t> lengths{1000};
  int64_t tokens = 1;
  std::vector<int32_t> q_lens = {};
  std::vector<uint64_t> tree = {};   // of every request
  std::vector<float> depths{12.0f};  // cycled over rows; none: every V is read
  bool sinks = false;
  int64_t window = -1;
  int splits = 0;
  float shift = 0, q_scale = 3;
  int64_t key_begin = 0, key_end = INT64_MAX;
  DType dtype = DType::f32;  // of queries and outputs
  unsigned seed = 1;
  bool poisoned = false;  // NaN: key 5 on KV head 0, and a query on KV head 1
  bool opposed = false;   // logits below fp32's range of each group's first row, and low ones of the others; 0 of the
                          // newest 64 keys
};

/// Everything that a decode call writes.
struct Results {
  std::vector<uint8_t> out;
  std::vector<float> lse, kept, dropped, grid;
  std::vector<uint8_t> recomputed;
  std::vector<int64_t> bytes, numerator, denominator;
};

/// Appends a number of the given type.
void put(std::vector<uint8_t>& to, DType dtype, float x) {
  const uint32_t bits = dtype == DType::f32    ? fold::numerics::bits_of(x)
                        : dtype == DType::bf16 ? fold::numerics::to_bf16(x)
                                               : fold::numerics::to_f16(x);
  for (size_t i = 0; i < (dtype == DType::f32 ? 4 : 2); ++i) to.push_back(static_cast<uint8_t>(bits >> (8 * i)));
}

/// A batch of requests on scattered pages of a poisoned pool.
class Batch {
 public:
  explicit Batch(const Case& c) : case_(c), sections_(fold::page_sections(c.layout)) {
    // One generator for each kind of number, requests in order: a request has the same content in any batch.
    std::mt19937 page_rng(c.seed), content_rng(c.seed + 1), query_rng(c.seed + 2), sink_rng(c.seed + 3);
    const auto normal = [](std::mt19937& rng) {
      std::normal_distribution<float> distribution;
      return distribution(rng);
    };
    const int64_t batch = static_cast<int64_t>(c.lengths.size()), hk = c.layout.n_kv_heads, d = c.layout.head_dim;
    heads_ = c.group * hk;
    max_pages_ = 1;
    int64_t pages = 0;
    for (const int32_t length : c.lengths) {
      const int64_t some = (length + c.layout.page_size - 1) / c.layout.page_size;
      max_pages_ = std::max(max_pages_, some + 1);
      pages += some;
    }
    std::vector<int32_t> ids(static_cast<size_t>(pages));
    std::iota(ids.begin(), ids.end(), 1);  // page 0 is nobody's
    std::shuffle(ids.begin(), ids.end(), page_rng);
    num_pages_ = pages + 1;
    bytes_.assign(static_cast<size_t>(num_pages_ * sections_.bytes), 0xFF);
    table_.assign(static_cast<size_t>(batch * max_pages_), kNoPage);
    size_t next = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t n = c.lengths[b];
      for (int64_t i = 0; i < (n + c.layout.page_size - 1) / c.layout.page_size; ++i)
        table_[b * max_pages_ + i] = ids[next++];
      std::vector<float> k(static_cast<size_t>(n * hk * d)), v(k.size());
      // V follows K in part, so that the tail's correction has something to find; scales differ from key to key.
      for (size_t row = 0; row < k.size(); row += d) {
        const float size = std::exp2(normal(content_rng));
        for (int64_t i = 0; i < d; ++i) k[row + i] = normal(content_rng);
        const bool newest = static_cast<int64_t>(row) / d / hk >= n - 64;
        if (c.opposed) std::fill_n(k.begin() + static_cast<int64_t>(row), d, newest ? 0.0f : -100.0f);
        for (int64_t i = 0; i < d; ++i) v[row + i] = size * (k[row + (i * 7) % d] + 0.3f * normal(content_rng));
      }
      if (c.poisoned && n > 5) k[static_cast<size_t>(5 * hk * d)] = fold::numerics::quiet_nan();
      if (n == 0) continue;
      int32_t before = 0, ends[2] = {0, static_cast<int32_t>(n)};
      fold::cache_write({c.layout, TensorView(bytes_.data(), DType::u8, {num_pages_, sections_.bytes})},
                        {.k = TensorView(k.data(), DType::f32, {n, hk, d}),
                         .v = TensorView(v.data(), DType::f32, {n, hk, d}),
                         .block_table = TensorView(&table_[b * max_pages_], DType::i32, {1, max_pages_ - 1}),
                         .seqlens = TensorView(&before, DType::i32, {1}),
                         .cu_seqlens = TensorView(ends, DType::i32, {2}),
                         .slot_mapping = {}});
    }
    for (int64_t i = 0; i < batch * c.tokens * heads_ * d; ++i) {
      const bool bad = c.poisoned && i / d % heads_ == c.group + (c.group > 1);  // on KV head 1
      const float opposed = i / d % c.group == 0 ? 1e36f : 1.0f;
      put(q_, c.dtype, bad ? fold::numerics::quiet_nan() : c.opposed ? opposed : c.q_scale * normal(query_rng));
    }
    for (size_t i = 0; !c.depths.empty() && i < static_cast<size_t>(batch * c.tokens * heads_); ++i)
      depths_.push_back(c.depths[i % c.depths.size()]);
    for (int64_t h = 0; h < heads_ && c.sinks; ++h) sinks_.push_back(4 * normal(sink_rng));
    for (int64_t b = 0; b < batch; ++b) tree_.insert(tree_.end(), c.tree.begin(), c.tree.end());
    q_lens_ = c.q_lens;
    lengths_ = c.lengths;
  }

  Results on_cpu(bool partial = false) {
    Results r = empty_results(partial);
    DecodeParams p = params();
    p.cache.pages = bytes_.data();
    p.q = q_.data();
    p.block_table = table_.data();
    p.seqlens = lengths_.data();
    p.q_lens = q_lens_.empty() ? nullptr : q_lens_.data();
    p.tree = tree_.empty() ? nullptr : tree_.data();
    p.depth = depths_.empty() ? nullptr : depths_.data();
    p.sinks = sinks_.empty() ? nullptr : sinks_.data();
    set_results(p, r, partial);
    fold::cpu::decode(p);
    return r;
  }

  Results on_gpu(bool partial = false) {
    OnDevice<uint8_t> bytes(bytes_);
    OnDevice<uint8_t> q(q_);
    OnDevice<float> depths(depths_), sinks(sinks_);
    OnDevice<int32_t> table(table_), lengths(lengths_), q_lens(q_lens_);
    OnDevice<uint64_t> tree(tree_);
    DecodeParams p = params();
    p.cache.pages = bytes.data();
    p.q = q.data();
    p.block_table = table.data();
    p.seqlens = lengths.data();
    p.q_lens = q_lens_.empty() ? nullptr : q_lens.data();
    p.tree = tree_.empty() ? nullptr : tree.data();
    p.depth = depths_.empty() ? nullptr : depths.data();
    p.sinks = sinks_.empty() ? nullptr : sinks.data();
    Results r = empty_results(partial);
    OnDevice<float> lse(r.lse), kept(r.kept), dropped(r.dropped), grid(r.grid);
    OnDevice<uint8_t> out(r.out), recomputed(r.recomputed);
    OnDevice<int64_t> read(r.bytes), numerator(r.numerator), denominator(r.denominator);
    OnDevice<uint8_t> workspace(std::vector<uint8_t>(static_cast<size_t>(fold::cuda::decode_workspace(p)), 0xA5));
    p.out = out.data();
    p.lse = lse.data();
    p.kept_fraction = kept.data();
    p.dropped_mass = dropped.data();
    p.recomputed = recomputed.data();
    p.bytes_read = read.data();
    p.numerator = partial ? numerator.data() : nullptr;
    p.denominator = denominator.data();
    p.grid = grid.data();
    if (graph_) {
      replay(p, workspace.data(), lengths);
    } else {
      fold::cuda::decode(p, {.max_pages = max_pages_}, nullptr, workspace.data(), nullptr);
    }
    check(cudaDeviceSynchronize());
    return {out.back(),        lse.back(),  kept.back(),      dropped.back(),    grid.back(),
            recomputed.back(), read.back(), numerator.back(), denominator.back()};
  }

  /// Later calls of on_gpu() capture at other lengths and replay at these.
  void through_a_graph() { graph_ = true; }
  void set_splits(int splits) { case_.splits = splits; }

 private:
  void replay(const DecodeParams& p, void* workspace, OnDevice<int32_t>& lengths) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    lengths.set(std::vector<int32_t>(lengths_.size(), 0));
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    fold::cuda::decode(p, {.max_pages = max_pages_}, nullptr, workspace, stream);
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    check(cudaGraphLaunch(executable, stream));
    check(cudaStreamSynchronize(stream));
    lengths.set(lengths_);
    check(cudaGraphLaunch(executable, stream));
    check(cudaStreamSynchronize(stream));
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }

  DecodeParams params() const {
    DecodeParams p{};
    p.cache = {nullptr, sections_.bytes, num_pages_, case_.layout, sections_};
    p.batch = static_cast<int64_t>(case_.lengths.size());
    p.tokens = case_.tokens;
    p.heads = heads_;
    const int64_t d = case_.layout.head_dim;
    p.q_dtype = case_.dtype;
    p.out_dtype = case_.dtype;
    p.q_stride_h = p.out_stride_h = d;
    p.q_stride_t = p.out_stride_t = heads_ * d;
    p.q_stride_b = p.out_stride_b = p.tokens * heads_ * d;
    p.block_table_stride = max_pages_;
    p.tree_stride = p.tokens;
    p.depth_stride_h = 1;
    p.depth_stride_t = heads_;
    p.depth_stride_b = p.tokens * heads_;
    p.qk_scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(d)));
    p.reference_shift = case_.shift;
    p.window_left = case_.window;
    p.key_begin = case_.key_begin;
    p.key_end = case_.key_end;
    p.splits = case_.splits;
    return p;
  }

  Results empty_results(bool partial) const {
    const size_t rows = case_.lengths.size() * case_.tokens * heads_, d = case_.layout.head_dim;
    Results r;
    r.out.assign(rows * d * fold::dtype_size(case_.dtype), 7);
    r.lse = r.kept = r.dropped = std::vector<float>(rows, -7.0f);
    r.recomputed.assign(rows, 7);
    r.bytes.assign(rows / case_.group, -7);
    r.grid.assign(3 * rows, -7.0f);
    r.numerator.assign(partial ? rows * d : 0, -7);
    r.denominator.assign(3 * rows, -7);
    return r;
  }

  static void set_results(DecodeParams& p, Results& r, bool partial) {
    p.out = r.out.data();
    p.lse = r.lse.data();
    p.kept_fraction = r.kept.data();
    p.dropped_mass = r.dropped.data();
    p.recomputed = r.recomputed.data();
    p.bytes_read = r.bytes.data();
    p.numerator = partial ? r.numerator.data() : nullptr;
    p.denominator = r.denominator.data();
    p.grid = r.grid.data();
  }

  Case case_;
  fold::PageSections sections_;
  int64_t heads_ = 0, max_pages_ = 0, num_pages_ = 0;
  std::vector<uint8_t> bytes_;
  std::vector<int32_t> table_, lengths_, q_lens_;
  std::vector<uint8_t> q_;
  std::vector<float> depths_, sinks_;
  std::vector<uint64_t> tree_;
  bool graph_ = false;
};

/// poisoned: which bytes and values rows of NaN read is left open.
void expect_same(const Results& got, const Results& want, bool poisoned = false) {
  expect_same(got.denominator, want.denominator, "denominator");
  expect_same(got.grid, want.grid, "grid");
  expect_same(got.numerator, want.numerator, "numerator");
  expect_same(got.recomputed, want.recomputed, "recomputed");
  if (!poisoned) {
    expect_same(got.bytes, want.bytes, "bytes");
    expect_same(got.kept, want.kept, "kept");
  }
  expect_same(got.dropped, want.dropped, "dropped");
  expect_same(got.lse, want.lse, "lse");
  expect_same(got.out, want.out, "out");
}

/// Outputs and partial sums of the device against the CPU's.
void compare(const Case& c) {
  Batch batch(c);
  for (const bool partial : {true, false}) {
    SCOPED_TRACE(partial ? "partial sums" : "outputs");
    expect_same(batch.on_gpu(partial), batch.on_cpu(partial), c.poisoned);
  }
}

}  // namespace
