#pragma once
#include "cuda/decode/key_lanes.cuh"
#include "cuda/decode/prepare.cuh"
#include "cuda/decode/stream_shared.cuh"
#include "cuda/ptx/warp_mma.cuh"

// What a scan warp does (sum_stream.cuh): level 0 of every key of its tiles, and all that follows of those that ask.
namespace fold::cuda {

template <int D, int Quads>
class ScanWarp {
 public:
  using Shared = StreamShared<D, Quads>;

  __device__ ScanWarp(const Step& step, const RangeTask& task, Shared& shared, int warp)
      : p_(step.params),
        task_(task),
        s_(shared),
        layout_(step.params.cache.layout),
        w_(shared.scan[warp]),
        barrier_(ptx::shared_address(shared.barrier[warp])),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        c_(lane_ % 4) {}

  /// Sends for the first tiles. Barriers are initialised, offsets and next_tile set.
  __device__ void start() {
#pragma unroll
    for (int i = 0; i < kStages; ++i) send(i);
  }

  /// Waits for what was sent for.
  __device__ void abandon() {
    for (int i = 0; i < kStages; ++i) {
      if (w_.stage[i].tile >= 0) ptx::wait_barrier(barrier_ + 8 * i, 0);
    }
  }

  __device__ void run() {
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      dropped_[t] = 0;
      w_.den[t][lane_] = 0;
      peak_[t] = -INFINITY;
    }
    unsigned parity = 0;
    int at = 0;
    for (bool more = true; more;) {
      more = w_.stage[at].tile >= 0;
      if (more) {
        ptx::wait_barrier(barrier_ + 8 * at, parity);
        scan(w_.stage[at]);
        __syncwarp();
        send(at);
        at = (at + 1) % kStages;
        parity ^= at == 0;
      }
      while (true) {  // candidates go out in full batches, the rest at the end
        const unsigned listed = listed_ - sent_;
        const bool sends = listed >= (more ? kBatch : 1);
        if (!sends && (more || added_ == sent_)) break;
        if (!sends || sent_ - added_ > kBatch * (kBatches - 1)) add_batch();
        if (sends) send_batch(min(listed, unsigned{kBatch}));
      }
    }
    flush();
  }

 private:
  static constexpr int kHalf = D / 2, kWords = D / 32;
  static constexpr int kPieces = D / 32, kBytePieces = D / 16;  // 16-byte pieces of a row of nibbles, of bytes

  using Stage = typename Shared::Stage;
  using Batch = typename Shared::Batch;
  using Row = typename Shared::Row;

  __device__ const uint8_t* page_at(int page) const { return p_.cache.pages + page * p_.cache.page_stride; }

  /// Whether a settled tile's outliers may open V's gates.
  __device__ bool bounded(int tile) const { return task_.outliers != 0 && task_.visible.settled(tile); }

  /// Takes the next tile of the range for stage `at`.
  __device__ void send(int at) {
    if (lane_ == 0) {
      Stage& stage = w_.stage[at];
      const int tile = atomicAdd(&s_.next_tile, 1);
      stage.tile = tile < task_.tiles.end ? tile : -1;
      if (tile < task_.tiles.end) {
        const int in_table = static_cast<int>(static_cast<uint64_t>(tile) * s_.per_page >> 31);
        const int slot = (tile - in_table * s_.tiles_of_page) * kTile;
        // A page that does not exist makes for nonsense, which nobody asks for.
        const auto id = static_cast<unsigned>(__ldg(p_.block_table + task_.batch * p_.block_table_stride + in_table));
        const int page = static_cast<int>(min(id, static_cast<unsigned>(p_.cache.num_pages - 1)));
        stage.page = page;
        stage.slot = slot;
        const uint8_t* const from = page_at(page);
        const uint32_t barrier = barrier_ + 8 * at;
        const bool with_bound = bounded(tile);
        ptx::expect_bytes(barrier, kTile * (kHalf + 4) + (with_bound ? 16 : 0));
        ptx::bulk_copy(ptx::shared_address(stage.k_h), from + (s_.offsets.k_h + slot * kHalf), kTile * kHalf, barrier);
        ptx::bulk_copy(ptx::shared_address(stage.k_scale), from + (s_.offsets.k_scale + 2 * slot), 2 * kTile, barrier);
        ptx::bulk_copy(ptx::shared_address(stage.v_scale), from + (s_.offsets.v_scale + 2 * slot), 2 * kTile, barrier);
        if (with_bound) {
          const int bound = s_.offsets.bound + slot / kTile * 2;
          ptx::bulk_copy(ptx::shared_address(stage.bound), from + (bound & ~15), 16, barrier);
        }
      }
    }
    __syncwarp();
  }

  /// Level 0: lists the keys that ask for more, adds the weights of the others.
  __device__ void scan(const Stage& stage) {
    const bool settled = task_.visible.settled(stage.tile);
    const int bound_at = s_.offsets.bound + 2 * (stage.slot / kTile);
    const float deeper =
        bounded(stage.tile) ? numerics::outlier_depth(stage.bound[bound_at % 16 / 2], task_.typical) : 0.0f;
    const uint4 packed = *reinterpret_cast<const uint4*>(&stage.k_scale[8 * g_]);
    const uint32_t scales[4] = {packed.x, packed.y, packed.z, packed.w};
    float x[8][Quads];
    unsigned quiet_l = 0, quiet_h = 0, quiet_b = 0;  // sign bits of x above a gate: K's l, V's h, and most likely K's b
#pragma unroll
    for (int sub = 3; sub >= 0; --sub) {
      if (Quads > 1) __syncwarp();  // nothing moves across: all at once would take too many registers
      uint32_t low_key[kWords], high_key[kWords];
      load_words(low_key, stage.k_h + (16 * sub + g_) * kHalf + c_ * (D / 8));
      load_words(high_key, stage.k_h + (16 * sub + 8 + g_) * kHalf + c_ * (D / 8));
      float most_l[2], most_h[2], most_b[2];
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        const Row& row = s_.row[4 * t + c_];
        int dot[4] = {row.first_sum, 0, row.first_sum, 0}, odd[4] = {};  // two short chains, or one of fewer registers
#pragma unroll
        for (int w = 0; w < kWords; w += 2) {
          const uint4 q = s_.level_0[t][w / 2][lane_];
          ptx::mma_u8s8(dot, low_key[w], high_key[w], low_key[w + 1], high_key[w + 1], q.x, q.y);
          constexpr uint32_t kOdd = 0x0F0F0F0Fu;
          ptx::mma_u8s8(Quads == 1 ? odd : dot, low_key[w] & kOdd, high_key[w] & kOdd, low_key[w + 1] & kOdd,
                        high_key[w + 1] & kOdd, q.z, q.w);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = 2 * sub + half;
          const float e_k = __uint_as_float(half == 0 ? scales[sub] << 16 : scales[sub] & 0xFFFF0000u);
          // 16 sum (u - 7.5) qa, exact in a mantissa; then D0.
          const float centred =
              numerics::sub(__int_as_float(dot[2 * half] + odd[2 * half] + 16 * (Quads == 1 ? odd : dot)[2 * half + 1]),
                            kRoundMagicFloat);
          const float d0 = numerics::fma(centred, 2.0f, -row.sum_a);
          x[i][t] = numerics::fma(numerics::mul(d0, row.unit_0), e_k, row.neg_z);
          const float most = numerics::fma(row.margin, e_k, x[i][t]);
          const float above_l = numerics::add(most, row.k_l), above_b = numerics::add(most, row.k_b);
          const float above_h = numerics::add(x[i][t], numerics::add(row.v_h, deeper));
          most_l[half] = fmaxf(t == 0 ? -INFINITY : most_l[half], above_l);  // a NaN does not ask
          most_h[half] = t == 0 ? above_h : fmaxf(most_h[half], above_h);
          most_b[half] = t == 0 ? above_b : fmaxf(most_b[half], above_b);
        }
      }
#pragma unroll
      for (int half = 1; half >= 0; --half) {
        quiet_l = __funnelshift_l(__float_as_uint(most_l[half]), quiet_l, 1);
        quiet_h = __funnelshift_l(__float_as_uint(most_h[half]), quiet_h, 1);
        quiet_b = __funnelshift_l(__float_as_uint(most_b[half]), quiet_b, 1);
      }
    }
    const TileKeys keys = keys_of(task_.visible, stage.tile, g_);
    const unsigned asks = any_row(~(quiet_l | quiet_h << 8 | quiet_b << 16));
    const unsigned reads_low = layout_.k_bits >= 8 ? (asks | keys.forced) & keys.seen : 0;
    const unsigned further = (reads_low | asks >> 8 | keys.forced) & keys.seen;
    list(stage, further, reads_low, keys.forced, layout_.k_bits == 16 ? asks >> 16 & reads_low : 0, deeper);
    add_quiet(x, keys.seen & ~further);
    if (lane_ == 0) bytes_ += settled ? 2 : 0;
    seen_ += __popc(keys.seen);
  }

  /// Lists the keys `further` (bit i: key g + 8 i). Lane 4 g + c writes those of bits 2 c and 2 c + 1.
  __device__ void list(const Stage& stage, unsigned further, unsigned reads_low, unsigned forced, unsigned likely_byte,
                       float deeper) {
    const Slots slots = number(__popc(further), lane_);
    const unsigned first = listed_ + static_cast<unsigned>(slots.before);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int i = 2 * c_ + j, scale = 8 * g_ + i;
      if ((further >> i & 1) == 0) continue;
      const unsigned at = (first + static_cast<unsigned>(__popc(further & ((1u << i) - 1)))) % kListed;
      const unsigned flags =
          (reads_low >> i & 1) * kReadsLow | (forced >> i & 1) * kForced | (likely_byte >> i & 1) * kLikelyByte;
      w_.listed[at] = {
          stage.page,
          static_cast<unsigned>(stage.slot + g_ + 8 * i) | flags | static_cast<unsigned>(deeper) << kDeeperShift,
          stage.k_scale[scale] | static_cast<unsigned>(stage.v_scale[scale]) << 16};
    }
    listed_ += static_cast<unsigned>(slots.total);
  }

  /// The weights of keys of which no more is read.
  __device__ void add_quiet(const float (&x)[8][Quads], unsigned quiet) {
    constexpr float kNone = -64.0f;  // weighs 0
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      if (s_.loud != 0) {
        unsigned long long sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float of_key = clamped((quiet >> i & 1) != 0 ? x[i][t] : kNone);
          sum += numerics::round_u32(scaled_exp2<numerics::kFraction>(of_key, kNone));
        }
        dropped_[t] += sum;
        continue;
      }
      unsigned sum = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // Below 2^22: adding the magic number rounds it and leaves it in the mantissa.
        const float weight = scaled_exp2<0>((quiet >> i & 1) != 0 ? x[i][t] : kNone, kNone);
        sum += __float_as_uint(numerics::fma(weight, 0x1p+26f, kRoundMagicFloat)) - static_cast<unsigned>(kRoundMagic);
      }
      dropped_[t] += sum;
    }
  }
  static_assert(numerics::kFraction == 26);

  __device__ static float clamped(float x) { return fminf(x, numerics::kExp2Max); }

  /// Sends for the next `count` candidates; there is room for them.
  __device__ void send_batch(unsigned count) {
    __syncwarp();  // the list is written; the buffer has been read
    Batch& batch = w_.batch[sent_ / kBatch % kBatches];
    const uint32_t h_to = ptx::shared_address(batch.h), l_to = ptx::shared_address(batch.l),
                   b_to = ptx::shared_address(batch.b);
#pragma unroll
    for (int i = 0; i < kBatch * kPieces / 32; ++i) {
      const unsigned key = static_cast<unsigned>(lane_ / kPieces + 32 / kPieces * i);
      const int piece = lane_ % kPieces;
      if (key >= count) continue;
      const Candidate candidate = w_.listed[(sent_ + key) % kListed];
      const uint8_t* const from = page_at(candidate.page) + ((candidate.at & kSlotMask) * kHalf + 16 * piece);
      const uint32_t at = key * kHalf + 16 * piece;
      ptx::copy_16(h_to + at, from + s_.offsets.k_h);
      if ((candidate.at & kReadsLow) != 0) {
        ptx::copy_16(l_to + at, from + s_.offsets.k_l);
      } else {
        *reinterpret_cast<uint4*>(batch.l + at) = {0x77777777u, 0x77777777u, 0x77777777u, 0x77777777u};
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch * kBytePieces / 32; ++i) {
      const unsigned key = static_cast<unsigned>(lane_ / kBytePieces + 32 / kBytePieces * i);
      if (key >= count) continue;
      const Candidate candidate = w_.listed[(sent_ + key) % kListed];
      if ((candidate.at & kLikelyByte) != 0) send_byte_row(b_to, candidate, key, lane_ % kBytePieces);
    }
    ptx::commit_copies();
    sent_ += count;
  }

  __device__ void send_byte_row(uint32_t to, const Candidate& candidate, int key, int piece) {
    const uint8_t* const from = page_at(candidate.page) + ((candidate.at & kSlotMask) * D + 16 * piece);
    ptx::copy_16(to + swizzled<D>(key, piece), from + s_.offsets.k_b);
  }

  /// Levels 1 and 2 of the oldest batch, its weights, and on to the value warps with what is read of V.
  __device__ void add_batch() {
    const unsigned first = added_, count = min(sent_ - added_, unsigned{kBatch});
    if (sent_ - added_ > kBatch) {
      ptx::wait_copies_but<1>();
    } else {
      ptx::wait_copies();
    }
    __syncwarp();
    Batch& batch = w_.batch[first / kBatch % kBatches];
    bool exists[2];
    Candidate key[2];
    float e_k[2], x[2][Quads];
    uint32_t h[2][kWords], l[2][kWords];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = g_ + 8 * j;
      exists[j] = static_cast<unsigned>(row) < count;
      key[j] = exists[j] ? w_.listed[(first + row) % kListed] : Candidate{-1, kReadsLow, 0};
      e_k[j] = __uint_as_float(key[j].scales << 16);
      load_words(h[j], batch.h + row * kHalf + c_ * (D / 8));
      load_words(l[j], batch.l + row * kHalf + c_ * (D / 8));
    }
    int d1[2][Quads];
    unsigned asks = 0;
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const Row& row = s_.row[4 * t + c_];
      int dot[4] = {0, 0, 0, 0};
#pragma unroll
      for (int w = 0; w < kWords; w += 2) {
        const uint4 q = s_.level_1[t][w / 2][lane_];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          ptx::mma_u8s8(dot, ptx::join_nibbles(h[0][w + i], l[0][w + i] >> 4),
                        ptx::join_nibbles(h[1][w + i], l[1][w + i] >> 4),
                        ptx::join_nibbles(h[0][w + i] << 4, l[0][w + i]),
                        ptx::join_nibbles(h[1][w + i] << 4, l[1][w + i]), i == 0 ? q.x : q.z, i == 0 ? q.y : q.w);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool low = (key[j].at & kReadsLow) != 0;
        d1[j][t] = 256 * dot[2 * j] + dot[2 * j + 1] - row.sum_128;
        const int d0 = 2 * dot[2 * j] - row.sum_255;  // its l plane is 7 throughout
        x[j][t] = numerics::fma(numerics::mul(static_cast<float>(low ? d1[j][t] : d0), low ? row.unit_1 : row.unit_0),
                                e_k[j], row.neg_z);
        asks |= static_cast<unsigned>(low && numerics::fma(row.margin_16, e_k[j], x[j][t]) >= -row.k_b) << j;
      }
    }
    asks = layout_.k_bits == 16 ? any_row(asks) : 0;
    if (!exists[0]) asks &= ~1u;
    if (!exists[1]) asks &= ~2u;
    if (__any_sync(kWarp, asks != 0)) level_2(batch, key, asks, d1, e_k, x);
    weigh(key, exists, x);
    const unsigned b_low = __ballot_sync(kWarp, (asks & 1) != 0), b_high = __ballot_sync(kWarp, (asks & 2) != 0);
    const unsigned l_low = __ballot_sync(kWarp, exists[0] && (key[0].at & kReadsLow) != 0),
                   l_high = __ballot_sync(kWarp, exists[1] && (key[1].at & kReadsLow) != 0);
    if (lane_ == 0) bytes_ += ((__popc(l_low) + __popc(l_high)) * kHalf + (__popc(b_low) + __popc(b_high)) * D) / 4;
    added_ += count;
  }

  __device__ void level_2(Batch& batch, const Candidate (&key)[2], unsigned asks, const int (&d1)[2][Quads],
                          const float (&e_k)[2], float (&x)[2][Quads]) {
    const bool missing[2] = {(asks & 1) != 0 && (key[0].at & kLikelyByte) == 0,
                             (asks & 2) != 0 && (key[1].at & kLikelyByte) == 0};
    if (__any_sync(kWarp, missing[0] || missing[1])) {  // rare: a logit that rose by more than its margin
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        for (int piece = c_; missing[j] && piece < kBytePieces; piece += 4)
          send_byte_row(ptx::shared_address(batch.b), key[j], g_ + 8 * j, piece);
      }
      ptx::wait_copies();
      __syncwarp();
    }
    uint32_t b[2][2 * kWords];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < kWords / 2; ++i) {
        const uint4 v = *reinterpret_cast<const uint4*>(batch.b + swizzled<D>(g_ + 8 * j, c_ * (kWords / 2) + i));
        b[j][4 * i] = v.x, b[j][4 * i + 1] = v.y, b[j][4 * i + 2] = v.z, b[j][4 * i + 3] = v.w;
      }
    }
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const Row& row = s_.row[4 * t + c_];
      int dot[4] = {0, 0, 0, 0};
#pragma unroll
      for (int w = 0; w < kWords; w += 2) {
        const uint4 q = s_.level_2[t][w / 2][lane_];
        ptx::mma_s8s8(dot, b[0][2 * w], b[1][2 * w], b[0][2 * w + 1], b[1][2 * w + 1], q.x, q.y);
        ptx::mma_s8s8(dot, b[0][2 * w + 2], b[1][2 * w + 2], b[0][2 * w + 3], b[1][2 * w + 3], q.z, q.w);
      }
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
        const Row& row = s_.row[4 * t + c_];
        asks |= static_cast<unsigned>(x[j][t] >= -numerics::add(row.v_h, deeper)) << j;
        asks |= static_cast<unsigned>(x[j][t] >= -numerics::add(row.v_l, deeper)) << (2 + j);
        asks |= static_cast<unsigned>(x[j][t] >= -numerics::add(row.v_b, deeper)) << (4 + j);
      }
    }
    asks = any_row(asks);
    bool read[2], read_l[2], read_b[2];
    unsigned weight[2][Quads];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool forced = (key[j].at & kForced) != 0;
      read[j] = exists[j] && ((asks >> j & 1) != 0 || forced);
      read_l[j] = layout_.v_bits >= 8 && read[j] && ((asks >> (2 + j) & 1) != 0 || forced);
      read_b[j] = layout_.v_bits == 16 && read_l[j] && (asks >> (4 + j) & 1) != 0;
      const float e_v = __uint_as_float(key[j].scales & 0xFFFF0000u);
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        const float scaled = scaled_exp2<numerics::kFraction>(clamped(x[j][t]), numerics::kExp2Min);
        const unsigned d = exists[j] ? numerics::round_u32(scaled) : 0;
        const unsigned w = numerics::round_u32(numerics::mul(scaled, numerics::mul(e_v, s_.row[4 * t + c_].per_e)));
        weight[j][t] = read[j] ? w : 0;
        if (read[j]) {
          w_.den[t][lane_] += d;
          peak_[t] = fmaxf(peak_[t], x[j][t]);
        } else {
          dropped_[t] += d;
        }
      }
    }
    const int values = push(s_.nibbles, key, read, read_l, weight),
              bytes = push(s_.bytes_of_v, key, read_b, read_b, weight);
    const unsigned l_low = __ballot_sync(kWarp, read_l[0]), l_high = __ballot_sync(kWarp, read_l[1]);
    if (lane_ != 0) return;
    values_ += values;
    bytes_ += values * (kHalf + 2) + (__popc(l_low) + __popc(l_high)) / 4 * kHalf + bytes * D;
  }

  /// Appends the keys `wanted` to a queue; returns how many. kReadsLow is set by `low`.
  template <class Queue>
  __device__ int push(Queue& queue, const Candidate (&key)[2], const bool (&wanted)[2], const bool (&low)[2],
                      const unsigned (&weight)[2][Quads]) {
    const unsigned of[2] = {__ballot_sync(kWarp, c_ == 0 && wanted[0]), __ballot_sync(kWarp, c_ == 0 && wanted[1])};
    const int count = __popc(of[0]) + __popc(of[1]);
    if (count == 0) return 0;
    unsigned first = 0;
    if (lane_ == 0) first = atomicAdd(&queue.tail, static_cast<unsigned>(count));
    first = __shfl_sync(kWarp, first, 0);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!wanted[j]) continue;
      const unsigned at =
          first + static_cast<unsigned>((j == 0 ? 0 : __popc(of[0])) + __popc(of[j] & ((1u << (4 * g_)) - 1)));
      const int block = static_cast<int>(at / kQueueBlock), buffer = block % Queue::kBlocks,
                slot = static_cast<int>(at % kQueueBlock);
      queue.wait_writable(block);
#pragma unroll
      for (int t = 0; t < Quads; ++t) queue.weight[buffer][4 * t + c_][slot] = weight[j][t];
      if (c_ == 0) queue.entry[buffer][slot] = {key[j].page, (key[j].at & kSlotMask) | (low[j] ? kReadsLow : 0)};
    }
    __syncwarp();
    if (lane_ == 0) queue.publish(first, count);
    return count;
  }

  /// Adds what the lanes hold to the CTA's sums.
  __device__ void flush() {
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const int r = 4 * t + c_;
      const auto add = [&](unsigned long long& to, unsigned long long of_lane) {
        const unsigned long long sum = sum_over_keys(of_lane);
        if (g_ == 0) atomicAdd(&to, sum);
      };
      add(s_.den[r], w_.den[t][lane_] + dropped_[t]);
      add(s_.dropped[r], dropped_[t]);
      int peak = ordered(peak_[t]);
      for (int s = 4; s < 32; s *= 2) peak = max(peak, __shfl_xor_sync(kWarp, peak, s));
      if (g_ == 0) atomicMax(&s_.peak[r], peak);
    }
    const unsigned seen = sum_over_keys(static_cast<unsigned>(seen_));
    if (lane_ != 0) return;
    atomicAdd(&s_.values, static_cast<unsigned long long>(values_));
    atomicAdd(&s_.bytes, bytes_ + static_cast<unsigned long long>(seen) * (kHalf + 2));
  }

  const plan::DecodeParams& p_;
  const RangeTask& task_;
  Shared& s_;
  const CacheLayout& layout_;
  typename Shared::Scan& w_;
  const uint32_t barrier_;
  const int lane_, g_, c_;  // lane 4 g + c

  unsigned listed_ = 0, sent_ = 0, added_ = 0;  // candidates so far
  unsigned long long dropped_[Quads];
  float peak_[Quads];
  int values_ = 0, seen_ = 0;
  unsigned long long bytes_ = 0;
};

}  // namespace fold::cuda
