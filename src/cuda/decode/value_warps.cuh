#pragma once
#include "cuda/decode/key_lanes.cuh"
#include "cuda/decode/stream_shared.cuh"
#include "cuda/ptx/warp_mma.cuh"

// What value warps do (sum_stream.cuh): they fetch queued rows of V, 32 at a time, and add them, weighted. A warp has
// half of the channels, for itself. Keys are rows in shared memory, and a transposed load makes them the products'
// inner dimension; byte j of a row's weight is a column of the product whose sum counts 2^(8 j).
namespace fold::cuda {

enum class Plane { kNibbles, kBytes };  ///< V's h and l beside each other, or b

/// Rows that may be added before a 32-bit sum of products of bytes could overflow.
constexpr int kFlushBlocks = (1 << 15) / kQueueBlock;

/// A member's share of one queue.
template <int D, int Quads, Plane kPlane>
class PlaneSums {
 public:
  using Shared = StreamShared<D, Quads>;
  static constexpr bool kNibbles = kPlane == Plane::kNibbles;

  __device__ PlaneSums(const plan::DecodeParams& p, const RangeTask& task, Shared& shared, int member)
      : p_(p),
        task_(task),
        s_(shared),
        member_(member),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        c_(lane_ % 4),
        sends_(place_of_row<D>(lane_, 0) ^ 16 * member * kPieces),
        loads_(place_of_row<D>(named_row(lane_), 0) ^ 16 * member * kPieces) {
    clear();
  }

  /// Whether another block has come; sends for its rows. The same in all lanes.
  __device__ bool send() {
    // A full block's place is free: those who filled it waited until every member had released it.
    if (over_ || !__all_sync(kWarp, ptx::phase_is_over(ptx::shared_address(&queue().full[sending_]), parity_))) {
      return false;
    }
    over_ = queue().is_end(sent_);
    if (over_) return false;
    send_rows(sending_);
    ++sent_;
    parity_ ^= sending_ == kBlocks - 1;
    sending_ = next(sending_);
    return true;
  }
  __device__ bool over() const { return over_; }

  /// Adds the oldest block sent for. It has arrived.
  __device__ void add() {
    multiply(adding_);
    adding_ = next(adding_);
    if (++added_ % kFlushBlocks != 0) return;
    const uint64_t active = task_.active >> c_;
    unsigned long long* const num = task_.g.num;
    for_sums([&](int t, int at, long long sum) {
      if ((active >> 4 * t & 1) != 0) ptx::add_global(num + at, static_cast<unsigned long long>(sum) << 8);
    });
    clear();
  }

  /// Hands the sums over, once every queue is closed.
  __device__ void finish() {
    unsigned long long* const num = s_.num[kNibbles ? 0 : 1][0];
    for_sums([&](int, int at, long long sum) { num[at] = static_cast<unsigned long long>(sum); });
  }

 private:
  static constexpr int kHalf = D / 2, kTilesM = D / 16 / kMembers;  // 16-channel tiles of a warp
  static constexpr int kBlocks = kNibbles ? Shared::kNibbleBlocks : Shared::kByteBlocks;
  static constexpr int kPieces =
      (kNibbles ? D / 32 : D / 16) / kMembers;  // 16-byte ones of a plane's row, the member's
  static constexpr int kPlaneL = D / 2;         // where a row's l follows h
  static constexpr int kBlockBytes = kQueueBlock * D;
  static_assert(kMembers == 2 && kQueueBlock == 32);

  __device__ auto& queue() const {
    if constexpr (kNibbles) {
      return s_.nibbles;
    } else {
      return s_.bytes_of_v;
    }
  }
  __device__ uint8_t* rows() const { return kNibbles ? s_.nibble_rows[0] : s_.byte_rows[0]; }
  __device__ static int next(int buffer) { return buffer == kBlocks - 1 ? 0 : buffer + 1; }

  /// Sends for the member's channels of a block's rows, a row a lane.
  __device__ void send_rows(int buffer) {
    const auto entry = queue().entry[buffer][lane_];
    if (entry.page >= 0) {
      const uint32_t to = ptx::shared_address(rows() + buffer * kBlockBytes);
      const uint8_t* const from = p_.cache.pages + entry.page * p_.cache.page_stride +
                                  ((entry.at & kSlotMask) * (kNibbles ? kHalf : D) + 16 * member_ * kPieces +
                                   (kNibbles ? s_.offsets.v_h : s_.offsets.v_b));
#pragma unroll
      for (int i = 0; i < kPieces; ++i) ptx::copy_16(to + (sends_ ^ 16 * i), from + 16 * i);
      if constexpr (kNibbles) {
        const bool low = (entry.at & kReadsLow) != 0;
        const uint8_t* const from_l = from + (s_.offsets.v_l - s_.offsets.v_h);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const int at = sends_ ^ (kPlaneL | 16 * i);
          if (low) {
            ptx::copy_16(to + at, from_l + 16 * i);
          } else {
            *reinterpret_cast<uint4*>(rows() + buffer * kBlockBytes + at) = {kNoLow, kNoLow, kNoLow, kNoLow};
          }
        }
      }
    }
    ptx::commit_copies();
  }

  /// Adds a block that has arrived.
  __device__ void multiply(int buffer) {
    // By half of the rows, from 4 c on, byte columns: (query row g / 2, byte 2 n + g % 2).
    uint32_t weight[Quads][2][2];
    const unsigned pick = g_ % 2 == 0 ? 0x6240 : 0x7351;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        const int first = 16 * half + 4 * c_;
        const uint4 w = *reinterpret_cast<const uint4*>(&queue().weight[buffer][4 * t + g_ / 2][first]);
        const uint32_t low = __byte_perm(w.x, w.y, pick), high = __byte_perm(w.z, w.w, pick);
        weight[t][half][0] = __byte_perm(low, high, 0x5410);
        weight[t][half][1] = __byte_perm(low, high, 0x7632);
      }
    }
    const uint32_t from = ptx::shared_address(rows() + buffer * kBlockBytes);
    const auto add = [&](int(&sum)[Quads][2][4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
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
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if constexpr (kNibbles) {
        uint32_t h[2][2], l[2][2];  // by byte of the pair, half of the rows
        load_pairs(from + (loads_ ^ 16 * piece), h[0], h[1]);
        load_pairs(from + (loads_ ^ (kPlaneL | 16 * piece)), l[0], l[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          add(sum_[2 * piece + i], ptx::join_nibbles(h[i][0], l[i][0] >> 4), ptx::join_nibbles(h[i][0] << 4, l[i][0]),
              ptx::join_nibbles(h[i][1], l[i][1] >> 4), ptx::join_nibbles(h[i][1] << 4, l[i][1]));
        }
      } else {
        uint32_t even[2], odd[2];
        load_pairs(from + (loads_ ^ 16 * piece), even, odd);
        add(sum_[piece], even[0], odd[0], even[1], odd[1]);
      }
    }
    if constexpr (kNibbles) {
      if (member_ == 0) {  // two channels more: 1, and 1 of rows without plane l
        const unsigned half = __ballot_sync(kWarp, (queue().entry[buffer][lane_].at & kReadsLow) == 0) >> 4 * c_;
        const auto spread = [](unsigned bits) { return (bits & 0xF) * 0x00204081u & 0x01010101u; };
        int mass[Quads][2][4] = {};
        add(mass, 0x01010101u, spread(half), 0x01010101u, spread(half >> 16));
#pragma unroll
        for (int t = 0; t < Quads && g_ == 0; ++t) {
          s_.mass[4 * t + c_] += static_cast<unsigned long long>(joined(mass[t], 0));
          s_.half_mass[4 * t + c_] += static_cast<unsigned long long>(joined(mass[t], 1));
        }
      }
    }
    __syncwarp();
    if (lane_ == 0) queue().release_buffer(buffer);
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kTilesM * Quads * 8; ++i) sum_[i / (8 * Quads)][i / 8 % Quads][i / 4 % 2][i % 4] = 0;
  }

  /// f(t, at, sum) of all that the lane holds. at: of (4 t + c, channel) in (rows, D), from one address by constants.
  template <class F>
  __device__ void for_sums(F f) const {
    const int first = c_ * D + 16 * kTilesM * member_ + (kNibbles ? 4 : 2) * g_;
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const long long sum = joined(sum_[m][t], half);
          f(t, first + (4 * t * D + (kNibbles ? 32 * (m / 2) + 2 * (m % 2) : 16 * m) + half),
            kNibbles ? 256 * sum : sum);
        }
      }
    }
  }

  const plan::DecodeParams& p_;
  const RangeTask& task_;
  Shared& s_;
  const int member_, lane_, g_, c_;  // lane 4 g + c
  const int sends_, loads_;          // where in a block: the row's first piece, as sent and as multiplied
  int sum_[kTilesM][Quads][2][4];    // products by weight byte 2 n + column % 2
  int sent_ = 0, added_ = 0;         // blocks
  int sending_ = 0, adding_ = 0;     // their buffers
  uint32_t parity_ = 0;
  bool over_ = false;
};

/// Waits for the oldest of `in_flight` groups of copies.
template <int Most>
__device__ void wait_oldest(int in_flight) {
  if constexpr (Most == 1) {
    ptx::wait_copies();
  } else if (in_flight == Most) {
    ptx::wait_copies_but<Most - 1>();
  } else {
    wait_oldest<Most - 1>(in_flight);
  }
}

constexpr int kAhead = 3;  ///< blocks on their way before one is waited for while others keep coming

/// Serves queues until they are closed: one, or both, whose blocks are then added in the order in which they came.
template <int Most, class... Sums>
__device__ void serve(Sums&... sums) {
  unsigned order = 0;  // bit i: which queue the i-th oldest block in flight is of
  int in_flight = 0;
  while (true) {
    unsigned which = 0;
    bool sent = false;
    const auto try_send = [&](auto& of_queue) {
      if (of_queue.send()) {
        order |= which << in_flight;
        ++in_flight;
        sent = true;
      }
      ++which;
    };
    (try_send(sums), ...);
    if (in_flight == 0) {
      if ((sums.over() && ...)) return;
      __nanosleep(100);
      continue;
    }
    if (sent && in_flight < kAhead) continue;
    wait_oldest<Most>(in_flight);
    __syncwarp();  // every lane's copies have arrived
    which = 0;
    ((which++ == (order & 1) ? sums.add() : void()), ...);
    order >>= 1;
    --in_flight;
  }
}

/// A value warp's work. warp: 0 .. kValueWarps - 1.
template <int D, int Quads>
__device__ void run_value_warp(const Step& step, const RangeTask& task, StreamShared<D, Quads>& shared, int warp) {
  using Shared = StreamShared<D, Quads>;
  PlaneSums<D, Quads, Plane::kNibbles> nibbles(step.params, task, shared, warp % kMembers);
  PlaneSums<D, Quads, Plane::kBytes> bytes(step.params, task, shared, warp % kMembers);
  if constexpr (Shared::kKinds == 1) {
    serve<Shared::kNibbleBlocks + Shared::kByteBlocks>(nibbles, bytes);
    nibbles.finish();
    bytes.finish();
  } else if (warp / kMembers == 0) {
    serve<Shared::kNibbleBlocks>(nibbles);
    nibbles.finish();
  } else {
    serve<Shared::kByteBlocks>(bytes);
    bytes.finish();
  }
}

}  // namespace fold::cuda
