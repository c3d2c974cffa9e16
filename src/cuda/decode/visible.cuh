#pragma once
#include "numerics/config.h"
#include "plan/decode_params.h"

// Which keys a token sees: docs/numerics.md, section 5.
namespace fold::cuda {

constexpr int kTile = numerics::kTile;

/// Keys below `draft` are the same physically and logically; node i of a draft tree is physical key draft + i, and the
/// nodes the token sees are the set bits of `path`. Logical keys first..position are visible.
struct Visible {
  int first, position, draft;
  uint64_t path;

  __device__ int count() const { return position - first + 1; }
  __device__ int last_physical() const { return position < draft ? position : draft + 63 - __clzll(path); }
  __device__ int tiles() const { return last_physical() / kTile + 1; }

  /// Key index in the cache of a visible logical key.
  __device__ int physical(int logical) const {
    if (logical < draft) return logical;
    uint64_t rest = path;
#pragma unroll 1
    for (int i = draft; i < logical; ++i) rest &= rest - 1;
    return draft + __ffsll(static_cast<long long>(rest)) - 1;
  }

  /// Whether a key of the cache is visible.
  __device__ bool sees(int key) const {
    if (key < draft) return key >= first && key <= position;
    const int node = key - draft;
    return node < 64 && (path >> node & 1) != 0 && __popcll(path & ((uint64_t{1} << node) - 1)) >= first - draft;
  }

  /// Whether every key of a tile is visible and none of them is a draft node.
  __device__ bool whole(int tile) const {
    const int last = tile * kTile + kTile - 1;
    return tile * kTile >= first && last <= position && last < draft;
  }

  __device__ bool settled(int tile) const { return tile * kTile >= first && tile < settled_end(); }

  /// No tile from here on is settled.
  __device__ int settled_end() const { return (position - kTile + 1) / kTile; }

  /// The visible keys of a tile.
  __device__ uint64_t mask(int tile) const {
    if (whole(tile)) return ~uint64_t{0};
    const int start = tile * kTile;
    uint64_t mask = 0;
    const int low = max(first - start, 0), high = min(min(position + 1, draft) - start, kTile);
    if (low < high) mask = (~uint64_t{0} >> (kTile - (high - low))) << low;
    if (start + kTile > draft) {
      uint64_t nodes = path;
#pragma unroll 1
      for (int skip = first - draft; skip > 0; --skip) nodes &= nodes - 1;  // nodes before the window
      const int shift = draft - start;
      mask |= shift >= 0 ? nodes << shift : shift > -kTile ? nodes >> -shift : 0;
    }
    return mask;
  }

  /// Of a tile's visible keys, those always read.
  __device__ uint64_t always(int tile) const {
    if (!settled(tile)) return mask(tile);
    const int first_key = physical(first);
    return first_key / kTile == tile ? uint64_t{1} << (first_key % kTile) : 0;
  }
};

struct TileRange {
  int begin, end;
};

/// The tiles with visible keys that [key_begin, key_end) touches.
__device__ inline TileRange tiles_within(const Visible& v, int64_t key_begin, int64_t key_end) {
  const int64_t most = v.tiles();
  const int64_t end = min(most, key_end / kTile + (key_end % kTile != 0 ? 1 : 0));
  const int64_t begin = min(end, max(int64_t{v.first}, key_begin) / kTile);
  return {static_cast<int>(begin), static_cast<int>(end)};
}

/// What a request holds, its tokens of this step included. Read past L1: it may be before the kernels before have been
/// waited for.
struct RequestLength {
  int keys, tokens;
};
__device__ inline RequestLength length_of(const plan::DecodeParams& p, int batch) {
  return {__ldcg(p.seqlens + batch), p.q_lens != nullptr ? __ldcg(p.q_lens + batch) : static_cast<int>(p.tokens)};
}

/// False if the token sees no key.
__device__ inline bool find_visible(const plan::DecodeParams& p, const RequestLength& request, int batch, int token,
                                    Visible& v) {
  const auto [length, q_len] = request;
  if (token >= q_len || length < q_len) return false;
  v.draft = length - q_len;
  v.path = p.tree != nullptr
               ? __ldcg(reinterpret_cast<const unsigned long long*>(p.tree) + batch * p.tree_stride + token)
               : 0;
  if (p.tree == nullptr) {  // a chain needs no mask: logical and physical keys agree everywhere
    v.position = v.draft + token;
    v.draft = v.position + 1;
  } else {
    v.position = v.draft + __popcll(v.path) - 1;
  }
  const bool windowed = p.window_left >= 0 && p.window_left < v.position;
  v.first = windowed ? v.position - static_cast<int>(p.window_left) : 0;
  return true;
}

}  // namespace fold::cuda
