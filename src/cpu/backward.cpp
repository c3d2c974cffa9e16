#include "cpu/backward.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "cpu/attention_rows.h"
#include "cpu/backward_wide.h"
#include "cpu/buffer.h"
#include "cpu/parallel.h"
#include "numerics/int_grid.h"

namespace fold::cpu {
namespace {

using plan::KeyRange;
using plan::kKeyTile;
using plan::kQueryTile;
using plan::Sequence;
using plan::TileTask;

struct Scratch {
  explicit Scratch(int64_t padded)
      : staging(kKeyTile * padded),
        k_columns(kKeyTile * padded),
        k_pairs(kKeyTile * padded),
        v_columns(kKeyTile * padded),
        dk(kKeyTile * padded),
        dv(kKeyTile * padded),
        q(kQueryTile * padded),
        q_pairs(kQueryTile * padded),
        dout(kQueryTile * padded),
        dout_pairs(kQueryTile * padded),
        dq(kQueryTile * padded),
        scores(kQueryTile * kKeyTile),
        dp(kQueryTile * kKeyTile),
        p_pairs(kQueryTile * kKeyTile),
        ds_pairs(kQueryTile * kKeyTile),
        ds_rows(kQueryTile * kKeyTile) {}

  Buffer<Word> staging, k_columns, k_pairs, v_columns;  // a key tile
  Buffer<float> dk, dv;                                 // (kKeyTile, Dp)
  Buffer<Word> q, q_pairs, dout, dout_pairs;            // a query tile
  Buffer<float> dq;                                     // (kQueryTile, Dp)
  Buffer<float> scores, dp;                             // (kQueryTile, kKeyTile)
  Buffer<Word> p_pairs, ds_pairs, ds_rows;
  float lse2[kQueryTile], lse2_low[kQueryTile], delta[kQueryTile];
  int32_t first[kQueryTile], last[kQueryTile];
};

class Backward {
 public:
  Backward(const plan::BackwardParams& params, GridAudit* audit)
      : b_(params),
        p_(params.forward),
        kernels_(tile_kernels(p_.dtype)),
        all_(plan::sequences(p_)),
        padded_(plan::padded_head_dim(p_.head_dim)),
        words_(padded_ / kernels_.pack),
        unit_(logit_unit(p_)),
        norms_(visible_norms(p_, all_, kernels_)),
        lse2_(p_.heads * p_.total_q),
        lse2_low_(p_.heads * p_.total_q),
        delta_(p_.heads * p_.total_q),
        is_wide_(p_.heads * p_.total_q),
        wide_(p_.heads * p_.total_q),
        grid_(p_.dtype, p_.heads * p_.total_q, padded_, kernels_, audit) {}

  void run() {
    const std::vector<TileTask> query_tasks = plan::query_tiles(all_, p_.heads);
    const std::vector<TileTask> key_tasks = plan::key_tiles(all_, p_.kv_heads);
    const int query_threads = threads_for(query_tasks.size()), key_threads = threads_for(key_tasks.size());
    std::vector<Scratch> scratch;
    for (int i = 0; i < key_threads; ++i) scratch.emplace_back(padded_);
    const auto query_count = static_cast<int64_t>(query_tasks.size()),
               key_count = static_cast<int64_t>(key_tasks.size());
    parallel_for(query_count, query_threads, [&](int64_t t) { prepare_tile(query_tasks[t]); });
    parallel_for(key_count, key_threads,
                 [&](int64_t t) { key_tile(key_tasks[t], scratch[static_cast<size_t>(omp_get_thread_num())]); });
    parallel_for(query_count, query_threads, [&](int64_t t) { finish_tile(query_tasks[t]); });
    if (b_.dsinks) sink_gradients();
    clear_unused();
  }

 private:
  int64_t workspace_row(const Sequence& s, int64_t head, int64_t row) const {
    return head * p_.total_q + s.q_global + row;
  }
  int64_t group() const { return p_.heads / p_.kv_heads; }

  void prepare_tile(const TileTask& task) {
    const Sequence& s = all_[static_cast<size_t>(task.sequence)];
    const int64_t end = std::min((task.tile + 1) * kQueryTile, s.q_len);
    for (int64_t row = task.tile * kQueryTile; row < end; ++row) prepare_row(s, task.head, row);
  }

  /// Delta, log-sum-exp in base 2, the row's class and its grid.
  void prepare_row(const Sequence& s, int64_t head, int64_t row) {
    const int64_t at = workspace_row(s, head, row);
    const auto norm_at = static_cast<size_t>(workspace_row(s, head / group(), row));
    alignas(64) float q[256], out[256], dout[256];
    kernels_.to_float(row_address(p_.q, p_.dtype, s, s.q_begin, row, head), p_.dtype, p_.head_dim, q);
    kernels_.to_float(row_address(p_.out, p_.dtype, s, s.q_begin, row, head), p_.dtype, p_.head_dim, out);
    kernels_.to_float(row_address(b_.dout, p_.dtype, s, s.q_begin, row, head), p_.dtype, p_.head_dim, dout);
    const float lse = *reinterpret_cast<const float*>(row_address(p_.lse, DType::f32, s, s.q_begin, row, head));
    const float sink = p_.sinks ? p_.sinks[head] : -INFINITY;
    const double q_norm = kernels_.norm(q, padded_), dout_norm = kernels_.norm(dout, padded_);
    const double k_norm = norms_.k[norm_at], v_norm = norms_.v[norm_at];
    const float delta = kernels_.dot(dout, out, padded_);

    const bool empty = visible_keys(p_, s, row).empty();
    const double bound = numerics::dq_bound(dout_norm, v_norm, std::fabs(delta), k_norm);
    const double dk_bound = numerics::dq_bound(dout_norm, v_norm, std::fabs(delta), q_norm);
    const bool fits =
        softmax_fits(unit_.scale, static_cast<float>(q_norm), norms_.k[norm_at], norms_.v[norm_at], sink) &&
        std::isfinite(lse) && numerics::zero_or_safe(dout_norm) && numerics::zero_or_safe(dout_norm * v_norm) &&
        numerics::zero_or_safe(bound) && numerics::zero_or_safe(dk_bound);
    is_wide_[at] = !empty && !fits;
    if (is_wide_[at]) {
      wide_[at] = wide_backward_row(b_, s, head, row);
    } else {
      const double lse2 = empty ? 0.0 : lse / unit_.natural;
      lse2_[at] = static_cast<float>(lse2);
      lse2_low_[at] = static_cast<float>(lse2 - lse2_[at]);
      delta_[at] = empty ? 0.0f : delta;
      grid_.start_row(at, empty ? 0.0 : bound);
    }
  }

  void key_tile(const TileTask& task, Scratch& x) {
    const Sequence& s = all_[static_cast<size_t>(task.sequence)];
    const int64_t first = task.tile * kKeyTile, count = std::min(kKeyTile, s.k_len - first);
    const int64_t cols = plan::round_up(count, plan::kTileStep);
    kernels_.load_rows(row_address(p_.k, p_.dtype, s, s.k_begin, first, task.head), p_.dtype, p_.k.stride_row, count,
                       cols, p_.head_dim, x.staging.data());
    transpose_words(x.staging.data(), cols, words_, kKeyTile, x.k_columns.data());
    kernels_.pairs(x.staging.data(), cols, padded_, x.k_pairs.data());
    kernels_.load_rows(row_address(p_.v, p_.dtype, s, s.k_begin, first, task.head), p_.dtype, p_.v.stride_row, count,
                       cols, p_.head_dim, x.staging.data());
    transpose_words(x.staging.data(), cols, words_, kKeyTile, x.v_columns.data());
    std::fill_n(x.dk.data(), kKeyTile * padded_, 0.0f);
    std::fill_n(x.dv.data(), kKeyTile * padded_, 0.0f);

    // The task walks every row that sees its keys, so dK and dV are its own; the order is the rows' own.
    const KeyRange rows = rows_seeing(p_, s, first, first + count);
    for (int64_t head = task.head * group(); head < (task.head + 1) * group(); ++head) {
      for (int64_t q = rows.first / kQueryTile; q * kQueryTile < rows.last; ++q) {
        query_tile(s, head, q * kQueryTile, first, count, x);
      }
    }
    for (int64_t j = 0; j < count; ++j) {
      kernels_.store(&x.dk[j * padded_], p_.softmax_scale, p_.head_dim, b_.grad_dtype,
                     row_address(b_.dk, b_.grad_dtype, s, s.k_begin, first + j, task.head));
      kernels_.store(&x.dv[j * padded_], 1.0f, p_.head_dim, b_.grad_dtype,
                     row_address(b_.dv, b_.grad_dtype, s, s.k_begin, first + j, task.head));
    }
  }

  /// The share of one query tile in the gradients of one key tile, and the reverse.
  void query_tile(const Sequence& s, int64_t head, int64_t begin, int64_t first, int64_t count, Scratch& x) {
    const int64_t rows = std::min(kQueryTile, s.q_len - begin);
    int64_t seen = 0;  // keys of the tile up to the last one that a row sees
    bool any_wide = false;
    for (int64_t r = 0; r < kQueryTile; ++r) {
      x.first[r] = x.last[r] = 0;
      x.lse2[r] = x.lse2_low[r] = x.delta[r] = 0.0f;
      if (r >= rows) continue;
      const int64_t at = workspace_row(s, head, begin + r);
      any_wide = any_wide || is_wide_[at];
      if (is_wide_[at]) continue;
      const KeyRange keys = visible_keys(p_, s, begin + r);
      x.first[r] = static_cast<int32_t>(std::clamp<int64_t>(keys.first - first, 0, count));
      x.last[r] = static_cast<int32_t>(std::clamp<int64_t>(keys.last - first, 0, count));
      if (x.first[r] < x.last[r]) seen = std::max<int64_t>(seen, x.last[r]);
      x.lse2[r] = lse2_[at];
      x.lse2_low[r] = lse2_low_[at];
      x.delta[r] = delta_[at];
    }
    if (seen > 0) plain_rows(s, head, begin, rows, plan::round_up(seen, plan::kTileStep), x);
    if (any_wide) wide_rows(s, head, begin, rows, {first, first + count}, x);
  }

  void plain_rows(const Sequence& s, int64_t head, int64_t begin, int64_t rows, int64_t keys, Scratch& x) {
    const int64_t pack = kernels_.pack, even_rows = plan::round_up(rows, pack);
    kernels_.load_rows(row_address(p_.q, p_.dtype, s, s.q_begin, begin, head), p_.dtype, p_.q.stride_row, rows,
                       kQueryTile, p_.head_dim, x.q.data());
    kernels_.load_rows(row_address(b_.dout, p_.dtype, s, s.q_begin, begin, head), p_.dtype, b_.dout.stride_row, rows,
                       kQueryTile, p_.head_dim, x.dout.data());
    kernels_.pairs(x.q.data(), even_rows, padded_, x.q_pairs.data());
    kernels_.pairs(x.dout.data(), even_rows, padded_, x.dout_pairs.data());
    Word* ds_rows = pack == 1 ? x.ds_pairs.data() : x.ds_rows.data();

    kernels_.gemm({.a = x.q.data(),
                   .a_row = words_,
                   .a_word = 1,
                   .b = x.k_columns.data(),
                   .b_word = kKeyTile,
                   .c = x.scores.data(),
                   .c_row = kKeyTile,
                   .rows = rows,
                   .cols = keys,
                   .words = words_,
                   .accumulate = false});
    kernels_.gemm({.a = x.dout.data(),
                   .a_row = words_,
                   .a_word = 1,
                   .b = x.v_columns.data(),
                   .b_word = kKeyTile,
                   .c = x.dp.data(),
                   .c_row = kKeyTile,
                   .rows = rows,
                   .cols = keys,
                   .words = words_,
                   .accumulate = false});
    kernels_.gradient({.scores = x.scores.data(),
                       .dp = x.dp.data(),
                       .ld = kKeyTile,
                       .rows = even_rows,
                       .cols = keys,
                       .first = x.first,
                       .last = x.last,
                       .scale = unit_.scale,
                       .lse2 = x.lse2,
                       .lse2_low = x.lse2_low,
                       .delta = x.delta,
                       .p_pairs = x.p_pairs.data(),
                       .ds_pairs = x.ds_pairs.data(),
                       .ds_rows = ds_rows});
    kernels_.gemm({.a = x.p_pairs.data(),
                   .a_row = 1,
                   .a_word = kKeyTile,
                   .b = x.dout_pairs.data(),
                   .b_word = padded_,
                   .c = x.dv.data(),
                   .c_row = padded_,
                   .rows = keys,
                   .cols = padded_,
                   .words = even_rows / pack,
                   .accumulate = true});
    kernels_.gemm({.a = x.ds_pairs.data(),
                   .a_row = 1,
                   .a_word = kKeyTile,
                   .b = x.q_pairs.data(),
                   .b_word = padded_,
                   .c = x.dk.data(),
                   .c_row = padded_,
                   .rows = keys,
                   .cols = padded_,
                   .words = even_rows / pack,
                   .accumulate = true});
    kernels_.gemm({.a = ds_rows,
                   .a_row = kKeyTile / pack,
                   .a_word = 1,
                   .b = x.k_pairs.data(),
                   .b_word = padded_,
                   .c = x.dq.data(),
                   .c_row = padded_,
                   .rows = rows,
                   .cols = padded_,
                   .words = keys / pack,
                   .accumulate = false});
    grid_.add(workspace_row(s, head, begin), rows, x.dq.data());
  }

  void wide_rows(const Sequence& s, int64_t head, int64_t begin, int64_t rows, KeyRange tile, Scratch& x) const {
    for (int64_t row = begin; row < begin + rows; ++row) {
      const int64_t at = workspace_row(s, head, row);
      if (!is_wide_[at]) continue;
      const KeyRange all = visible_keys(p_, s, row);
      const KeyRange keys{std::max(all.first, tile.first), std::min(all.last, tile.last)};
      const int64_t offset = (keys.first - tile.first) * padded_;
      if (!keys.empty()) add_wide_row(b_, s, head, row, wide_[at], keys, padded_, &x.dk[offset], &x.dv[offset]);
    }
  }

  void finish_tile(const TileTask& task) const {
    const Sequence& s = all_[static_cast<size_t>(task.sequence)];
    const int64_t end = std::min((task.tile + 1) * kQueryTile, s.q_len);
    alignas(64) float dq[256];
    for (int64_t row = task.tile * kQueryTile; row < end; ++row) {
      const int64_t at = workspace_row(s, task.head, row);
      if (is_wide_[at]) continue;  // written when it was prepared
      grid_.read_row(at, p_.softmax_scale, dq);
      kernels_.store(dq, 1.0f, p_.head_dim, b_.grad_dtype,
                     row_address(b_.dq, b_.grad_dtype, s, s.q_begin, row, task.head));
    }
  }

  /// The sink's value is zero, so dS of its logit is -P Delta. One fixed order per head, in fp64.
  void sink_gradients() const {
    parallel_for(p_.heads, [&](int64_t head) {
      const double sink = p_.sinks[head];
      double total = 0.0;
      for (const Sequence& s : all_) {
        double sum = 0.0;
        for (int64_t row = 0; row < s.q_len; ++row) {
          if (visible_keys(p_, s, row).empty()) continue;
          const int64_t at = workspace_row(s, head, row);
          const WideReference& wide = wide_[at].reference;
          sum -= is_wide_[at]
                     ? std::exp(sink - wide.max - wide.log_sum) * wide_[at].delta
                     : std::exp(sink - (static_cast<double>(lse2_[at]) + lse2_low_[at]) * unit_.natural) * delta_[at];
        }
        total += sum;
      }
      b_.dsinks[head] = static_cast<float>(total);
    });
  }

  /// Rows and keys behind the last packed sequence.
  void clear_unused() const {
    if (!p_.cu_seqlens_q) return;
    const Sequence none{};
    for (int64_t row = p_.cu_seqlens_q[p_.batch]; row < p_.total_q; ++row) {
      for (int64_t head = 0; head < p_.heads; ++head) {
        clear_row(row_address(b_.dq, b_.grad_dtype, none, 0, row, head), b_.grad_dtype, p_.head_dim);
      }
    }
    for (int64_t row = p_.cu_seqlens_k[p_.batch]; row < p_.total_k; ++row) {
      for (int64_t head = 0; head < p_.kv_heads; ++head) {
        clear_row(row_address(b_.dk, b_.grad_dtype, none, 0, row, head), b_.grad_dtype, p_.head_dim);
        clear_row(row_address(b_.dv, b_.grad_dtype, none, 0, row, head), b_.grad_dtype, p_.head_dim);
      }
    }
  }

  const plan::BackwardParams b_;
  const plan::ForwardParams& p_;
  const TileKernels& kernels_;
  const std::vector<Sequence> all_;
  const int64_t padded_, words_;
  const LogitUnit unit_;
  const VisibleNorms norms_;
  // (H, total_q)
  Buffer<float> lse2_, lse2_low_;  // log-sum-exp in units of logits, in two parts
  Buffer<float> delta_;
  Buffer<uint8_t> is_wide_;
  Buffer<WideRow> wide_;
  DqGrid grid_;
};

}  // namespace

void attention_backward(const plan::BackwardParams& p, GridAudit* audit) { Backward(p, audit).run(); }

}  // namespace fold::cpu
