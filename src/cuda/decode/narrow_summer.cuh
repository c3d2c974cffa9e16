#pragma once
#include "cuda/decode/key_lanes.cuh"
#include "cuda/decode/narrow_shared.cuh"
#include "cuda/decode/range_task.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/warp_mma.cuh"

// The class of sum_narrow.cuh; its parts are defined in narrow_keys.cuh, narrow_weights.cuh and narrow_values.cuh.
namespace fold::cuda {

template <int D, int Quads>
class NarrowSummer {
 public:
  using Shared = NarrowShared<D, Quads>;

  // Told that what is in `shared` is apart from `task`, which is in shared memory, too, the compiler gets by with its
  // registers.
  __device__ NarrowSummer(const Step& step, RangeTask& task, Shared& __restrict__ shared)
      : step_(step),
        p_(step.params),
        task_(task),
        s_(shared),
        layout_(step.params.cache.layout),
        warp_(__shfl_sync(kWarp, threadIdx.x / 32, 0)),
        w_(shared.warp[warp_]),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        c_(lane_ % 4) {}

  static constexpr bool kTail = true;
  static constexpr bool kStartsEarly = true;  ///< before the references are declared
  static constexpr bool kFillsWaves = false;  ///< more groups than fit at once are cut further for full waves
  static constexpr int kThreads = Shared::kThreads;
  static constexpr int kCtas = D == 256 ? 1 : Quads == 1 ? 4 : Quads == 2 ? 3 : Shared::kChunkTiles == 4 ? 2 : 1;

  __device__ void run();

 private:
  static constexpr int kHalf = D / 2, kWords = D / 32, kRows = Shared::kRows;
  static constexpr int kChunkTiles = Shared::kChunkTiles;
  static constexpr int kTilesM = D / 16 / kChunkTiles;  // 16-channel tiles of a warp's share of the channels
  static constexpr int kParts = kThreads / D;           // threads of a channel
  static constexpr bool kWholePiece = kTilesM == 2;     // a warp has a whole piece of nibbles (see below), not half
  static constexpr int kCodeColumns = (kRows + 7) / 8;  // products of codes, of eight query rows each
  static constexpr int kLowChunks = D / 16;             // 16-byte pieces of a plane b row

  using Place = typename Shared::Place;
  using Warp = typename Shared::Warp;
  __device__ const int32_t* page_entry(int page) const {
    return p_.block_table + task_.batch * p_.block_table_stride + page;
  }

  __device__ void start();

  /// Goes on to the next chunk: sends for its tile and for what else is known of that, if it is of the range.
  /// Early: before the earlier kernels have been waited for.
  template <bool Early>
  __device__ void send();

  /// The block's own of a Place's two.
  __device__ uint16_t of_block(unsigned pair) const { return static_cast<uint16_t>(pair >> w_.place.of_pair); }

  /// Everything about one tile up to the fetch of its values. A warp without one scans what is left of
  /// another, for all warps to meet at the same place.
  __device__ void score();

  /// Level 0. Returns which of the lane's keys ask for K's l.
  __device__ unsigned scan(float (&x)[8][Quads]);

  __device__ void store_x(const float (&x)[8][Quads]);
  __device__ void load_x(float (&x)[8][Quads]);

  /// Lists the keys of `bits` that lanes hold: lane 4 g + c writes bits 2 c and 2 c + 1.
  template <typename T, class F>
  __device__ void list(T* to, unsigned bits, int before, F entry) const;
  __device__ uint8_t* keys() const { return reinterpret_cast<uint8_t*>(w_.keys); }
  __device__ uint8_t* low_keys() const { return keys() + kTile; }

  /// The query plane of the lane's column in the deeper levels' products: row 4 t + g / 2, by g's parity. (Of a row
  /// that does not exist another's: it counts nowhere.)
  __device__ const uint8_t* query(const int8_t* high, const int8_t* low, int t) const {
    return reinterpret_cast<const uint8_t*>((g_ % 2 == 0 ? high : low) + min(4 * t + g_ / 2, task_.rows - 1) * D);
  }

  __device__ float key_scale(int key) const { return numerics::from_bf16(w_.k_scale[numerics::scale_slot(key)]); }

  /// Levels 1 and 2 of the keys `wanted`.
  __device__ void read_deeper(unsigned wanted, const Slots& slots);

  /// Sixteen keys of the list from `first` on. Adds those that ask for K's b to their list; returns its length.
  __device__ int level_1(const uint8_t* rows, int first, int total, int further);

  /// The keys in low_keys.
  __device__ void level_2(int total);
  __device__ void level_2(const uint8_t* keys, int total);

  /// Which V planes are read, and every weight of the tile.
  __device__ void weigh(const float (&x)[8][Quads], const TileKeys& keys, bool settled);

  /// The sums and codes of query row 4 t + c's `dropped` keys (bit i: key g + 8 i), and the weight of the block's mean
  /// row. Sum: holds a tile's. Returns whether any key of any row has a code.
  template <typename Sum>
  __device__ bool weigh_dropped(const float (&x)[8], int t, unsigned dropped, unsigned& mean_weight);

  /// The weights in the value products, by slot, for query rows c, c + 4: of keys, then of the mean row if there is
  /// one. Slots without a row weigh nothing.
  __device__ void weigh_values(int live, bool mean, const unsigned (&mean_weight)[Quads]);

  static constexpr int kPieces = kHalf / 16;  // 16-byte pieces of a plane h or l row

  /// Sends for the V rows of the warp's slots of a round, in the first one also for what stands in for dropped keys.
  __device__ void gather_values(const Spot& spot, int round);

  /// A tile's mean row, (D,), and behind it the block's mean codes, (D,).
  __device__ const uint8_t* mean_row(int tile) const { return reinterpret_cast<const uint8_t*>(s_.warp[tile].x); }
  static_assert(sizeof(Warp::x) >= 2 * D);

  /// Brings the mean row, once it has arrived, into its slot if that is of this round.
  __device__ void store_mean(int round);

  /// The warp's 16-byte piece of a row of nibbles, and of its m-th tile of 16 channels which byte of each pair.
  __device__ int nibble_piece() const { return kWholePiece ? warp_ : warp_ / 2; }
  __device__ int nibble_byte(int m) const { return kWholePiece ? m : warp_ % 2; }

  /// The V rows of a round, every tile's.
  __device__ void add_values(int round);

  /// Byte columns of the weights of the slots from 4 c on: (row g / 2, byte 2 n + g % 2).
  __device__ void load_weights(uint32_t (&columns)[2], int from, int t, int slot, unsigned pick) const;

  __device__ void add_nibbles(int from, int first, int h_at, int l_at, unsigned pick);

  /// Sixteen slots' plane b, from slot `first` on.
  __device__ void add_low(int from, int first, unsigned pick);

  /// sum C_b ubar_b of the tiles' blocks.
  __device__ void add_mean_codes();

  /// sum c_j u_j of the tiles' dropped keys: byte columns 2 g, 2 g + 1 of the warp's piece as rows, query rows as
  /// columns.
  __device__ void add_codes();

  __device__ void clear_accumulators();

  /// Adds everything the threads hold to the group's sums, by way of shared memory.
  __device__ void flush();

  /// f(at, sum) of all code products that the lane holds. at: of (row, channel) in (rows, D).
  template <class F>
  __device__ void for_codes(F f) const;

  /// (kRows,): a warp's, where the weights were.
  using RowOfWarp = typename Shared::RowOfWarp;
  __device__ static RowOfWarp* rows_of(Warp& warp) { return reinterpret_cast<RowOfWarp*>(warp.weight); }
  static_assert(sizeof(Warp::weight) >= kRows * sizeof(RowOfWarp) && offsetof(Warp, weight) % alignof(RowOfWarp) == 0);

  /// What the warp holds of row 4 t + c, to shared memory.
  __device__ void store_row(int t);
  /// All warps' sums of a row to the group's.
  __device__ void add_row(int r);

  /// Shared::sums to the group's, the codes' without ubar's part.
  __device__ void add_to_group();

  __device__ void end();

  const Step& step_;
  const plan::DecodeParams& p_;
  RangeTask& task_;
  Shared& s_;
  const CacheLayout& layout_;
  const int warp_;
  Warp& w_;
  const int lane_, g_, c_;  // lane 4 g + c

  int value_[kTilesM][Quads][2][4], low_value_[kTilesM][Quads][2][4];  // products by weight byte 2 n + column % 2
  int code_pair_[kCodeColumns][4], code_odd_[kCodeColumns][4];         // of 16 u_even + u_odd, and of u_odd
  unsigned long long den_[Quads], value_mass_[Quads], half_mass_[Quads];
  float peak_[Quads];
};

}  // namespace fold::cuda
