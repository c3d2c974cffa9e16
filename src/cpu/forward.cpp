#include "cpu/forward.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "cpu/attention_rows.h"
#include "cpu/buffer.h"
#include "cpu/forward_wide.h"
#include "cpu/parallel.h"

namespace fold::cpu {
namespace {

using plan::KeyRange;
using plan::kKeyTile;
using plan::kQueryTile;
using plan::Sequence;
using plan::TileTask;

struct Scratch {
  explicit Scratch(int64_t padded)
      : q(kQueryTile * padded),
        scores(kQueryTile * kKeyTile),
        weights(kQueryTile * kKeyTile),
        out(kQueryTile * padded) {}

  Buffer<Word> q;        // (kQueryTile, Dp / pack)
  Buffer<float> scores;  // (kQueryTile, kKeyTile)
  Buffer<Word> weights;  // (kQueryTile, kKeyTile / pack)
  Buffer<float> out;     // (kQueryTile, Dp)
  alignas(64) float max[kQueryTile], sum[kQueryTile];
  int32_t first[kQueryTile], last[kQueryTile];
  KeyRange keys[kQueryTile];
  bool wide[kQueryTile];
};

class Forward {
 public:
  explicit Forward(const plan::ForwardParams& params)
      : p_(params),
        kernels_(tile_kernels(params.dtype)),
        all_(plan::sequences(params)),
        padded_(plan::padded_head_dim(params.head_dim)),
        words_(padded_ / kernels_.pack),
        unit_(logit_unit(params)),
        norms_(visible_norms(params, all_, kernels_)) {}

  void run() {
    pack();
    const std::vector<TileTask> tasks = plan::query_tiles(all_, p_.heads);
    const int threads = threads_for(tasks.size());
    std::vector<Scratch> scratch;
    for (int i = 0; i < threads; ++i) scratch.emplace_back(padded_);
    parallel_for(static_cast<int64_t>(tasks.size()), threads,
                 [&](int64_t t) { tile(tasks[t], scratch[static_cast<size_t>(omp_get_thread_num())]); });
    clear_unused();
  }

 private:
  /// First word of a packed key tile of a KV head, each tile kKeyTile * words_ long.
  int64_t packed_at(int64_t sequence, int64_t kv_head, int64_t tile) const {
    const int64_t tiles = plan::ceil_div(all_[static_cast<size_t>(sequence)].k_len, kKeyTile);
    return (first_tile_[static_cast<size_t>(sequence)] + kv_head * tiles + tile) * kKeyTile * words_;
  }

  void pack() {
    int64_t total = 0;
    for (const Sequence& s : all_) {
      first_tile_.push_back(total);
      total += p_.kv_heads * plan::ceil_div(s.k_len, kKeyTile);
    }
    k_ = Buffer<Word>(total * kKeyTile * words_);
    v_ = Buffer<Word>(total * kKeyTile * words_);
    const std::vector<TileTask> tasks = plan::key_tiles(all_, p_.kv_heads);
    const int threads = threads_for(tasks.size());
    Buffer<Word> rows(threads * kKeyTile * words_);
    parallel_for(static_cast<int64_t>(tasks.size()), threads, [&](int64_t t) {
      const auto [sequence, head, tile] = tasks[t];
      const Sequence& s = all_[static_cast<size_t>(sequence)];
      const int64_t first = tile * kKeyTile, count = std::min(kKeyTile, s.k_len - first);
      const int64_t at = packed_at(sequence, head, tile), padded_count = plan::round_up(count, plan::kTileStep);
      Word* staging = rows.data() + omp_get_thread_num() * kKeyTile * words_;
      kernels_.load_rows(row_address(p_.k, p_.dtype, s, s.k_begin, first, head), p_.dtype, p_.k.stride_row, count,
                         padded_count, p_.head_dim, staging);
      transpose_words(staging, padded_count, words_, kKeyTile, k_.data() + at);
      kernels_.load_rows(row_address(p_.v, p_.dtype, s, s.k_begin, first, head), p_.dtype, p_.v.stride_row, count,
                         padded_count, p_.head_dim, staging);
      kernels_.pairs(staging, padded_count, padded_, v_.data() + at);
    });
  }

  void tile(const TileTask& task, Scratch& x) const {
    const Sequence& s = all_[static_cast<size_t>(task.sequence)];
    const int64_t begin = task.tile * kQueryTile, rows = std::min(kQueryTile, s.q_len - begin);
    const int64_t kv_head = task.head / (p_.heads / p_.kv_heads);
    const KeyRange span = classify(task, s, begin, rows, x);

    kernels_.load_rows(row_address(p_.q, p_.dtype, s, s.q_begin, begin, task.head), p_.dtype, p_.q.stride_row, rows,
                       kQueryTile, p_.head_dim, x.q.data());
    std::fill_n(x.out.data(), rows * padded_, 0.0f);
    for (int64_t k = span.first / kKeyTile; k * kKeyTile < span.last; ++k) {
      const int64_t first = k * kKeyTile;
      for (int64_t r = 0; r < rows; ++r) {
        x.first[r] = static_cast<int32_t>(std::clamp<int64_t>(x.keys[r].first - first, 0, kKeyTile));
        x.last[r] = static_cast<int32_t>(std::clamp<int64_t>(x.keys[r].last - first, 0, kKeyTile));
      }
      const int64_t cols = plan::round_up(std::min(kKeyTile, span.last - first), plan::kTileStep);
      const int64_t at = packed_at(task.sequence, kv_head, k);
      kernels_.gemm({.a = x.q.data(),
                     .a_row = words_,
                     .a_word = 1,
                     .b = k_.data() + at,
                     .b_word = kKeyTile,
                     .c = x.scores.data(),
                     .c_row = kKeyTile,
                     .rows = rows,
                     .cols = cols,
                     .words = words_,
                     .accumulate = false});
      kernels_.softmax({.scores = x.scores.data(),
                        .ld = kKeyTile,
                        .rows = rows,
                        .cols = cols,
                        .first = x.first,
                        .last = x.last,
                        .scale = unit_.scale,
                        .max = x.max,
                        .sum = x.sum,
                        .out = x.out.data(),
                        .out_ld = padded_,
                        .weights = x.weights.data(),
                        .weights_ld = kKeyTile / kernels_.pack});
      kernels_.gemm({.a = x.weights.data(),
                     .a_row = kKeyTile / kernels_.pack,
                     .a_word = 1,
                     .b = v_.data() + at,
                     .b_word = padded_,
                     .c = x.out.data(),
                     .c_row = padded_,
                     .rows = rows,
                     .cols = padded_,
                     .words = cols / kernels_.pack,
                     .accumulate = true});
    }
    write(task, s, begin, rows, x);
  }

  /// Decides how each row is computed; returns the keys that the tile's fp32 rows see between them.
  KeyRange classify(const TileTask& task, const Sequence& s, int64_t begin, int64_t rows, Scratch& x) const {
    const int64_t norms = task.head / (p_.heads / p_.kv_heads) * p_.total_q + s.q_global + begin;
    const float sink = p_.sinks ? p_.sinks[task.head] : -INFINITY;
    KeyRange span{s.k_len, 0};
    alignas(64) float q[256];
    for (int64_t r = 0; r < rows; ++r) {
      x.keys[r] = visible_keys(p_, s, begin + r);
      kernels_.to_float(row_address(p_.q, p_.dtype, s, s.q_begin, begin + r, task.head), p_.dtype, p_.head_dim, q);
      const auto at = static_cast<size_t>(norms + r);
      x.wide[r] =
          !x.keys[r].empty() && !softmax_fits(unit_.scale, kernels_.norm(q, padded_), norms_.k[at], norms_.v[at], sink);
      if (x.wide[r]) x.keys[r].last = x.keys[r].first;  // no key as far as the tile is concerned
      x.max[r] = static_cast<float>(sink / unit_.natural);
      x.sum[r] = sink == -INFINITY ? 0.0f : 1.0f;
      if (x.keys[r].empty()) continue;
      span.first = std::min(span.first, x.keys[r].first);
      span.last = std::max(span.last, x.keys[r].last);
    }
    return span;
  }

  void write(const TileTask& task, const Sequence& s, int64_t begin, int64_t rows, const Scratch& x) const {
    for (int64_t r = 0; r < rows; ++r) {
      if (x.wide[r]) {
        wide_forward_row(p_, s, task.head, begin + r);
        continue;
      }
      const bool empty = x.keys[r].empty();
      void* out = row_address(p_.out, p_.dtype, s, s.q_begin, begin + r, task.head);
      kernels_.store(x.out.data() + r * padded_, empty ? 0.0f : 1.0f / x.sum[r], p_.head_dim, p_.dtype, out);
      if (p_.lse.data) {
        const double lse = x.max[r] * unit_.natural + std::log(static_cast<double>(x.sum[r]));
        store_element(row_address(p_.lse, DType::f32, s, s.q_begin, begin + r, task.head), DType::f32, 0,
                      empty ? -INFINITY : lse);
      }
    }
  }

  /// Rows behind the last packed sequence.
  void clear_unused() const {
    if (!p_.cu_seqlens_q) return;
    const Sequence none{};
    for (int64_t row = p_.cu_seqlens_q[p_.batch]; row < p_.total_q; ++row) {
      for (int64_t head = 0; head < p_.heads; ++head) {
        clear_row(row_address(p_.out, p_.dtype, none, 0, row, head), p_.dtype, p_.head_dim);
        if (p_.lse.data) store_element(row_address(p_.lse, DType::f32, none, 0, row, head), DType::f32, 0, -INFINITY);
      }
    }
  }

  const plan::ForwardParams p_;
  const TileKernels& kernels_;
  const std::vector<Sequence> all_;
  const int64_t padded_, words_;
  const LogitUnit unit_;
  const VisibleNorms norms_;
  std::vector<int64_t> first_tile_;  // (B,) first packed tile of a sequence
  Buffer<Word> k_;                   // columns tiles
  Buffer<Word> v_;                   // pairs tiles
};

}  // namespace

void attention_forward(const plan::ForwardParams& p) { Forward(p).run(); }

}  // namespace fold::cpu
