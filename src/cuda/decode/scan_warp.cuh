#pragma once
#include "cuda/decode/candidates.cuh"

// What a scan warp does (sum_stream.cuh): level 0 of every key of its tiles, and all that follows of those that ask.
namespace fold::cuda {

template <int D, int Quads>
class ScanWarp {
 public:
  using Shared = StreamShared<D, Quads>;

  /// The warp has a chunk of the task's tiles, by its number, and then takes more of the group's.
  __device__ ScanWarp(const Step& step, const RangeTask& task, Shared& shared, int warp)
      : p_(step.params),
        task_(task),
        s_(shared),
        w_(shared.scan[warp]),
        barrier_(ptx::shared_address(shared.barrier[warp])),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        c_(lane_ % 4),
        taken_(static_cast<unsigned>(task.tiles.begin - task.first_tile + warp * task.chunk)),
        candidates_(step.params, shared, shared.scan[warp]) {}

  /// Sends for the first tiles. Barriers are initialised, offsets set.
  __device__ void start() {
    for (int n = 0; n < kStages; ++n) send(n);
    __syncwarp();
  }

  __device__ void run() {
    int n = 0;
    for (bool more = true; more;) {
      Stage& stage = w_.stage[n % kStages];
      const int tile = stage.tile;
      more = tile >= 0;
      if (more) {
        ptx::wait_barrier(barrier_ + 8 * (n % kStages), n / kStages % 2);
        scan(stage, tile);
        __syncwarp();
        send(n);
        ++n;
      }
      candidates_.read(!more);
    }
    candidates_.flush(seen_, 2 * settled_);
    if (lane_ == 0) atomicAdd(&s_.done, static_cast<unsigned>(n));
  }

 private:
  static constexpr int kHalf = D / 2, kWords = D / 32;

  using Stage = typename Shared::Stage;

  /// Whether a settled tile's outliers may open V's gates.
  __device__ bool bounded(int tile) const { return task_.outliers != 0 && task_.visible.settled(tile); }

  /// Where a tile is.
  __device__ Place place_of(int tile) const {
    const int in_table = static_cast<int>(static_cast<uint64_t>(tile) * s_.per_page >> 31);
    // A page that does not exist makes for nonsense, which nobody asks for.
    const auto id = static_cast<unsigned>(__ldg(p_.block_table + task_.batch * p_.block_table_stride + in_table));
    return {static_cast<int>(min(id, static_cast<unsigned>(p_.cache.num_pages - 1))),
            (tile - in_table * s_.tiles_of_page) * kTile};
  }

  /// Begins the chunk that was taken and takes another, for later.
  __device__ void begin_chunk() {
    next_ = task_.first_tile + static_cast<int>(__shfl_sync(kWarp, taken_, 0) & kTakenMask);
    chunk_end_ = min(next_ + task_.chunk, task_.tiles.end);
    if (next_ >= chunk_end_) return;
    if (const int tile = next_ + lane_; tile < chunk_end_) w_.place[tile % kMaxChunk] = place_of(tile);
    if (lane_ == 0) taken_ = atomicAdd(&task_.g.head->taken, static_cast<unsigned>(task_.chunk));
    __syncwarp();
  }

  /// Sends for the warp's next tile, if there is one, to the stage of its n-th.
  __device__ void send(int n) {
    if (next_ >= chunk_end_) begin_chunk();
    Stage& stage = w_.stage[n % kStages];
    if (next_ >= chunk_end_) {
      if (lane_ == 0) stage.tile = -1;
      return;
    }
    const int tile = next_++;
    if (lane_ == 0) {
      const Place place = w_.place[tile % kMaxChunk];
      stage.tile = tile;
      stage.place = place;
      const uint8_t* const from = p_.cache.pages + place.page * p_.cache.page_stride;
      const uint32_t barrier = barrier_ + 8 * (n % kStages), to = ptx::shared_address(&stage);
      const auto copy = [&](const void* part, int offset, uint32_t bytes) {
        ptx::bulk_copy(to + static_cast<uint32_t>(static_cast<const uint8_t*>(part) - stage.k_h), from + offset, bytes,
                       barrier);
      };
      const bool with_bound = bounded(tile);
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
    const uint4 packed = *reinterpret_cast<const uint4*>(&stage.k_scale[8 * g_]);
    const uint32_t scales[4] = {packed.x, packed.y, packed.z, packed.w};
    float x[8][Quads];
    unsigned quiet_l = 0, quiet_h = 0, quiet_b = 0;  // sign bits of x above a gate: K's l, V's h, and most likely K's b
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      if (Quads > 1) __syncwarp();  // nothing moves across: all at once would take too many registers
      uint32_t key[kWords];
      load_words(key, stage.k_h + (8 * i + g_) * kHalf + c_ * (D / 8));
      const float e_k = __uint_as_float(i % 2 == 0 ? scales[i / 2] << 16 : scales[i / 2] & 0xFFFF0000u);
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
    const TileKeys keys = keys_of(task_.visible, tile, g_);
    const unsigned asks = any_row(~(quiet_l | quiet_h << 8 | quiet_b << 16));
    const int k_bits = p_.cache.layout.k_bits;
    const unsigned reads_low = k_bits >= 8 ? (asks | keys.forced) & keys.seen : 0;
    const unsigned further = (reads_low | asks >> 8 | keys.forced) & keys.seen;
    candidates_.list(stage, further, reads_low, keys.forced, k_bits == 16 ? asks >> 16 & reads_low : 0, deeper);
    add_quiet(x, keys.seen & ~further);
    settled_ += task_.visible.settled(tile) ? 1 : 0;
    seen_ += __popc(keys.seen);
  }

  /// 16 times the sum of u qa of a key and query row 4 t + c. The product's rows g and g + 8 are both of this key: its
  /// even and its odd words, which have columns of their own.
  __device__ int codes(const uint32_t (&key)[kWords], int t) const {
    constexpr uint32_t kEven = 0xF0F0F0F0u, kOdd = 0x0F0F0F0Fu;  // channels
    const uint4 q = s_.level_0[t][lane_];
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
  __device__ void add_quiet(const float (&x)[8][Quads], unsigned quiet) {
    constexpr float kNone = -64.0f;  // weighs 0
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      if (s_.loud != 0) {
        unsigned long long sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float of_key = fminf((quiet >> i & 1) != 0 ? x[i][t] : kNone, numerics::kExp2Max);
          sum += numerics::round_u32(scaled_exp2<numerics::kFraction>(of_key, kNone));
        }
        candidates_.drop(t, sum);
        continue;
      }
      unsigned sum = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
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
  const int lane_, g_, c_;        // lane 4 g + c
  int next_ = 0, chunk_end_ = 0;  // tile to send for next, end of its chunk
  unsigned taken_;                // in lane 0: the chunk that follows, counted from the group's first tile

  Candidates<D, Quads> candidates_;
  int seen_ = 0, settled_ = 0;  // keys a lane has scanned; settled tiles
};

}  // namespace fold::cuda
