#pragma once
#include "cuda/cache/bringing.cuh"
#include "cuda/decode/visible.cuh"
#include "numerics/gates.h"
#include "numerics/reference.h"
#include "plan/decode_params.h"

// What the kernels of a decode step hand to each other. A group is one token's rows on one KV head, the unit that
// decides together what is read (docs/numerics.md, sections 5-8); group index: (batch * T + token) * HK + KV head.
namespace fold::cuda {

constexpr int kMaxRows = 64;  ///< query heads a KV head may serve

struct alignas(16) GroupHead {
  int run;              // 0, and one more each time rows run again
  unsigned arrivals;    // items of this run that are done
  int fit_mark;         // 0: no correction
  int typical;          // exponent of the settled blocks' bounds (section 6)
  int seen;             // 0: the token sees no key, and its results are written
  int outliers;         // whether a settled block's bound is so far above the typical one that it is read deeper
  uint64_t nan;         // rows whose output is NaN
  uint64_t active;      // rows that this run sums
  uint64_t recomputed;  // rows that ran again
  unsigned long long bytes;
};

struct RowState {
  float z, spread, e_q, margin;
  numerics::Gates gates;
  int e_exponent, shrunk, fit_shift;  // E = 2^e_exponent
  int sum_a, sum;                     // channel sums of qa and of 256 qa + qb
};

/// Of a row that is not summed: it asks for nothing and weighs nothing.
__device__ inline RowState quiet_row() { return {.z = INFINITY}; }

struct RowSums {
  unsigned long long den, mass, dropped, values_read;
  int peak;  // ordered(x)
};

/// An integer that orders like the float, NaN above all.
__device__ inline int ordered(float x) {
  const int bits = __float_as_int(x);
  return x != x ? 0x7FFFFFFF : bits ^ (bits >> 31 & 0x7FFFFFFF);
}
__device__ inline float from_ordered(int x) { return __int_as_float(x ^ (x >> 31 & 0x7FFFFFFF)); }

struct GroupState {
  GroupHead* head;
  RowState* rows;             // (G,)
  RowSums* sums;              // (G,)
  unsigned long long* t;      // (G, 16): T of section 7
  unsigned long long* num;    // (G, D), without the correction
  int8_t *a_split, *b_split;  // (G, D) query planes, even channels before odd ones
  int8_t *a, *b;              // (G, D)
};

/// The groups that run again, in the order in which they asked.
struct WorkQueue {
  unsigned items;    // of such groups, handed out
  unsigned entries;  // reserved for such groups
  unsigned open;     // such groups that are not finished
};

struct Workspace {
  uint8_t* base;
  int64_t groups, group_bytes;
  int rows, head_dim;

  __host__ __device__ static constexpr int64_t bytes_of_group(int rows, int head_dim) {
    const int64_t bytes = sizeof(GroupHead) + rows * (int64_t{sizeof(RowState)} + int64_t{sizeof(RowSums)} +
                                                      8 * numerics::kRank + head_dim * (8 + 4));
    return (bytes + 127) / 128 * 128;
  }
  __host__ __device__ static constexpr int64_t bytes_of_queue(int64_t groups) {
    return (int64_t{sizeof(WorkQueue)} + groups * kReruns * 4 + 255) / 256 * 256;
  }
  __host__ __device__ int64_t bytes() const { return bytes_of_queue(groups) + groups * group_bytes; }

  static constexpr int kReruns = numerics::kMaxRuns - 1;  ///< times a group may run again

  __device__ WorkQueue* queue() const { return reinterpret_cast<WorkQueue*>(base); }
  /// (groups kReruns,): a group, or -1.
  __device__ int* queue_entries() const { return reinterpret_cast<int*>(base + sizeof(WorkQueue)); }
  __device__ GroupState group(int64_t index) const {
    uint8_t* at = base + bytes_of_queue(groups) + index * group_bytes;
    GroupState g;
    g.head = reinterpret_cast<GroupHead*>(at);
    g.num = reinterpret_cast<unsigned long long*>(at + sizeof(GroupHead));
    const int64_t plane = static_cast<int64_t>(rows) * head_dim;
    g.a_split = reinterpret_cast<int8_t*>(g.num + plane);
    g.b_split = g.a_split + plane;
    g.a = g.b_split + plane;
    g.b = g.a + plane;
    g.t = reinterpret_cast<unsigned long long*>(g.b + plane);
    g.sums = reinterpret_cast<RowSums*>(g.t + rows * numerics::kRank);
    g.rows = reinterpret_cast<RowState*>(g.sums + rows);
    return g;
  }
};
static_assert(sizeof(GroupHead) % 16 == 0 && sizeof(RowSums) % 8 == 0);

/// Everything a kernel is told.
struct Step {
  plan::DecodeParams params;
  numerics::Gates gates;  // instead of the depth's, if params.gates is set
  Workspace workspace;
  int splits;         // ranges of tiles that a group is cut into; 0: as their lengths say (share_out.cuh)
  int places;         // then, how many items a KV head and a part of its rows should have in all
  int parts;          // and of rows
  int least;          // tiles that a range has at least, unless it is a group's only one
  bool again;         // the groups in the queue, cut finer
  int64_t max_pages;  // columns of the block table
  int tiles_of_page;
  unsigned per_page;  // 2^31 over that, rounded up: exact for every tile there can be
  bool appends;       // the kernel right before writes the step's tokens to the cache
  cache::Bringing bringing;
};

/// The block table's column of a tile.
__device__ inline int column_of_tile(const Step& step, int tile) {
  return static_cast<int>(uint64_t{static_cast<unsigned>(tile)} * step.per_page >> 31);
}

/// What a group's index stands for. token: of the request.
struct GroupPlace {
  int batch, token, kv_head;
};
__device__ inline GroupPlace place_of_group(const Step& step, int group) {
  const int kv_heads = static_cast<int>(step.params.cache.layout.n_kv_heads),
            tokens = static_cast<int>(step.params.tokens);
  return {group / kv_heads / tokens, group / kv_heads % tokens, group % kv_heads};
}

/// False: the token sees no key, or keys past the table.
__device__ inline bool find_visible(const Step& step, const RequestLength& request, int batch, int token, Visible& v) {
  const plan::CacheView& cache = step.params.cache;
  return find_visible(step.params, request, batch, token, v) && cache.num_pages > 0 &&
         column_of_tile(step, v.last_physical() / kTile) < step.max_pages;
}

}  // namespace fold::cuda
