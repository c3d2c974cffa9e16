#pragma once
#include "cuda/decode/candidates.cuh"

// What a scan warp does (sum_stream.cuh): level 0 of every key of its tiles, and all that follows of those that ask.
namespace fold::cuda {

template <int D, int Quads>
class ScanWarp {
 public:
  using Shared = StreamShared<D, Quads>;

  /// What the range's warps take in turn, from its end on, is a tile, or half of one whose keys are all read: those of
  /// one tile would keep a warp longer than all else.
  __device__ ScanWarp(const Step& step, const RangeTask& task, Shared& shared, int warp)
      : step_(step),
        p_(step.params),
        task_(task),
        s_(shared),
        w_(shared.scan[warp]),
        barrier_(ptx::shared_address(shared.barrier[warp])),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        c_(lane_ % 4),
        first_key_(task.visible.first),
        halves_from_(min(max(task.visible.settled_end(), task.tiles.begin), task.tiles.end)),
        last_unit_(2 * task.tiles.end - halves_from_ - 1 - warp),
        units_((last_unit_ - task.tiles.begin + Shared::kScanWarps) / Shared::kScanWarps),
        halves_((max(last_unit_ - halves_from_, -1) + Shared::kScanWarps) / Shared::kScanWarps),
        keys_at_(shared.offsets.k_h + 16 * lane_),
        beside_at_(lane_ < kScaleLanes       ? shared.offsets.k_scale + 16 * lane_
                   : lane_ < 2 * kScaleLanes ? shared.offsets.v_scale + 16 * (lane_ - kScaleLanes)
                                             : shared.offsets.bound),
        candidates_(step.params, shared, shared.scan[warp], barrier_ + 8 * kStages) {}

  /// Barriers are initialised, offsets set. The first tiles are sent for; then `ready` returns once the queries are
  /// there.
  template <class Ready>
  __device__ void run(Ready ready) {
    next_pages_ = look_up(lane_);
    for (int n = -kStages; n <= units_; ++n) {
      if (n == 0) {
        ready();
        loud_ = s_.loud != 0;
        if constexpr (kHolds) held_ = {s_.row[c_], s_.fragment[0][0][lane_]};
      }
      if (n >= 0 && n < units_) {
        ptx::wait_barrier(barrier_ + 8 * (n % kStages), n / kStages % 2);
        scan(w_.stage[n % kStages], n);
      }
      __syncwarp();
      if (n + kStages < units_) send(n + kStages);
      if (n >= 0) candidates_.read(n == units_);
    }
    candidates_.flush(seen_, 2 * settled_tiles_);
  }

 private:
  static constexpr int kHalf = D / 2, kWords = D / 32;
  static constexpr int kAtOnce = Quads == 1 ? 4 : 2;  ///< keys a lane: code that is short stays in the SM's cache
  static constexpr unsigned kMask = (1u << kAtOnce) - 1;
  static constexpr int kScaleLanes = 2 * kTile / 16;  ///< that send for a tile's scales of K, or of V

  using Stage = typename Shared::Stage;

  static constexpr bool kHolds = Quads == 1;  ///< what it needs of its rows, in registers
  struct Held {
    QueryRow row;
    uint4 query;
  };
  __device__ const QueryRow& row(int t) const {
    if constexpr (kHolds) {
      return held_.row;
    } else {
      return s_.row[4 * t + c_];
    }
  }
  __device__ uint4 query(int t) const {
    if constexpr (kHolds) {
      return held_.query;
    } else {
      return s_.fragment[t][0][lane_];
    }
  }

  // Units are numbered as the tiles are as long as those are whole, then two a tile. A warp's first are halves.
  __device__ int unit(int n) const { return last_unit_ - n * Shared::kScanWarps; }
  __device__ int tile(int n) const { return n < halves_ ? (unit(n) + halves_from_) >> 1 : unit(n); }
  __device__ bool settled(int n) const { return n >= halves_ && unit(n) * kTile >= first_key_; }

  /// The page of that tile, as the block table has it.
  __device__ unsigned look_up(int n) const {
    if (n >= units_) return 0;
    const int64_t at = task_.batch * p_.block_table_stride + column_of_tile(step_, tile(n));
    return static_cast<unsigned>(__ldcg(p_.block_table + at));
  }

  /// Sends for the tile of the warp's n-th unit. A lane looks up a page, long before it is asked for.
  __device__ void send(int n) {
    if (n % 32 == 0) {
      pages_ = next_pages_;
      next_pages_ = look_up(n + 32 + lane_);
    }
    const unsigned page = in_pool_or_any(p_.cache, __shfl_sync(kWarp, pages_, n % 32));
    const int in_page = tile(n) - column_of_tile(step_, tile(n)) * step_.tiles_of_page, slot = in_page * kTile;
    Stage& stage = w_.stage[n % kStages];
    if (lane_ == 0) stage.place = {static_cast<int>(page), slot};
    const uint8_t* const from = p_.cache.pages + page * p_.cache.page_stride;
    const uint8_t* const keys = from + (keys_at_ + slot * kHalf);
    const uint32_t to = ptx::shared_address(stage.k_h) + 16 * lane_;
#pragma unroll
    for (int i = 0; i < kTile * kHalf / 512; ++i) ptx::copy_16(to + 512 * i, keys + 512 * i);
    // Beside them the scales, and the bounds of the page's blocks around this one.
    static_assert(offsetof(Stage, k_scale) == kTile * kHalf && offsetof(Stage, v_scale) == kTile * (kHalf + 2) &&
                  offsetof(Stage, bound) == kTile * (kHalf + 4));
    const bool scales = lane_ < 2 * kScaleLanes;
    ptx::copy_16_if(scales || (lane_ == 2 * kScaleLanes && settled(n)), to + kTile * kHalf,
                    from + ((beside_at_ + 2 * (scales ? slot : in_page)) & ~15));
    ptx::arrive_when_copied(barrier_ + 8 * (n % kStages));
  }

  __device__ int bound_offset(int slot) const { return s_.offsets.bound + 2 * (slot / kTile); }

  /// Level 0: lists the keys that ask for more, adds the weights of the others.
  __device__ void scan(const Stage& stage, int n) {
    const int tile = this->tile(n);
    const bool settled = this->settled(n);
    TileKeys keys = settled_keys(first_key_, tile, g_);
    int begin = 0, end = 8;  // of the keys' bits
    if (!settled) {
      keys = keys_of_unsettled(task_.visible, tile, g_);
      if (n < halves_) {
        begin = (unit(n) - halves_from_) % 2 * 4;
        end = begin + 4;
        keys.seen &= 0xFu << begin;
        keys.forced &= keys.seen;
      }
    }
    // By how much the block's outliers open V's gates.
    const float deeper =
        settled && task_.outliers != 0
            ? numerics::outlier_depth(stage.bound[bound_offset(stage.place.slot) % 16 / 2], task_.typical)
            : 0.0f;
    const int k_bits = p_.cache.layout.k_bits;
    unsigned all_low = 0, all_further = 0, all_bytes = 0;  // bit i: key g + 8 i
    int first = end - kAtOnce;
#pragma unroll 1
    do {
      float x[kAtOnce][Quads];
      const unsigned asks = score(stage, first, deeper, x);
      const unsigned seen = keys.seen >> first & kMask, forced = keys.forced >> first & kMask;
      const unsigned reads_low = k_bits >= 8 ? (asks | forced) & seen : 0;
      const unsigned further = (reads_low | asks >> 8 | forced | s_.every) & seen;
      add_quiet(x, seen & ~further);
      all_low = all_low << kAtOnce | reads_low;
      all_further = all_further << kAtOnce | further;
      all_bytes = all_bytes << kAtOnce | (asks >> 16 & reads_low);
      first -= kAtOnce;
    } while (first >= begin);
    candidates_.list(stage, all_further << begin, all_low << begin, keys.forced, k_bits == 16 ? all_bytes << begin : 0,
                     deeper);
    settled_tiles_ += settled ? 1 : 0;
    seen_ += __popc(keys.seen);
  }

  /// Level 0 of the keys g + 8 (first + i). Returns which of them some row asks to read further: from bit 0 on K's l,
  /// from bit 8 on V's h, and most likely K's b from bit 16 on.
  __device__ unsigned score(const Stage& stage, int first, float deeper, float (&x)[kAtOnce][Quads]) const {
    unsigned quiet_l = 0, quiet_h = 0, quiet_b = 0;  // sign bits of x above a gate
    uint32_t scales[kAtOnce / 2];
    load_words(scales, stage.k_scale + 8 * g_ + first);
#pragma unroll
    for (int i = kAtOnce - 1; i >= 0; --i) {
      uint32_t key[kWords];
      load_words(key, stage.k_h + (8 * (first + i) + g_) * kHalf + c_ * (D / 8));
      const float e_k = numerics::float_of(i % 2 == 0 ? scales[i / 2] << 16 : scales[i / 2] & 0xFFFF0000u);
      float most_l, most_h, most_b;
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        const auto& row = this->row(t);
        // D0 is below 2^22: exact beside the magic number.
        const float d0 = numerics::sub(__int_as_float(2 * codes(key, t) + row.first_sum), kRoundMagicFloat);
        x[i][t] = numerics::fma(numerics::mul(d0, row.unit_0), e_k, row.neg_z);
        const float most = numerics::fma(row.margin, e_k, x[i][t]);
        const float above_l = numerics::add(most, row.k_l), above_b = numerics::add(most, row.k_b);
        const float above_h = numerics::add(x[i][t], numerics::add(row.v_h, deeper));
        most_l = fmaxf(t == 0 ? -INFINITY : most_l, above_l);  // a NaN does not ask
        most_h = t == 0 ? above_h : fmaxf(most_h, above_h);
        most_b = t == 0 ? above_b : fmaxf(most_b, above_b);
      }
      quiet_l = __funnelshift_l(__float_as_uint(most_l), quiet_l, 1);
      quiet_h = __funnelshift_l(__float_as_uint(most_h), quiet_h, 1);
      quiet_b = __funnelshift_l(__float_as_uint(most_b), quiet_b, 1);
    }
    return any_row(~(quiet_l | quiet_h << 8 | quiet_b << 16)) & 0x010101u * kMask;
  }

  /// 16 times the sum of u qa of a key and query row 4 t + c. The product's rows g and g + 8 are both of this key: its
  /// even and its odd words, which have columns of their own.
  __device__ int codes(const uint32_t (&key)[kWords], int t) const {
    constexpr uint32_t kEven = 0xF0F0F0F0u, kOdd = 0x0F0F0F0Fu;  // channels
    const uint4 q = query(t);
    int even[4] = {}, odd[4] = {};
    if constexpr (kWords == 4) {
      ptx::mma_u8s8(even, key[0] & kEven, key[1] & kEven, key[2] & kEven, key[3] & kEven, q.x, q.y);
      ptx::mma_u8s8(odd, key[0] & kOdd, key[1] & kOdd, key[2] & kOdd, key[3] & kOdd, q.z, q.w);
    } else {
      ptx::mma_u8s8_k16(even, key[0] & kEven, key[1] & kEven, q.x);
      ptx::mma_u8s8_k16(odd, key[0] & kOdd, key[1] & kOdd, q.z);
    }
    return even[0] + even[3] + 16 * (odd[0] + odd[3]);
  }

  /// The weights of keys of which no more is read.
  __device__ void add_quiet(const float (&x)[kAtOnce][Quads], unsigned quiet) {
    constexpr float kNone = -64.0f;  // weighs 0
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      if (loud_) {
        unsigned long long sum = 0;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float of_key = fminf((quiet >> i & 1) != 0 ? x[i][t] : kNone, numerics::kExp2Max);
          sum += numerics::round_u32(scaled_exp2<numerics::kFraction>(of_key, kNone));
        }
        candidates_.drop(t, sum);
        continue;
      }
      unsigned sum = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        // Below 2^22: adding the magic number rounds it and leaves it in the mantissa.
        const float weight = scaled_exp2<0>((quiet >> i & 1) != 0 ? x[i][t] : kNone, kNone);
        sum += __float_as_uint(numerics::fma(weight, 0x1p+26f, kRoundMagicFloat)) - static_cast<unsigned>(kRoundMagic);
      }
      candidates_.drop(t, sum);
    }
  }
  static_assert(numerics::kFraction == 26);

  const Step& step_;
  const plan::DecodeParams& p_;
  const RangeTask& task_;
  Shared& s_;
  typename Shared::Scan& w_;
  const uint32_t barrier_;
  const int lane_, g_, c_;             // lane 4 g + c
  const int first_key_;                // that is visible
  const int halves_from_, last_unit_;  // the first tile that is taken in halves; the warp's first unit
  const int units_, halves_;           // how many the warp has, and how many of them are halves
  const int keys_at_, beside_at_;      // in a page: what the lane sends for of its first tile

  Candidates<D, Quads> candidates_;
  Held held_;
  bool loud_;                            // as StreamShared has it
  unsigned pages_ = 0, next_pages_ = 0;  // of 32 units, a lane each; of those to come
  int seen_ = 0, settled_tiles_ = 0;     // keys a lane has scanned
};

}  // namespace fold::cuda
