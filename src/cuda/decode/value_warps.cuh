#pragma once
#include "cuda/decode/scan_warp.cuh"

// What value warps do (sum_stream.cuh): they fetch queued rows of V, 32 at a time, and add them, weighted. Teams take
// blocks in turn; the warps of a team share its channels. Keys are rows in shared memory, and a transposed load makes
// them the products' inner dimension; byte j of a row's weight is a column of the product whose sum counts 2^(8 j).
namespace fold::cuda {

enum class Plane { kNibbles, kBytes };  ///< V's h and l beside each other, or b

/// Rows that may be added before a 32-bit sum of products of bytes could overflow.
constexpr int kFlushBlocks = (1 << 15) / kQueueBlock;

template <int D, int Quads, Plane kPlane>
class ValueWarps {
 public:
  using Shared = StreamShared<D, Quads>;
  static constexpr bool kNibbles = kPlane == Plane::kNibbles;
  static constexpr int kMembers = Shared::kMembers, kTeams = Shared::kTeams;
  static constexpr int kBlocks = kNibbles ? Shared::kNibbleBlocks : Shared::kByteBlocks, kDepth = kBlocks / kTeams;
  using Queue = RowQueue<Shared::kRows, kBlocks>;

  /// warp: 0 .. kValueWarps - 1.
  __device__ ValueWarps(const Step& step, const RangeTask& task, Shared& shared, int warp)
      : p_(step.params),
        task_(task),
        s_(shared),
        team_(warp / kMembers),
        member_(warp % kMembers),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        c_(lane_ % 4) {}

  __device__ void run() {
    clear();
    int sent = 0, added = 0;  // blocks of the team
    bool over = false;
    while (!over || added < sent) {
      const int next = team_ + sent * kTeams;
      // A full block's place is free: those who filled it waited until every member had released it.
      if (!over && sent - added < kDepth && (added == sent || __all_sync(kWarp, queue().is_full(next)))) {
        queue().wait_full(next);
        over = queue().is_end(next);
        if (over) continue;
        send(next % kBlocks);
        ++sent;
        continue;
      }
      wait_oldest(sent - added);
      sync_team();  // every member's share has arrived
      add((team_ + added * kTeams) % kBlocks);
      ++added;
      if (added % kFlushBlocks == 0) {
        for_sums([&](int r, int channel, unsigned long long sum) { publish(r, channel, sum); });
        count_masses();
        clear();
      }
    }
    count_masses();
    for_sums([&](int r, int channel, unsigned long long sum) {
      s_.num[kNibbles ? team_ : kTeams + team_][r][channel] = sum;
    });
    ptx::fence_async();  // the next item's first tiles arrive in the same place
    ptx::sync_named(kAll, 64 * kValueWarps);
    publish_all();
  }

 private:
  static constexpr int kHalf = D / 2, kTilesM = D / 16 / kMembers;  // 16-channel tiles of a warp
  static constexpr int kAll = 1, kFirstTeam = 2;                    // named barriers
  static_assert(kDepth == 1 || kDepth == 2 || kDepth == 4);

  __device__ Queue& queue() const {
    if constexpr (kNibbles) {
      return s_.nibbles;
    } else {
      return s_.bytes_of_v;
    }
  }
  __device__ uint8_t* rows(int buffer) const { return kNibbles ? s_.nibble_rows[buffer] : s_.byte_rows[buffer]; }

  __device__ static void wait_oldest(int in_flight) {
    if (kDepth == 4 && in_flight == 4) return ptx::wait_copies_but<3>();
    if (kDepth == 4 && in_flight == 3) return ptx::wait_copies_but<2>();
    if (kDepth >= 2 && in_flight == 2) return ptx::wait_copies_but<1>();
    ptx::wait_copies();
  }
  __device__ void sync_team() const {
    if constexpr (kMembers == 1) {
      __syncwarp();
    } else {
      ptx::sync_named(kFirstTeam + (kNibbles ? 0 : kTeams) + team_, 32 * kMembers);
    }
  }

  /// Sends for a block's rows.
  __device__ void send(int buffer) {
    constexpr int kPieces = kNibbles ? D / 32 : D / 16;  // 16-byte ones of a plane's row
    const uint32_t to = ptx::shared_address(rows(buffer));
    const int64_t planes[2] = {kNibbles ? s_.offsets.v_h : s_.offsets.v_b, s_.offsets.v_l};
#pragma unroll 4
    for (int i = 32 * member_ + lane_; i < kQueueBlock * kPieces; i += 32 * kMembers) {
      const int row = i / kPieces, piece = i % kPieces;
      const typename Queue::Entry entry = queue().entry[buffer][row];
      if (entry.page < 0) continue;
      const uint8_t* const from = p_.cache.pages + entry.page * p_.cache.page_stride +
                                  (entry.at & kSlotMask) * (kNibbles ? kHalf : D) + 16 * piece;
      ptx::copy_16(to + place_of_row<D>(row, piece), from + planes[0]);
      if constexpr (kNibbles) {
        if ((entry.at & kReadsLow) != 0) {
          ptx::copy_16(to + place_of_row<D>(row, kPieces + piece), from + planes[1]);
        } else {  // 16 h + 7.5 is half above the value whose low nibble is 7
          *reinterpret_cast<uint4*>(rows(buffer) + place_of_row<D>(row, kPieces + piece)) = {0x77777777u, 0x77777777u,
                                                                                             0x77777777u, 0x77777777u};
        }
      }
    }
    ptx::commit_copies();
  }

  /// Adds a block that has arrived.
  __device__ void add(int buffer) {
    uint32_t weight[Quads][2]
                   [2];  // by half of the rows, from 4 c on, byte columns: (query row g / 2, byte 2 n + g % 2)
    const unsigned pick = g_ % 2 == 0 ? 0x6240 : 0x7351;
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 w = *reinterpret_cast<const uint4*>(&queue().weight[buffer][4 * t + g_ / 2][16 * half + 4 * c_]);
        const uint32_t low = __byte_perm(w.x, w.y, pick), high = __byte_perm(w.z, w.w, pick);
        weight[t][half][0] = __byte_perm(low, high, 0x5410);
        weight[t][half][1] = __byte_perm(low, high, 0x7632);
      }
    }
    if (kNibbles && member_ == 0) count(buffer);
    const uint32_t from = ptx::shared_address(rows(buffer));
    const auto multiply = [&](int(&sum)[Quads][2][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if constexpr (kNibbles) {
            ptx::mma_u8u8(sum[t][n], a0, a1, a2, a3, weight[t][0][n], weight[t][1][n]);
          } else {
            ptx::mma_s8u8(sum[t][n], a0, a1, a2, a3, weight[t][0][n], weight[t][1][n]);
          }
        }
      }
    };
    if constexpr (kNibbles) {
      constexpr int kTogether = kTilesM >= 2 ? 2 : 1;  // tiles of a piece: bytes 0 and 1 of each pair
#pragma unroll
      for (int m = 0; m < kTilesM; m += kTogether) {
        const int tile = member_ * kTilesM + m;
        uint32_t h[2][2], l[2][2];  // by byte of the pair, half of the rows
        load_pairs(from + place_of_row<D>(named_row(lane_), tile / 2), h[0], h[1]);
        load_pairs(from + place_of_row<D>(named_row(lane_), tile / 2 + kHalf / 16), l[0], l[1]);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const bool second = kTogether == 2 ? i == 1 : tile % 2 == 1;
          const uint32_t h0 = second ? h[1][0] : h[0][0], h1 = second ? h[1][1] : h[0][1];
          const uint32_t l0 = second ? l[1][0] : l[0][0], l1 = second ? l[1][1] : l[0][1];
          multiply(sum_[m + i], ptx::join_nibbles(h0, l0 >> 4), ptx::join_nibbles(h0 << 4, l0),
                   ptx::join_nibbles(h1, l1 >> 4), ptx::join_nibbles(h1 << 4, l1));
        }
      }
    } else {
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        uint32_t even[2], odd[2];
        load_pairs(from + place_of_row<D>(named_row(lane_), member_ * kTilesM + m), even, odd);
        multiply(sum_[m], even[0], odd[0], even[1], odd[1]);
      }
    }
    __syncwarp();
    if (lane_ == 0) queue().release_buffer(buffer);
  }

  /// Adds up the block's weights, of query rows g / 2.
  __device__ void count(int buffer) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 4 * c_ + i % 4 + i / 4 * 16;
      const bool low = (queue().entry[buffer][row].at & kReadsLow) != 0;
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        const unsigned w = queue().weight[buffer][4 * t + g_ / 2][row];
        mass_[t] += w;
        half_mass_[t] += low ? 0 : w;
      }
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int t = 0; t < Quads; ++t) mass_[t] = half_mass_[t] = 0;
#pragma unroll
    for (int i = 0; i < kTilesM * Quads * 8; ++i) sum_[i / (8 * Quads)][i / 8 % Quads][i / 4 % 2][i % 4] = 0;
  }

  /// f(query row, channel, sum) of all that the lane holds.
  template <class F>
  __device__ void for_sums(F f) const {
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int(&sum)[2][4] = sum_[m][t];
          const long long low = sum[0][2 * half] + 256ll * sum[0][2 * half + 1];
          const long long joined = low + 65536 * (sum[1][2 * half] + 256ll * sum[1][2 * half + 1]);
          const int tile = member_ * kTilesM + m;
          const int channel = kNibbles ? 32 * (tile / 2) + 4 * g_ + 2 * (tile % 2) + half : 16 * tile + 2 * g_ + half;
          f(4 * t + c_, channel, static_cast<unsigned long long>(kNibbles ? 256 * joined : joined));
        }
      }
    }
  }

  /// Adds to the group's numerators.
  __device__ void publish(int r, int channel, unsigned long long sum) const {
    if ((task_.active >> r & 1) != 0 && sum != 0) atomicAdd(&task_.g.num[r * D + channel], sum << 8);
  }

  /// Adds all teams' sums to the group's numerators. What the nibbles' products left out is made up for: their bytes
  /// are 128 above the values, and those of plane h alone half below. A thread's share of the channels.
  __device__ void publish_all() const {
    const int thread = 32 * (kMembers * team_ + member_) + lane_ + (kNibbles ? 0 : 32 * kValueWarps);
#pragma unroll 1
    for (int i = thread; i < task_.rows * D; i += 64 * kValueWarps) {
      const int r = i / D;
      unsigned long long sum = (s_.half_mass[r] << 7) - (s_.mass[r] << 15);
#pragma unroll
      for (int team = 0; team < 2 * kTeams; ++team) sum += s_.num[team][r][i % D];
      publish(r, i % D, sum);
    }
  }

  /// Adds to the CTA's masses.
  __device__ void count_masses() {
    if constexpr (kNibbles) {
      if (member_ != 0) return;
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        for (int s = 1; s < 4; s *= 2) {
          mass_[t] += __shfl_xor_sync(kWarp, mass_[t], s);
          half_mass_[t] += __shfl_xor_sync(kWarp, half_mass_[t], s);
        }
        if (c_ != 0 || g_ % 2 != 0) continue;
        atomicAdd(&s_.mass[4 * t + g_ / 2], mass_[t]);
        atomicAdd(&s_.half_mass[4 * t + g_ / 2], half_mass_[t]);
      }
    }
  }

  const plan::DecodeParams& p_;
  const RangeTask& task_;
  Shared& s_;
  const int team_, member_, lane_, g_, c_;             // lane 4 g + c
  int sum_[kTilesM][Quads][2][4];                      // products by weight byte 2 n + column % 2
  unsigned long long mass_[Quads], half_mass_[Quads];  // of nibbles, in member 0
};

}  // namespace fold::cuda
