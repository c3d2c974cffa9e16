#pragma once
#include "cuda/decode/candidates.cuh"

// What a scan warp does (sum_stream.cuh): level 0 of every key of its tiles, and all that follows of those that ask.
namespace fold::cuda {

template <int D, int Quads>
class ScanWarp {
 public:
  using Shared = StreamShared<D, Quads>;

  /// Of the range's tiles the warp has every kScanWarps-th, from its own number on.
  __device__ ScanWarp(const Step& step, const RangeTask& task, Shared& shared, int warp)
      : p_(step.params),
        task_(task),
        s_(shared),
        w_(shared.scan[warp]),
        barrier_(ptx::shared_address(shared.barrier[warp])),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        c_(lane_ % 4),
        first_tile_(task.tiles.begin + warp),
        tiles_((task.tiles.end - first_tile_ + Shared::kScanWarps - 1) / Shared::kScanWarps),
        candidates_(step.params, shared, shared.scan[warp]) {}

  /// Barriers are initialised, offsets set. The first tiles are sent for; then `ready` returns once the queries are
  /// there.
  template <class Ready>
  __device__ void run(Ready ready) {
    for (int n = -kStages; n <= tiles_; ++n) {
      if (n == 0) ready();
      if (n >= 0 && n < tiles_) {
        ptx::wait_barrier(barrier_ + 8 * (n % kStages), n / kStages % 2);
        scan(w_.stage[n % kStages], tile(n));
      }
      __syncwarp();
      if (n + kStages < tiles_) send(n + kStages);
      if (n >= 0) candidates_.read(n == tiles_);
    }
    candidates_.flush(seen_, 2 * settled_);
  }

 private:
  static constexpr int kHalf = D / 2, kWords = D / 32;
  static constexpr int kAtOnce = Quads == 1 ? 4 : 2;  ///< keys a lane: code that is short stays in the SM's cache
  static constexpr unsigned kMask = (1u << kAtOnce) - 1;

  using Stage = typename Shared::Stage;

  __device__ int tile(int n) const { return first_tile_ + n * Shared::kScanWarps; }

  /// Whether a settled tile's outliers may open V's gates.
  __device__ bool bounded(int tile) const { return task_.outliers != 0 && task_.visible.settled(tile); }

  /// Where the warp's n-th tile is.
  __device__ Place place_of(int n) const {
    if (n >= tiles_) return {0, 0};
    const int in_table = static_cast<int>(static_cast<uint64_t>(tile(n)) * s_.per_page >> 31);
    // A page that does not exist makes for nonsense, which nobody asks for.
    const auto id = static_cast<unsigned>(__ldcg(p_.block_table + task_.batch * p_.block_table_stride + in_table));
    return {static_cast<int>(min(id, static_cast<unsigned>(p_.cache.num_pages - 1))),
            (tile(n) - in_table * s_.tiles_of_page) * kTile};
  }

  /// Sends for the warp's n-th tile. Places are looked up several at a time.
  __device__ void send(int n) {
    if (n % kPlaces == 0) {
      if (lane_ < kPlaces) w_.place[lane_] = place_of(n + lane_);
      __syncwarp();
    }
    if (lane_ == 0) {
      const Place place = w_.place[n % kPlaces];
      Stage& stage = w_.stage[n % kStages];
      stage.place = place;
      const uint8_t* const from = p_.cache.pages + place.page * p_.cache.page_stride;
      const uint32_t barrier = barrier_ + 8 * (n % kStages), to = ptx::shared_address(&stage);
      const auto copy = [&](const void* part, int offset, uint32_t bytes) {
        ptx::bulk_copy(to + static_cast<uint32_t>(static_cast<const uint8_t*>(part) - stage.k_h), from + offset, bytes,
                       barrier);
      };
      const bool with_bound = bounded(tile(n));
      ptx::expect_bytes(barrier, kTile * (kHalf + 4) + (with_bound ? 16 : 0));
      copy(stage.k_h, s_.offsets.k_h + place.slot * kHalf, kTile * kHalf);
      copy(stage.k_scale, s_.offsets.k_scale + 2 * place.slot, 2 * kTile);
      copy(stage.v_scale, s_.offsets.v_scale + 2 * place.slot, 2 * kTile);
      if (with_bound) copy(stage.bound, bound_offset(place) & ~15, 16);
    }
  }

  __device__ int bound_offset(const Place& place) const { return s_.offsets.bound + 2 * (place.slot / kTile); }

  /// Level 0: lists the keys that ask for more, adds the weights of the others.
  __device__ void scan(const Stage& stage, int tile) {
    const float deeper =
        bounded(tile) ? numerics::outlier_depth(stage.bound[bound_offset(stage.place) % 16 / 2], task_.typical) : 0.0f;
    const TileKeys keys = keys_of(task_.visible, tile, g_);
    const int k_bits = p_.cache.layout.k_bits;
    unsigned all_low = 0, all_further = 0, all_bytes = 0;  // bit i: key g + 8 i
#pragma unroll 1
    for (int first = 8 - kAtOnce; first >= 0; first -= kAtOnce) {
      float x[kAtOnce][Quads];
      const unsigned asks = score(stage, first, deeper, x);
      const unsigned seen = keys.seen >> first & kMask, forced = keys.forced >> first & kMask;
      const unsigned reads_low = k_bits >= 8 ? (asks | forced) & seen : 0;
      const unsigned further = (reads_low | asks >> 8 | forced) & seen;
      add_quiet(x, seen & ~further);
      all_low = all_low << kAtOnce | reads_low;
      all_further = all_further << kAtOnce | further;
      all_bytes = all_bytes << kAtOnce | (asks >> 16 & reads_low);
    }
    candidates_.list(stage, all_further, all_low, keys.forced, k_bits == 16 ? all_bytes : 0, deeper);
    settled_ += task_.visible.settled(tile) ? 1 : 0;
    seen_ += __popc(keys.seen);
  }

  /// Level 0 of the keys g + 8 (first + i). Returns which of them some row asks to read further: from bit 0 on K's l,
  /// from bit 8 on V's h, and most likely K's b from bit 16 on.
  __device__ unsigned score(const Stage& stage, int first, float deeper, float (&x)[kAtOnce][Quads]) const {
    unsigned quiet_l = 0, quiet_h = 0, quiet_b = 0;  // sign bits of x above a gate
#pragma unroll
    for (int i = kAtOnce - 1; i >= 0; --i) {
      uint32_t key[kWords];
      load_words(key, stage.k_h + (8 * (first + i) + g_) * kHalf + c_ * (D / 8));
      const float e_k = numerics::from_bf16(stage.k_scale[8 * g_ + first + i]);
      float most_l, most_h, most_b;
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        const auto& row = s_.row[4 * t + c_];
        // 16 sum (u - 7.5) qa, exact in a mantissa; then D0.
        const float centred = numerics::sub(__int_as_float(codes(key, t) + row.first_sum), kRoundMagicFloat);
        const float d0 = numerics::fma(centred, 2.0f, -row.sum_a);
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
    const uint4 q = s_.fragment[t][0][lane_];
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
      if (s_.loud != 0) {
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

  const plan::DecodeParams& p_;
  const RangeTask& task_;
  Shared& s_;
  typename Shared::Scan& w_;
  const uint32_t barrier_;
  const int lane_, g_, c_;  // lane 4 g + c
  const int first_tile_, tiles_;

  Candidates<D, Quads> candidates_;
  int seen_ = 0, settled_ = 0;  // keys a lane has scanned; settled tiles
};

}  // namespace fold::cuda
