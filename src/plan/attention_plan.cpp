#include "plan/attention_plan.h"

#include <algorithm>

namespace fold::plan {
namespace {

std::vector<TileTask> tiles(const std::vector<Sequence>& all, int64_t heads, int64_t tile, int64_t Sequence::*length) {
  std::vector<TileTask> tasks;
  for (size_t s = 0; s < all.size(); ++s) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t t = 0; t < ceil_div(all[s].*length, tile); ++t) tasks.push_back({static_cast<int64_t>(s), head, t});
    }
  }
  return tasks;
}

}  // namespace

std::vector<Sequence> sequences(const ForwardParams& p) {
  std::vector<Sequence> all(static_cast<size_t>(p.batch));
  for (int64_t b = 0; b < p.batch; ++b) {
    Sequence& s = all[static_cast<size_t>(b)];
    s.index = b;
    if (p.cu_seqlens_q) {
      s.q_begin = s.q_global = p.cu_seqlens_q[b];
      s.q_len = p.cu_seqlens_q[b + 1] - s.q_begin;
      s.k_begin = s.k_global = p.cu_seqlens_k[b];
      s.k_len = p.cu_seqlens_k[b + 1] - s.k_begin;
    } else {
      s.q_begin = s.k_begin = 0;
      s.q_len = p.seqlen_q;
      s.k_len = p.seqlen_k;
      s.q_global = b * p.seqlen_q;
      s.k_global = b * p.seqlen_k;
    }
  }
  return all;
}

KeyRange rows_seeing(const ForwardParams& p, const Sequence& s, int64_t k_first, int64_t k_last) {
  // Row i sees key j when i + Sk - Sq - left <= j <= i + Sk - Sq + right.
  const int64_t shift = s.q_len - s.k_len;
  const int64_t first = std::clamp<int64_t>(k_first + shift - p.window_right, 0, s.q_len);
  const int64_t last = std::clamp<int64_t>(k_last + shift + p.window_left, first, s.q_len);
  return {first, last};
}

std::vector<TileTask> query_tiles(const std::vector<Sequence>& all, int64_t heads) {
  return tiles(all, heads, kQueryTile, &Sequence::q_len);
}

std::vector<TileTask> key_tiles(const std::vector<Sequence>& all, int64_t kv_heads) {
  return tiles(all, kv_heads, kKeyTile, &Sequence::k_len);
}

}  // namespace fold::plan
