#pragma once
#include "cuda/decode/key_lanes.cuh"
#include "cuda/decode/stream_shared.cuh"
#include "cuda/ptx/warp_mma.cuh"

// What a scan warp does with the keys of which level 0 did not say enough (sum_stream.cuh): it lists them, and sixteen
// at a time fetches their deeper planes, weighs them and passes on to the value warps what is read of V. A batch's rows
// arrive in registers while the one before is weighed and further tiles are scanned.
namespace fold::cuda {

template <int D, int Quads>
class Candidates {
 public:
  using Shared = StreamShared<D, Quads>;

  /// barrier: of k_b.
  __device__ Candidates(const plan::DecodeParams& p, Shared& shared, typename Shared::Scan& of_warp, uint32_t barrier)
      : p_(p), s_(shared), w_(of_warp), barrier_(barrier), lane_(threadIdx.x % 32), g_(lane_ / 4), c_(lane_ % 4) {
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      w_.den[t][lane_] = dropped_[t] = 0;
      w_.peak[t][lane_] = -INFINITY;
    }
  }

  /// Lists the tile's keys `further` (bit i: key g + 8 i). Lane 4 g + c writes those of bits 2 c and 2 c + 1.
  __device__ void list(const typename Shared::Stage& stage, unsigned further, unsigned reads_low, unsigned forced,
                       unsigned likely_byte, float deeper) {
    const int i = 2 * c_;
    const unsigned mine = further >> i & 3;
    const unsigned of[2] = {__ballot_sync(kWarp, (mine & 1) != 0), __ballot_sync(kWarp, (mine & 2) != 0)};
    const unsigned first[2] = {listed_, listed_ + __popc(of[0])};
    listed_ = first[1] + __popc(of[1]);
    if (mine == 0) return;
    const auto pair = [&](const uint16_t(&scales)[kTile]) {
      return *reinterpret_cast<const uint32_t*>(scales + 8 * g_ + i);
    };
    const uint32_t k_scales = pair(stage.k_scale), v_scales = pair(stage.v_scale);
    const unsigned at = static_cast<unsigned>(stage.place.slot + g_ + 8 * i) | static_cast<unsigned>(deeper)
                                                                                   << kDeeperShift;
    const auto flag = [](unsigned keys, int bit, unsigned flag) { return (keys >> bit & 1) * flag; };
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if ((mine >> j & 1) == 0) continue;
      w_.listed[(first[j] + __popc(of[j] & lanes_before())) % kListed] = {
          stage.place.page,
          (at + 8 * j) | flag(reads_low, i + j, kReadsLow) | flag(forced, i + j, kForced) |
              flag(likely_byte, i + j, kLikelyByte),
          __byte_perm(k_scales, v_scales, j == 0 ? 0x5410 : 0x7632)};
    }
  }

  /// Adds a lane's weights of row 4 t + c whose values are dropped.
  __device__ void drop(int t, unsigned long long weights) { dropped_[t] += weights; }

  /// Passes on what is listed, in full batches; `rest`: all of it.
  __device__ void read(bool rest) {
    __syncwarp();  // the list is written
    while (true) {
      const unsigned listed = listed_ - fetched_;
      if (rest ? listed_ == added_ : listed < kBatch) return;
      advance(min(listed, unsigned{kBatch}));
    }
  }

  /// Adds what the lanes hold to the CTA's sums. seen: keys a lane has scanned; bytes: what else the warp has read.
  __device__ void flush(int seen, int bytes) {
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const int r = 4 * t + c_;
      const auto add = [&](unsigned long long& to, unsigned long long of_lane) {
        const unsigned long long sum = sum_over_keys(of_lane);
        if (g_ == 0) atomicAdd(&to, sum);
      };
      add(s_.den[r], w_.den[t][lane_] + dropped_[t]);
      add(s_.dropped[r], dropped_[t]);
      const int peak = max_over_keys(ordered(w_.peak[t][lane_]));
      if (g_ == 0) atomicMax(&s_.peak[r], peak);
    }
    const unsigned keys = sum_over_keys(static_cast<unsigned>(seen)),
                   values = sum_over_keys(static_cast<unsigned>(values_));
    const unsigned long long halves = sum_over_keys(static_cast<unsigned long long>(halves_));
    if (lane_ != 0) return;
    atomicAdd(&s_.values, static_cast<unsigned long long>(values));
    atomicAdd(&s_.bytes, halves * kHalf + 2ull * values + static_cast<unsigned long long>(keys) * (kHalf + 2) + bytes);
  }

 private:
  static constexpr int kHalf = D / 2, kWords = D / 32;

  /// The lane's words of a batch's keys g and g + 8: channels c D/4 .. (c + 1) D/4 of planes h and l.
  struct Rows {
    uint32_t h[2][kWords], l[2][kWords];
  };

  __device__ unsigned lanes_before() const { return (1u << lane_) - 1; }

  __device__ const uint8_t* page_at(int page) const { return p_.cache.pages + page * p_.cache.page_stride; }

  /// Key g + 8 j of the batch that begins at `first`; past its `count` keys none, page -1.
  __device__ Candidate candidate(unsigned first, unsigned count, int j) const {
    const unsigned row = static_cast<unsigned>(g_ + 8 * j);
    return row < count ? w_.listed[(first + row) % kListed] : Candidate{-1, kReadsLow, 0};
  }

  /// Sends for the next `count` candidates and adds those sent for before: in this order if the registers hold both.
  __device__ void advance(unsigned count) {
    const unsigned first = added_, waiting = fetched_ - added_;
    if constexpr (Quads == 1) {
      const Rows arrived = rows_;
      fetch(fetched_, count);
      if (waiting > 0) add_batch(first, waiting, arrived);
    } else {
      if (waiting > 0) add_batch(first, waiting, rows_);
      fetch(fetched_, count);
    }
    added_ = fetched_;
    fetch_bytes(fetched_, count);
    fetched_ += count;
  }

  /// Sends for planes h and l of `count` candidates.
  __device__ void fetch(unsigned first, unsigned count) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Candidate key = candidate(first, count, j);
      if (key.page < 0) continue;
      const uint8_t* const from = page_at(key.page) + ((key.at & kSlotMask) * kHalf + c_ * (D / 8));
      load_words(rows_.h[j], from + s_.offsets.k_h);
      if ((key.at & kReadsLow) != 0) {
        load_words(rows_.l[j], from + s_.offsets.k_l);
      } else {
#pragma unroll
        for (uint32_t& word : rows_.l[j]) word = kNoLow;
      }
    }
  }

  /// Sends for plane b where it will most likely be read.
  __device__ void fetch_bytes(unsigned first, unsigned count) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Candidate key = candidate(first, count, j);
      if (key.page >= 0 && (key.at & kLikelyByte) != 0) fetch_bytes(key, j);
    }
    if (count > 0) ptx::arrive_when_copied(barrier_);
  }
  __device__ void fetch_bytes(const Candidate& key, int j) {
    const uint8_t* const from = page_at(key.page) + ((key.at & kSlotMask) * D + c_ * (D / 4)) + s_.offsets.k_b;
#pragma unroll
    for (int i = 0; i < D / 64; ++i) ptx::copy_16(ptx::shared_address(&w_.k_b[j][i][lane_]), from + 16 * i);
  }

  /// Levels 1 and 2 of a batch that has arrived, its weights, and on to the value warps with what is read of V.
  __device__ void add_batch(unsigned first, unsigned count, const Rows& rows) {
    bool exists[2];
    Candidate key[2];
    float e_k[2], x[2][Quads];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      key[j] = candidate(first, count, j);
      exists[j] = key[j].page >= 0;
      e_k[j] = __uint_as_float(key[j].scales << 16);
    }
    int d1[2][Quads];
    unsigned asks = 0;
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      if (Quads > 2) __syncwarp();  // nothing moves across: all at once would take too many registers
      const auto& row = s_.row[4 * t + c_];
      int dot[4] = {0, 0, 0, 0};
#pragma unroll
      for (int w = 0; w < kWords; w += 2) {
        const uint4 q = s_.fragment[t][1 + w / 2][lane_];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          multiply_nibbles(dot, {rows.h[0][w + i], rows.h[1][w + i]}, {rows.l[0][w + i], rows.l[1][w + i]},
                           {i == 0 ? q.x : q.z, i == 0 ? q.y : q.w});
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool low = (key[j].at & kReadsLow) != 0;
        d1[j][t] = level_1(dot, j, row.sum_128);
        const int d0 = level_0(dot, j, row.sum_255);
        x[j][t] = numerics::fma(numerics::mul(static_cast<float>(low ? d1[j][t] : d0), low ? row.unit_1 : row.unit_0),
                                e_k[j], row.neg_z);
        asks |= static_cast<unsigned>(exists[j] && low && numerics::fma(row.margin_16, e_k[j], x[j][t]) >= -row.k_b)
                << j;
      }
    }
    asks = p_.cache.layout.k_bits == 16 ? any_row(asks) : 0;
    ptx::wait_barrier(barrier_, parity_);  // even if nobody looks at them: the next batch's go to the same place
    parity_ ^= 1;
    if (__any_sync(kWarp, asks != 0)) level_2(key, asks, d1, e_k, x);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      halves_ += (exists[j] && (key[j].at & kReadsLow) != 0 ? 1 : 0) + ((asks >> j & 1) != 0 ? 2 : 0);
    }
    weigh(key, exists, x);
  }

  __device__ void level_2(const Candidate (&key)[2], unsigned asks, const int (&d1)[2][Quads], const float (&e_k)[2],
                          float (&x)[2][Quads]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // rare: a logit that rose by more than its margin
      if ((asks >> j & 1) != 0 && (key[j].at & kLikelyByte) == 0) fetch_bytes(key[j], j);
    }
    ptx::wait_copies();
    uint32_t b[2][2 * kWords];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < kWords / 2; ++i) {
        const uint4 v = w_.k_b[j][i][lane_];
        b[j][4 * i] = v.x, b[j][4 * i + 1] = v.y, b[j][4 * i + 2] = v.z, b[j][4 * i + 3] = v.w;
      }
    }
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      int dot[4] = {0, 0, 0, 0};
#pragma unroll
      for (int w = 0; w < kWords; w += 2) {
        const uint4 q = s_.fragment[t][1 + Shared::kPairs + w / 2][lane_];
        ptx::mma_s8s8(dot, b[0][2 * w], b[1][2 * w], b[0][2 * w + 1], b[1][2 * w + 1], q.x, q.y);
        ptx::mma_s8s8(dot, b[0][2 * w + 2], b[1][2 * w + 2], b[0][2 * w + 3], b[1][2 * w + 3], q.z, q.w);
      }
      const auto& row = s_.row[4 * t + c_];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float f = logit_2(d1[j][t], 256 * dot[2 * j] + dot[2 * j + 1], row.e_q);
        if ((asks >> j & 1) != 0) x[j][t] = numerics::fma(f, e_k[j], row.neg_z);
      }
    }
  }

  /// What is read of a batch's V, and its weights.
  __device__ void weigh(const Candidate (&key)[2], const bool (&exists)[2], const float (&x)[2][Quads]) {
    unsigned asks = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float deeper = static_cast<float>(key[j].at >> kDeeperShift);
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        const auto& row = s_.row[4 * t + c_];
        asks |= static_cast<unsigned>(x[j][t] >= -numerics::add(row.v_h, deeper)) << j;
        asks |= static_cast<unsigned>(x[j][t] >= -numerics::add(row.v_l, deeper)) << (2 + j);
        asks |= static_cast<unsigned>(x[j][t] >= -numerics::add(row.v_b, deeper)) << (4 + j);
      }
    }
    asks = any_row(asks);
    const int v_bits = p_.cache.layout.v_bits;
    bool read[2], read_l[2], read_b[2];
    unsigned weight[2][Quads];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool forced = (key[j].at & kForced) != 0;
      read[j] = exists[j] && ((asks >> j & 1) != 0 || forced);
      read_l[j] = v_bits >= 8 && read[j] && ((asks >> (2 + j) & 1) != 0 || forced);
      read_b[j] = v_bits == 16 && read_l[j] && (asks >> (4 + j) & 1) != 0;
      values_ += read[j] ? 1 : 0;
      halves_ += (read[j] ? 1 : 0) + (read_l[j] ? 1 : 0) + (read_b[j] ? 2 : 0);
      const float e_v = __uint_as_float(key[j].scales & 0xFFFF0000u);
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        const float scaled = scaled_exp2<numerics::kFraction>(fminf(x[j][t], numerics::kExp2Max), numerics::kExp2Min);
        const unsigned d = exists[j] ? numerics::round_u32(scaled) : 0;
        weight[j][t] = numerics::round_u32(numerics::mul(scaled, numerics::mul(e_v, s_.row[4 * t + c_].per_e)));
        if (read[j]) {
          w_.den[t][lane_] += d;
          w_.peak[t][lane_] = fmaxf(w_.peak[t][lane_], x[j][t]);
        } else {
          dropped_[t] += d;
        }
      }
    }
    push(s_.nibbles, key, read, read_l, weight);
    push(s_.bytes_of_v, key, read_b, read_b, weight);
  }

  /// Appends the keys `wanted` to a queue. kReadsLow is set by `low`.
  template <class Queue>
  __device__ void push(Queue& queue, const Candidate (&key)[2], const bool (&wanted)[2], const bool (&low)[2],
                       const unsigned (&weight)[2][Quads]) {
    const unsigned of[2] = {__ballot_sync(kWarp, c_ == 0 && wanted[0]), __ballot_sync(kWarp, c_ == 0 && wanted[1])};
    const int before = __popc(of[0]), count = before + __popc(of[1]);
    if (count == 0) return;
    unsigned first = 0;
    if (lane_ == 0) first = atomicAdd(&queue.tail, static_cast<unsigned>(count));
    first = __shfl_sync(kWarp, first, 0);
    const int block = static_cast<int>(first / kQueueBlock), last = static_cast<int>((first + count - 1) / kQueueBlock);
    queue.wait_writable(block);
    if (last != block) queue.wait_writable(last);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!wanted[j]) continue;
      const unsigned at = first + (j == 0 ? 0 : before) + __popc(of[j] & ((1u << (4 * g_)) - 1)),
                     buffer = at / kQueueBlock % Queue::kBlocks, slot = at % kQueueBlock;
#pragma unroll
      for (int t = 0; t < Quads; ++t) queue.weight[buffer][4 * t + c_][slot] = weight[j][t];
      if (c_ == 0) queue.entry[buffer][slot] = {key[j].page, (key[j].at & kSlotMask) | (low[j] ? kReadsLow : 0)};
    }
    __syncwarp();
    if (lane_ == 0) queue.publish(first, count);
  }

  const plan::DecodeParams& p_;
  Shared& s_;
  typename Shared::Scan& w_;
  const uint32_t barrier_;
  const int lane_, g_, c_;  // lane 4 g + c

  uint32_t parity_ = 0;                            // of barrier_
  Rows rows_{};                                    // of the candidates from added_ on, on their way
  unsigned listed_ = 0, fetched_ = 0, added_ = 0;  // candidates so far
  unsigned long long dropped_[Quads];
  int values_ = 0;       // read, the same in a key's four lanes
  unsigned halves_ = 0;  // half rows of bytes read beside plane h of K
};

}  // namespace fold::cuda
