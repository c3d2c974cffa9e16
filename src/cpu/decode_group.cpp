#include "cpu/decode_group.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "cpu/convert.h"
#include "cpu/decode_range.h"
#include "numerics/reference.h"

namespace fold::cpu {
namespace {

using plan::DecodeParams;

void split_query(Group& g, const DecodeKernels& kernels) {
  const DecodeParams& p = *g.params;
  const int d = g.head_dim, half = d / 2;
  Query& q = g.query;
  for (auto* plane : {&q.a_split, &q.b_split, &q.a, &q.b}) plane->resize(static_cast<size_t>(g.rows) * d);
  for (int r = 0; r < g.rows; ++r) {
    float row[numerics::kMaxHeadDim];
    load_row(p.q, p.q_dtype, g.batch * p.q_stride_b + g.token * p.q_stride_t + (g.kv_head * g.rows + r) * p.q_stride_h,
             d, row);
    for (int c = 0; c < d; ++c) row[c] = numerics::mul(row[c], p.qk_scale);
    int8_t* a = &q.a[static_cast<size_t>(r) * d];
    int8_t* b = &q.b[static_cast<size_t>(r) * d];
    q.scale[r] = numerics::from_bf16(kernels.split_row(row, d, a, b));
    int32_t squares = 0, sum_a = 0, sum_b = 0;
    for (int c = 0; c < d; ++c) {
      sum_a += a[c];
      sum_b += b[c];
      squares += a[c] * a[c];
      const size_t split = static_cast<size_t>(r) * d + (c % 2) * half + c / 2;
      q.a_split[split] = a[c];
      q.b_split[split] = b[c];
    }
    q.sum_a[r] = sum_a;
    q.sum[r] = 256 * sum_a + sum_b;
    q.margin[r] = numerics::mul(numerics::kMarginFactor,
                                numerics::mul(q.scale[r], numerics::sqrt_rn(static_cast<float>(squares))));
  }
}

/// The largest visible V scale as bf16 bits; NaN (which orders above all) if a visible key is poisoned. Sets
/// typical_exponent.
uint16_t survey_scales(Group& g) {
  uint16_t largest = 0;
  int64_t exponents = 0, settled = 0;
  plan::HeadPage page{};
  for (int64_t tile = g.first / kTile; tile < g.tiles(); ++tile) {
    const int64_t slot = g.slot_of(tile * kTile);
    if (slot == 0 || page.bound == nullptr) page = g.page_of(tile * kTile);
    if (tile * kTile >= g.first && tile * kTile + kTile - 1 <= std::min(g.position, g.draft - 1)) {
      const uint16_t bound = page.bound[slot / kTile];
      largest = std::max(largest, bound);
      exponents += g.settled(tile) ? numerics::pow2_ceil_exponent(bound) : 0;
      settled += g.settled(tile);
      continue;
    }
    uint64_t mask = g.visible_mask(tile);
    for (; mask != 0; mask &= mask - 1) {
      const int64_t at = slot + numerics::scale_slot(std::countr_zero(mask));
      largest = std::max(
          {largest, page.v_scale[at], page.k_scale[at] == numerics::kBf16Nan ? numerics::kBf16Nan : uint16_t{0}});
    }
  }
  g.typical_exponent = settled > 0 ? numerics::typical_exponent(exponents, settled) : 0;
  return largest;
}

}  // namespace

int64_t Group::last_physical() const { return position < draft ? position : draft + 63 - std::countl_zero(path); }

int64_t Group::physical(int64_t logical) const {
  if (logical < draft) return logical;
  uint64_t rest = path;
  for (int64_t i = draft; i < logical; ++i) rest &= rest - 1;
  return draft + std::countr_zero(rest);
}

uint64_t Group::visible_mask(int64_t tile) const {
  const int64_t start = tile * kTile;
  uint64_t mask = 0;
  const int64_t prefix_end = std::min(position + 1, draft);
  const int64_t low = std::max<int64_t>(first - start, 0), high = std::min<int64_t>(prefix_end - start, kTile);
  if (low < high) mask = (~uint64_t{0} >> (kTile - (high - low))) << low;
  if (start + kTile > draft) {
    uint64_t nodes = path;
    for (int64_t skip = first - draft; skip > 0; --skip) nodes &= nodes - 1;  // nodes before the window
    const int64_t shift = draft - start;
    mask |= shift >= 0 ? nodes << shift : shift > -kTile ? nodes >> -shift : 0;
  }
  return mask;
}

uint64_t Group::always_mask(int64_t tile) const {
  if (!settled(tile)) return visible_mask(tile);
  const int64_t first_key = physical(first);
  return first_key / kTile == tile ? uint64_t{1} << (first_key % kTile) : 0;
}

bool prepare_group(Group& g, const DecodeParams& p, const DecodeKernels& kernels, int64_t batch, int64_t token,
                   int64_t kv_head) {
  const CacheLayout& layout = p.cache.layout;
  g.params = &p;
  g.batch = batch;
  g.token = token;
  g.kv_head = kv_head;
  g.rows = static_cast<int>(p.heads / layout.n_kv_heads);
  g.head_dim = static_cast<int>(layout.head_dim);
  g.pages = p.block_table + batch * p.block_table_stride;
  std::fill_n(g.recomputed, g.rows, false);
  clear_sums(g);

  const int64_t length = p.seqlens[batch];
  const int64_t q_len = p.q_lens != nullptr ? p.q_lens[batch] : p.tokens;
  if (token >= q_len || length < q_len) return false;
  g.draft = length - q_len;
  g.path = p.tree != nullptr ? p.tree[batch * p.tree_stride + token] : 0;
  if (p.tree == nullptr) {  // a chain needs no mask: logical and physical keys agree everywhere
    g.position = g.draft + token;
    g.draft = g.position + 1;
  } else {
    g.position = g.draft + std::popcount(g.path) - 1;
  }
  g.first = p.window_left < 0 ? 0 : std::max<int64_t>(0, g.position - p.window_left);

  split_query(g, kernels);
  const uint16_t largest = survey_scales(g);
  const bool bad_key = largest >= 0x7F80;
  for (int r = 0; r < g.rows; ++r) {
    g.e_exponent[r] = bad_key ? 0 : numerics::pow2_ceil_exponent(largest);
    g.shrunk[r] = 0;
    g.poisoned[r] = bad_key || !numerics::is_finite(g.query.scale[r]);
    const float depth =
        p.depth == nullptr
            ? std::numeric_limits<float>::infinity()
            : p.depth[batch * p.depth_stride_b + token * p.depth_stride_t + (kv_head * g.rows + r) * p.depth_stride_h];
    g.gates[r] = p.gates != nullptr ? numerics::Gates{p.gates[0], p.gates[1], p.gates[2], p.gates[3], p.gates[4]}
                                    : numerics::gates_for_depth(depth);
    g.fit_shift[r] = static_cast<int>(std::clamp(std::ceil(18.0f - g.gates[r].v_h), 0.0f, 24.0f));
  }
  const bool corrected = layout.tail && p.window_left < 0;
  g.fit_mark = corrected ? plan::last_mark(g.position - (kTile - 1)) : 0;
  return true;
}

void clear_sums(Group& g) {
  g.num.assign(static_cast<size_t>(g.rows) * g.head_dim, 0);
  for (int64_t* sums : {g.den, g.mass, g.dropped, g.values_read}) std::fill_n(sums, g.rows, 0);
  std::fill_n(g.peak, g.rows, -std::numeric_limits<float>::infinity());
  g.bytes = 0;
}

Group select(const Group& g, const std::vector<int>& rows) {
  Group part = g;
  part.rows = static_cast<int>(rows.size());
  const auto copy = [&](const auto& from, auto& to, int64_t size) {
    for (size_t i = 0; i < rows.size(); ++i) std::copy_n(&from[rows[i] * size], size, &to[i * size]);
  };
  const Query& q = g.query;
  copy(q.a_split, part.query.a_split, g.head_dim);
  copy(q.b_split, part.query.b_split, g.head_dim);
  copy(q.a, part.query.a, g.head_dim);
  copy(q.b, part.query.b, g.head_dim);
  copy(q.sum_a, part.query.sum_a, 1);
  copy(q.sum, part.query.sum, 1);
  copy(q.scale, part.query.scale, 1);
  copy(q.margin, part.query.margin, 1);
  copy(g.z, part.z, 1);
  copy(g.gates, part.gates, 1);
  copy(g.poisoned, part.poisoned, 1);
  copy(g.e_exponent, part.e_exponent, 1);
  copy(g.fit_shift, part.fit_shift, 1);
  clear_sums(part);
  return part;
}

void put_back(const Group& part, const std::vector<int>& rows, Group& g) {
  const auto copy = [&](const auto& from, auto& to, int64_t size) {
    for (size_t i = 0; i < rows.size(); ++i) std::copy_n(&from[i * size], size, &to[rows[i] * size]);
  };
  copy(part.num, g.num, g.head_dim);
  copy(part.den, g.den, 1);
  copy(part.mass, g.mass, 1);
  copy(part.dropped, g.dropped, 1);
  copy(part.values_read, g.values_read, 1);
  copy(part.peak, g.peak, 1);
  g.bytes += part.bytes;
}

}  // namespace fold::cpu
