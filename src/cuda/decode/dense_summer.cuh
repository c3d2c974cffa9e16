#pragma once
#include "cuda/decode/dense_shared.cuh"
#include "cuda/decode/range_task.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/warp_mma.cuh"

// The class of sum_dense.cuh; its parts are defined in dense_keys.cuh and dense_values.cuh.
namespace fold::cuda {

template <int D, int Quads>
class DenseSummer {
 public:
  using Shared = DenseShared<D, Quads>;
  static constexpr bool kTail = false;
  static constexpr bool kStartsEarly = true;  ///< before the references are declared
  static constexpr bool kFillsWaves = true;   ///< more groups than fit at once are cut further for full waves
  static constexpr int kThreads = Shared::kThreads;
  static constexpr int kCtas = D == 64      ? (Quads <= 2 ? 4 : 2)
                               : D == 256   ? 1
                               : Quads == 1 ? 3
                                            : 2;  ///< a multiprocessor

  __device__ DenseSummer(const Step& step, RangeTask& task, Shared& __restrict__ shared)
      : step_(step),
        p_(step.params),
        task_(task),
        s_(shared),
        warp_(__shfl_sync(kWarp, threadIdx.x / 32, 0)),
        w_(shared.warp[warp_]),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        c_(lane_ % 4) {}

  __device__ void run();

 private:
  static constexpr int kHalf = D / 2, kWords = D / 32, kRows = Shared::kRows, kWarps = Shared::kWarps;
  static constexpr int kTeam = Shared::kTeam;
  static constexpr int kPieces = kHalf / 16;      // 16-byte pieces of a row of nibbles
  static constexpr int kMine = kPieces / kTeam;   // of them a warp's share
  static constexpr int kUnits = (Quads + 1) / 2;  // products of eight query rows each
  /// As many tiles a warp before a 32-bit sum of products of bytes could overflow if one had all of the CTA's.
  static constexpr int kFlushRounds = (1 << 14) / kTile / kWarps;
  static_assert(kMine > 0);

  using Warp = typename Shared::Warp;

  __device__ int tile(int n) const { return task_.tiles.begin + warp_ + n * kWarps; }
  __device__ bool exists(int n) const { return tile(n) < task_.tiles.end; }

  __device__ void start();

  /// The page of the warp's n-th tile, as the block table has it.
  __device__ unsigned look_up(int n) const;
  /// Where the n-th tile is. Asked for one after the other.
  __device__ Spot find(int n);
  /// Sends for K's planes h and l and all scales; for V's planes h and l.
  __device__ void send_keys(const Spot& spot, int n);
  __device__ void send_values(const Spot& spot);

  /// The warp's n-th tile, and its share of the team's.
  __device__ void add_tile(int n);

  /// Levels 0 and 1, and which keys are read to level 2.
  struct Deeper {
    unsigned low, bytes;  // bit i: of key g + 8 i plane l is read, and b
  };
  __device__ Deeper score(const TileKeys& keys, int n);

  static constexpr int kAtOnce = D == 64 && Quads <= 2 ? 1 : 2;  ///< pairs of a lane's keys side by side

  /// The union over the four lanes of a pair of keys, in bits 0 and 1.
  __device__ unsigned any_row(const bool (&asks)[2]) const {
    const unsigned key = 15u << 4 * g_;
    return ((__ballot_sync(kWarp, asks[0]) & key) != 0 ? 1u : 0u) |
           ((__ballot_sync(kWarp, asks[1]) & key) != 0 ? 2u : 0u);
  }

  /// Sends for rows of a plane b that will be fetched, keys g + 16 sub and 8 more: by then they are in L2. (Rows of
  /// head dim 64 come no sooner for it.)
  __device__ void prefetch(int section, unsigned wanted, int sub) const;

  /// Level 2 of the keys listed.
  __device__ void level_2(int total, int n);

  /// Makes the lane's keys `unseen` weigh nothing and ask for nothing.
  __device__ void hide(unsigned unseen, int n);

  /// Every weight of the tile, and what is read of V.
  __device__ void weigh(const TileKeys& keys, bool settled, int n);

  /// The team's tiles, the warp's share of the channels: planes h and l; b of sixteen listed keys from `first` on.
  __device__ void add_values();
  __device__ void add_nibbles(const Warp& from);
  /// words[p][j]: channels 32 p + 4 g and three more of the key 4 c + j.
  __device__ void fetch_bytes(uint32_t (&words)[kMine][4], const Warp& from, int first) const;
  __device__ void add_bytes(const uint32_t (&words)[kMine][4], const Warp& from, int first);

  /// The warps of a team meet.
  __device__ void meet() const;

  __device__ void clear();
  /// Adds everything the threads hold to the group's sums, by way of shared memory.
  __device__ void flush();
  __device__ void store_rows();
  __device__ void add_row(int r);

  const Step& step_;
  const plan::DecodeParams& p_;
  RangeTask& task_;
  Shared& s_;
  const int warp_;
  Warp& w_;
  const int lane_, g_, c_;  // lane 4 g + c

  Spot now_;
  unsigned pages_;  // of 32 tiles, a lane each
  // Products of the values' bytes by those of weights. Rows of the m-th: channels 4 g + 2 (m % 2), and one more, of the
  // piece m / 2. sums_: by weight byte 2 n + column % 2, in units of 2^8; of plane b, whose unit that is not, by the
  // byte above. units_: of plane b by the lowest byte, query rows as columns.
  int sums_[2 * kMine][Quads][2][4], units_[2 * kMine][kUnits][4];
  unsigned long long den_[Quads], mass_[Quads], half_mass_[Quads];
  float peak_[Quads];
  // Of keys with the lane's g: visible; planes read beyond h, in half rows of bytes. Settled tiles.
  unsigned keys_, halves_, settled_;
};

}  // namespace fold::cuda
