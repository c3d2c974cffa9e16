#pragma once
#include "cuda/decode/visible.cuh"
#include "numerics/gates.h"
#include "numerics/reference.h"
#include "plan/decode_params.h"

// What the kernels of a decode step hand to each other. A group is one token's rows on one KV head, the unit that
// decides together what is read (docs/numerics.md, sections 5-8); group index: (batch * T + token) * HK + KV head.
namespace fold::cuda {

constexpr int kRunShift = 29;  ///< a group has fewer tiles than 2^26, and fewer ranges of them
constexpr unsigned kTakenMask = (1u << kRunShift) - 1;
constexpr int kMaxRows = 64;  ///< query heads a KV head may serve

struct alignas(16) GroupHead {
  Visible visible;
  TileRange tiles;      // to be summed
  unsigned taken;       // what of the run's work has been handed out (see take()) + run << kRunShift
  int run;              // 0, and one more each time rows run again
  unsigned done;        // what of it has been added to the group's sums
  unsigned workers;     // CTAs that took part in the run
  int fit_mark;         // 0: no correction
  int typical;          // exponent of the settled blocks' bounds (section 6)
  int seen;             // 0: the token sees no key
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

struct WorkQueue {
  unsigned visits;    // first ones of CTAs to groups, handed out
  unsigned reopened;  // how often a group was to run again
  unsigned finished;  // groups
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
  static constexpr int64_t kQueueBytes = 256;
  static_assert(sizeof(WorkQueue) <= kQueueBytes);
  __host__ __device__ int64_t bytes() const { return kQueueBytes + groups * group_bytes; }

  static constexpr int kReruns = numerics::kMaxRuns - 1;  ///< times a group may run again
  static_assert(kReruns < 1 << (32 - kRunShift));

  __device__ WorkQueue* queue() const { return reinterpret_cast<WorkQueue*>(base); }
  __device__ GroupState group(int64_t index) const {
    uint8_t* at = base + kQueueBytes + index * group_bytes;
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
  int splits;         // CTAs that are sent to a group
  int rerun_splits;   // ranges of tiles when it runs again, if ranges are handed out
  int parts;          // ranges of rows
  int64_t max_pages;  // columns of the block table
};

}  // namespace fold::cuda
