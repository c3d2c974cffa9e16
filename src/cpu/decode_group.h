#pragma once
#include <cstdint>
#include <vector>

#include "numerics/block.h"
#include "numerics/gates.h"
#include "plan/cache_access.h"
#include "plan/decode_params.h"

// One token's rows on one KV head: the unit that decides together what is read (docs/numerics.md, sections 5-8).
namespace fold::cpu {

constexpr int kMaxRows = 64;  ///< query heads a KV head may serve
constexpr int kTile = numerics::kTile;

/// The query planes of a group, in the channel orders its dot products meet. G rows.
struct Query {
  std::vector<int8_t> a_split, b_split;    // (G, D): even channels, then odd ones
  std::vector<int8_t> a, b;                // (G, D)
  int32_t sum_a[kMaxRows], sum[kMaxRows];  // channel sums of a and of 256 a + b
  float scale[kMaxRows];                   // e_q
  float margin[kMaxRows];                  // M of section 6
};

struct Group {
  const plan::DecodeParams* params;
  int64_t batch, token, kv_head;  // which
  int rows, head_dim;             // G, D
  const int32_t* pages;           // the request's row of the block table
  // Visible keys (section 5). Keys below `draft` are the same physically and logically; node i of a draft tree is
  // physical key draft + i, and the tree's nodes the token sees are the set bits of `path`.
  int64_t draft;
  uint64_t path;
  int64_t first, position;  // logical: keys first..position are visible

  Query query;
  float z[kMaxRows];
  float spread[kMaxRows];  // S of section 5
  numerics::Gates gates[kMaxRows];
  bool poisoned[kMaxRows];
  bool recomputed[kMaxRows];
  int e_exponent[kMaxRows];  // E = 2^e_exponent
  int shrunk[kMaxRows];      // bits by which E is smaller than the bound of section 5
  int typical_exponent;      // of the settled blocks' bounds (section 6)
  int64_t fit_mark;          // 0: no correction
  int fit_shift[kMaxRows];   // sh of section 7

  // Sums (section 7), added to by any number of ranges in any order.
  std::vector<int64_t> num;  // (G, D) rotated channels
  int64_t den[kMaxRows], mass[kMaxRows], dropped[kMaxRows];
  float peak[kMaxRows];
  int64_t values_read[kMaxRows];  // keys whose V was read
  int64_t bytes;                  // cache bytes needed

  int64_t visible() const { return position - first + 1; }
  int64_t tiles() const { return (last_physical() / kTile) + 1; }
  int64_t last_physical() const;
  int64_t physical(int64_t logical) const;  ///< key index in the cache of a visible logical key
  uint64_t visible_mask(int64_t tile) const;
  uint64_t always_mask(int64_t tile) const;  ///< of the visible keys, those always read
  bool settled(int64_t tile) const { return tile * kTile >= first && tile * kTile + kTile - 1 <= position - kTile; }
  plan::HeadPage page_of(int64_t key) const {
    return plan::head_page(params->cache, pages[key / params->cache.layout.page_size], kv_head);
  }
  /// What a tile's outliers add to the gates of its values.
  float outlier_depth(int64_t tile, uint16_t bound) const {
    return settled(tile) ? numerics::outlier_depth(bound, typical_exponent) : 0.0f;
  }
  int64_t slot_of(int64_t key) const { return key % params->cache.layout.page_size; }
};

struct DecodeKernels;

/// Sets up a group: visible keys, query planes, E, the depth's gates. False if it sees no key. Leaves z, spread and
/// what the spread does to the gates to sample_reference().
bool prepare_group(Group& group, const plan::DecodeParams& params, const DecodeKernels& kernels, int64_t batch,
                   int64_t token, int64_t kv_head);

/// Clears the sums.
void clear_sums(Group& group);

/// A group of the given rows alone, without sums.
Group select(const Group& group, const std::vector<int>& rows);

/// Takes the sums of what was select(group, rows). Bytes read add up.
void put_back(const Group& part, const std::vector<int>& rows, Group& group);

}  // namespace fold::cpu
