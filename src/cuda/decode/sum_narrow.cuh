#pragma once
#include "cuda/decode/key_lanes.cuh"
#include "cuda/decode/prepare.cuh"
#include "cuda/decode/range_task.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/warp_mma.cuh"

// The sums of a range of tiles for groups of up to 8 rows, D = 64 or 128, with the tail model (docs/numerics.md,
// sections 6 and 7).
//
// A CTA of four warps takes a chunk of four tiles at a time. Each warp scores a tile alone: level 0 of every key from a
// bulk copy of K's h plane, the deeper levels of those that ask from gathered rows, then every weight; it sends for the
// V rows that are read. Then all warps add the chunk's values, each for a quarter of the channels: what is weighted
// lies in shared memory with keys as rows, and a transposed load makes keys the products' inner dimension. A tile's
// mean row stands in for its dropped keys as one more V row.
//
// Weights are summed byte by byte: byte j of a row's weight is a column of the product whose sum counts 2^(8 j).
namespace fold::cuda {

constexpr int kChunkTiles = 4;  ///< tiles of a chunk, warps of a CTA
constexpr int kNarrowThreads = 32 * kChunkTiles;
constexpr int kSlots = 32;         ///< V rows of a tile that are multiplied in a round
constexpr int kLowSlots = 16;      ///< and V's b rows
constexpr int kFlushChunks = 128;  ///< 2^15 keys: no 32-bit sum of products of bytes overflows before

template <int D, int Quads>
struct NarrowShared {
  static constexpr int kRows = 4 * Quads;
  static constexpr int kRowStride = kTile + 4;  // words; keeps rows off each other's banks

  struct Row {  // constants of a query row
    float sum_a, unit_0, neg_z, margin, k_l;
    float e_q, unit_1, margin_16, k_b;
    float v_h, v_l, v_b, per_e;
    int first_sum, sum_128, fit_shift, e_exponent;
  };
  struct Offsets {  // of the KV head's sections in a page
    int k_h, k_l, k_b, k_scale, v_h, v_l, v_b, v_scale, bound, mean_scale, mean, ubar;
  };
  struct Place {  // of a warp's tile
    const uint8_t* page;
    int tile, slot;                        // its index, the slot of its first key
    int next_slot, next_index, next_page;  // of the next chunk's tile: slot, its page's place in the table, that page
    unsigned bound, mean_scale;            // of its block, where it is settled, and of that one's neighbour
  };
  /// A warp's, and what the other warps read of its tile. One block: a single address leads to all of it.
  struct alignas(16) Warp {
    uint8_t k_h[kTile * D / 2];
    uint16_t k_scale[kTile], v_scale[kTile];
    // By scale slot; of keys read to level 2, D1 until then. Once all weights are known: the block's mean row and
    // codes.
    float x[kRows][kRowStride];
    unsigned weight[kRows][kRowStride];  // by V slot
    uint8_t code[kRows][80];
    uint16_t keys[kTile];  // whose V is read, 2^8: plane l; before that two lists of bytes, K's l and b
    Place place;
    int live, slots, low;          // V rows read; with the mean row; V's b rows, which are the first
    int rounds, coded;             // until all of them are multiplied; whether dropped keys have codes
    alignas(16) int codes[kRows];  // C_b
    unsigned long long dropped[kRows];
    unsigned values, bytes;
    uint64_t barrier;
  };

  // Gathered, of each warp: V's h and l beside each other, then V's b; before that K's l or b.
  alignas(128) uint8_t rows[kChunkTiles][(kSlots + kLowSlots) * D];
  Warp warp[kChunkTiles];
  uint4 scan[Quads][D / 64][32];    // level 0's query fragments
  int ubar[kRows][kNarrowThreads];  // sums of C_b ubar_b, of a thread's channel
  Row row[kRows];
  Offsets offsets;
  unsigned long long den[kRows], mass[kRows], value_mass[kRows], half_mass[kRows], dropped[kRows], values, bytes;
  int peak[kRows];
  int loud;  // whether some row may drop a weight of 2^26 or more
};

template <int D, int Quads>
class NarrowSummer {
 public:
  using Shared = NarrowShared<D, Quads>;

  // Both are in shared memory: told that they are apart, the compiler gets by with its registers.
  __device__ NarrowSummer(const Step& step, const RangeTask& __restrict__ task, Shared& __restrict__ shared)
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
  static constexpr bool kStartsEarly = false;  ///< before the references are declared
  static constexpr int kThreads = kNarrowThreads, kCtas = Quads == 1 ? 4 : 3;

  __device__ void run() {
    const int &tile_begin = task_.tiles.begin, &tile_end = task_.tiles.end;
    start(tile_begin, tile_end);
    for (int tile = tile_begin; tile < tile_end; tile += kChunkTiles) {
      const bool mine = tile + warp_ < tile_end;
      score(mine, (tile - tile_begin) / kChunkTiles % 2);
      __syncthreads();  // what was scored is in shared memory
      add_codes();
      ptx::wait_copies();
      store_mean(0);
      __syncthreads();  // the V rows are there, K's tiles are free
      const Place done = w_.place;
      if (tile + kChunkTiles + warp_ < tile_end) send(tile + kChunkTiles + warp_, tile_end);
      add_mean_codes();
      const int rounds = max(max(s_.warp[0].rounds, s_.warp[1].rounds), max(s_.warp[2].rounds, s_.warp[3].rounds));
#pragma unroll 1
      for (int round = 0; round < rounds; ++round) {
        if (round > 0) {
          __syncthreads();
          if (mine) gather_values(done, round);
          ptx::wait_copies();
          store_mean(round);
          __syncthreads();
        }
        add_values(round);
      }
      const int scored = tile + kChunkTiles - tile_begin;
      if (scored % (kFlushChunks * kChunkTiles) == 0 || tile + kChunkTiles >= tile_end) flush();
    }
    publish();
  }

 private:
  static constexpr int kHalf = D / 2, kWords = D / 32, kRows = Shared::kRows;
  static constexpr int kTilesM = D / 64;             // 16-channel tiles of a warp's quarter of the channels
  static constexpr int kParts = kNarrowThreads / D;  // threads of a channel
  static constexpr int kLowChunks = D / 16;          // 16-byte pieces of a plane b row

  using Place = typename Shared::Place;
  using Warp = typename Shared::Warp;
  __device__ const uint8_t* at(const Place& place, int section, int key_bytes) const {
    return place.page + (section + place.slot * key_bytes);
  }
  __device__ const int32_t* page_entry(int page) const {
    return p_.block_table + task_.batch * p_.block_table_stride + page;
  }

  __device__ void start(int tile_begin, int tile_end) {
    const uint32_t barrier = ptx::shared_address(&w_.barrier);
    if (lane_ == 0) {
      ptx::init_barrier(barrier);
      ptx::fence_barrier_init();
    }
    if (threadIdx.x == 0) {
      const PageSections& from = p_.cache.sections;
      const int row = task_.kv_head * static_cast<int>(layout_.page_size), block = row / kTile;
      const auto offset = [](int64_t section, int before) { return static_cast<int>(section) + before; };
      s_.offsets = {offset(from.k_h, row * kHalf),      offset(from.k_l, row * kHalf), offset(from.k_b, row * D),
                    offset(from.k_scale, 2 * row),      offset(from.v_h, row * kHalf), offset(from.v_l, row * kHalf),
                    offset(from.v_b, row * D),          offset(from.v_scale, 2 * row), offset(from.bound, 2 * block),
                    offset(from.mean_scale, 2 * block), offset(from.mean, D * block),  offset(from.ubar, D * block)};
      s_.loud = 0;
    }
    if (lane_ == 0 && tile_begin + warp_ < tile_end) {
      const int page_size = static_cast<int>(layout_.page_size), key = (tile_begin + warp_) * kTile;
      w_.place.next_slot = key % page_size;
      w_.place.next_index = key / page_size;
      w_.place.next_page = *page_entry(key / page_size);
    }
    __syncthreads();
    if (tile_begin + warp_ < tile_end) send(tile_begin + warp_, tile_end);
    const GroupState& g = task_.g;
    for (int r = threadIdx.x; r < kRows; r += kNarrowThreads) {
      typename Shared::Row& row = s_.row[r];
      const bool active = (task_.active >> r & 1) != 0;
      const RowState state = active ? g.rows[r] : RowState{.z = INFINITY};
      row = {.sum_a = static_cast<float>(state.sum_a),
             .unit_0 = unit_of_level(state.e_q, 0),
             .neg_z = -state.z,
             .margin = state.margin,
             .k_l = state.gates.k_l,
             .e_q = state.e_q,
             .unit_1 = unit_of_level(state.e_q, 1),
             .margin_16 = numerics::mul(state.margin, 0x1p-4f),
             .k_b = state.gates.k_b,
             .v_h = state.gates.v_h,
             .v_l = state.gates.v_l,
             .v_b = state.gates.v_b,
             .per_e = numerics::pow2(-state.e_exponent),
             .first_sum = kRoundMagic - 120 * state.sum_a,
             .sum_128 = 128 * state.sum,
             .fit_shift = state.fit_shift,
             .e_exponent = state.e_exponent};
      s_.den[r] = s_.mass[r] = s_.value_mass[r] = s_.half_mass[r] = s_.dropped[r] = 0;
      s_.peak[r] = ordered(-INFINITY);
      if (active && !(state.gates.v_h >= 1.0f)) s_.loud = 1;
    }
    if (threadIdx.x == 0) s_.values = s_.bytes = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < Quads * kWords * 32; i += kNarrowThreads) {
      const int t = i / (kWords * 32), w = i / 32 % kWords, lane = i % 32;
      const int row = 4 * t + lane / 8, c = lane % 4, low_plane = lane / 4 % 2;
      uint2 scan{};
      if ((task_.active >> row & 1) != 0) {
        const auto* a = reinterpret_cast<const uint32_t*>(g.a_split + row * D);
        const int word = c * kWords + w;
        // Level 0: code pairs 16 u_even + u_odd times even channels, less what u_odd adds to that; u_odd times odd
        // ones.
        scan = low_plane ? uint2{0, a[D / 8 + word]} : uint2{a[word], __vneg4(a[word])};
      }
      auto* const pairs = reinterpret_cast<uint32_t*>(&s_.scan[t][w / 2][lane]);  // whole words' two, odd ones' two
      pairs[w % 2] = scan.x;
      pairs[2 + w % 2] = scan.y;
    }
    clear_accumulators();
    __syncthreads();
  }

  /// Sends for the tile after that of s_.place and for what else is known of it.
  __device__ void send(int tile, int tile_end) {
    Place& place = w_.place;
    const uint8_t* const page = p_.cache.pages + place.next_page * p_.cache.page_stride;
    const int slot = place.next_slot, page_size = static_cast<int>(layout_.page_size);
    int next_slot = slot + kChunkTiles * kTile, next_index = place.next_index;
    while (next_slot >= page_size) {
      next_slot -= page_size;
      ++next_index;
    }
    __syncwarp();  // every lane has what stood there
    if (lane_ == 0) {
      place.page = page;
      place.tile = tile;
      place.slot = slot;
      place.next_slot = next_slot;
      place.next_index = next_index;
      const uint32_t barrier = ptx::shared_address(&w_.barrier);
      ptx::expect_bytes(barrier, kTile * kHalf);
      ptx::bulk_copy(ptx::shared_address(w_.k_h), page + (s_.offsets.k_h + slot * kHalf), kTile * kHalf, barrier);
    }
    if (lane_ < 16) {
      const int from = (lane_ < 8 ? s_.offsets.k_scale : s_.offsets.v_scale) + 2 * slot + 16 * (lane_ % 8);
      ptx::copy_16(ptx::shared_address(lane_ < 8 ? w_.k_scale : w_.v_scale) + 16 * (lane_ % 8), page + from);
    } else if (lane_ < 19) {  // the next page, the block's scales
      const bool bound = lane_ == 17;
      const int pair = (bound ? s_.offsets.bound : s_.offsets.mean_scale) + 2 * (slot / kTile);
      const void* const from = lane_ == 16 ? static_cast<const void*>(page_entry(next_index)) : page + (pair & ~3);
      const void* const to = lane_ == 16 ? static_cast<void*>(&place.next_page)
                             : bound     ? &place.bound
                                         : &place.mean_scale;
      const bool exists =
          lane_ == 16 ? tile + kChunkTiles < tile_end : task_.visible.settled(tile) && (bound || layout_.tail);
      if (exists) ptx::copy_4(ptx::shared_address(to), from);
    }
    __syncwarp();
  }

  /// The block's own of a Place's two.
  __device__ uint16_t of_block(unsigned pair) const {
    const int offset = s_.offsets.bound + 2 * (w_.place.slot / kTile);
    return static_cast<uint16_t>(pair >> 8 * (offset & 2));
  }

  /// Everything about one tile up to the fetch of its values.
  __device__ void score(bool mine, unsigned parity) {
    if (!mine) {
      __syncthreads();  // as below
      if (lane_ == 0) w_.slots = w_.low = w_.live = w_.rounds = w_.coded = 0;
      return;
    }
    float x[8][Quads];
    ptx::wait_copies();
    __syncwarp();
    ptx::wait_barrier(ptx::shared_address(&w_.barrier), parity);
    unsigned wanted = scan(x);
    __syncthreads();  // the values of the chunk before are done with what the rest overwrites
    store_x(x);
    const int tile = w_.place.tile;
    wanted = layout_.k_bits >= 8
                 ? (any_row(wanted) | keys_of(task_.visible, tile, g_).forced) & keys_of(task_.visible, tile, g_).seen
                 : 0;
    const Slots level_1 = number(__popc(wanted), lane_);
    if (level_1.total > 0) {
      read_deeper(wanted, level_1);
      load_x(x);
    }
    weigh(x, keys_of(task_.visible, tile, g_), task_.visible.settled(tile));
    gather_values(w_.place, 0);
  }

  /// Level 0. Returns which of the lane's keys ask for K's l.
  __device__ unsigned scan(float (&x)[8][Quads]) {
    const uint4 packed = *reinterpret_cast<const uint4*>(&w_.k_scale[8 * g_]);
    const uint32_t scales[4] = {packed.x, packed.y, packed.z, packed.w};
    unsigned quiet = 0;  // sign bits of x above the gate
#pragma unroll
    for (int sub = 3; sub >= 0; --sub) {
      __syncwarp();  // nothing moves across: all at once would take too many registers
      uint32_t low_key[kWords], high_key[kWords];
      load_words(low_key, w_.k_h + (16 * sub + g_) * kHalf + c_ * (D / 8));
      load_words(high_key, w_.k_h + (16 * sub + 8 + g_) * kHalf + c_ * (D / 8));
      float most[2] = {-INFINITY, -INFINITY};  // a NaN does not ask
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        const typename Shared::Row& row = s_.row[4 * t + c_];
        int dot[4] = {row.first_sum, 0, row.first_sum, 0};
#pragma unroll
        for (int w = 0; w < kWords; w += 2) {
          const uint4 q = s_.scan[t][w / 2][lane_];
          ptx::mma_u8s8(dot, low_key[w], high_key[w], low_key[w + 1], high_key[w + 1], q.x, q.y);
          constexpr uint32_t kOdd = 0x0F0F0F0Fu;
          ptx::mma_u8s8(dot, low_key[w] & kOdd, high_key[w] & kOdd, low_key[w + 1] & kOdd, high_key[w + 1] & kOdd, q.z,
                        q.w);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = 2 * sub + half;
          const float e_k = __uint_as_float(half == 0 ? scales[sub] << 16 : scales[sub] & 0xFFFF0000u);
          // 16 sum (u - 7.5) qa, exact in a mantissa; then D0.
          const float centred = numerics::sub(__int_as_float(dot[2 * half] + 16 * dot[2 * half + 1]), kRoundMagicFloat);
          const float d0 = numerics::fma(centred, 2.0f, -row.sum_a);
          x[i][t] = numerics::fma(numerics::mul(d0, row.unit_0), e_k, row.neg_z);
          const float above = numerics::add(numerics::fma(row.margin, e_k, x[i][t]), row.k_l);
          most[half] = fmaxf(most[half], above);
        }
      }
      quiet = __funnelshift_l(__float_as_uint(most[1]), quiet, 1);
      quiet = __funnelshift_l(__float_as_uint(most[0]), quiet, 1);
    }
    return ~quiet;
  }

  __device__ void store_x(const float (&x)[8][Quads]) {
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      auto* to = reinterpret_cast<float4*>(&w_.x[4 * t + c_][8 * g_]);
      to[0] = {x[0][t], x[1][t], x[2][t], x[3][t]};
      to[1] = {x[4][t], x[5][t], x[6][t], x[7][t]};
    }
    __syncwarp();
  }
  __device__ void load_x(float (&x)[8][Quads]) {
    __syncwarp();
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const auto* from = reinterpret_cast<const float4*>(&w_.x[4 * t + c_][8 * g_]);
      const float4 a = from[0], b = from[1];
      const float all[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i][t] = all[i];
    }
  }

  /// Lists the keys of `bits` that lanes hold: lane 4 g + c writes bits 2 c and 2 c + 1.
  template <typename T, class F>
  __device__ void list(T* to, unsigned bits, int before, F entry) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int i = 2 * c_ + j;
      if ((bits >> i & 1) != 0) to[before + __popc(bits & ((1u << i) - 1))] = entry(i);
    }
  }
  __device__ uint8_t* keys() const { return reinterpret_cast<uint8_t*>(w_.keys); }
  __device__ uint8_t* low_keys() const { return keys() + kTile; }

  /// The query plane of the lane's column in the deeper levels' products: row 4 t + g / 2, by g's parity. (Of a row
  /// that does not exist another's: it counts nowhere.)
  __device__ const uint8_t* query(const int8_t* high, const int8_t* low, int t) const {
    return reinterpret_cast<const uint8_t*>((g_ % 2 == 0 ? high : low) + min(4 * t + g_ / 2, task_.rows - 1) * D);
  }

  __device__ float key_scale(int key) const { return numerics::from_bf16(w_.k_scale[numerics::scale_slot(key)]); }

  /// Levels 1 and 2 of the keys `wanted`.
  __device__ void read_deeper(unsigned wanted, const Slots& slots) {
    const uint8_t* const keys = this->keys();
    list(this->keys(), wanted, slots.before, [&](int i) { return static_cast<uint8_t>(g_ + 8 * i); });
    __syncwarp();
    uint8_t* const rows = s_.rows[warp_];
    const uint32_t to = ptx::shared_address(rows);
    const uint8_t* const k_l = at(w_.place, s_.offsets.k_l, kHalf);
    constexpr int kAtOnce = 32 / kPieces;
#pragma unroll 1
    for (int slot = lane_ / kPieces; slot < slots.total; slot += kAtOnce) {
      const int piece = lane_ % kPieces;
      ptx::copy_16(to + slot * kHalf + 16 * piece, k_l + keys[slot] * kHalf + 16 * piece);
    }
    ptx::wait_copies();
    __syncwarp();
    int further = 0;
#pragma unroll 1
    for (int first = 0; first < slots.total; first += 16) further = level_1(rows, first, slots.total, further);
    __syncwarp();
    if (further > 0) level_2(further);
    if (lane_ == 0) w_.bytes += slots.total * kHalf + further * D;
  }

  /// Sixteen keys of the list from `first` on. Adds those that ask for K's b to their list; returns its length.
  __device__ int level_1(const uint8_t* rows, int first, int total, int further) {
    const int slot[2] = {first + g_, first + 8 + g_};
    int key[2];
    uint32_t h[2][kWords], l[2][kWords];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      key[j] = slot[j] < total ? keys()[slot[j]] : 0;
      load_words(h[j], w_.k_h + key[j] * kHalf + c_ * (D / 8));
      load_words(l[j], rows + slot[j] * kHalf + c_ * (D / 8));
    }
    const float e_k[2] = {key_scale(key[0]), key_scale(key[1])};
    int d1[2][Quads];
    float x[2][Quads];
    unsigned asks = 0;
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const typename Shared::Row& row = s_.row[4 * t + c_];
      const uint8_t* const q = query(task_.g.a_split, task_.g.b_split, t) + c_ * 4 * kWords;
      uint32_t even[kWords], odd[kWords];
      load_words(even, q);
      load_words(odd, q + D / 2);
      int dot[4] = {0, 0, 0, 0};
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        ptx::mma_u8s8(dot, ptx::join_nibbles(h[0][w], l[0][w] >> 4), ptx::join_nibbles(h[1][w], l[1][w] >> 4),
                      ptx::join_nibbles(h[0][w] << 4, l[0][w]), ptx::join_nibbles(h[1][w] << 4, l[1][w]), even[w],
                      odd[w]);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        d1[j][t] = 256 * dot[2 * j] + dot[2 * j + 1] - row.sum_128;
        x[j][t] = numerics::fma(logit(d1[j][t], row.unit_1), e_k[j], row.neg_z);
        asks |= static_cast<unsigned>(numerics::fma(row.margin_16, e_k[j], x[j][t]) >= -row.k_b) << j;
      }
    }
    asks = layout_.k_bits == 16 ? any_row(asks) : 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool listed = slot[j] < total, deeper = listed && (asks >> j & 1) != 0;
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        if (!listed) continue;
        w_.x[4 * t + c_][numerics::scale_slot(key[j])] = deeper ? __int_as_float(d1[j][t]) : x[j][t];
      }
      const unsigned who = __ballot_sync(kWarp, deeper && c_ == 0);
      if (deeper && c_ == 0) {
        low_keys()[further + __popc(who & ((1u << lane_) - 1))] = static_cast<uint8_t>(key[j]);
      }
      further += __popc(who);
    }
    return further;
  }

  /// The keys in low_keys.
  __device__ void level_2(int total) {
#pragma unroll 1
    for (int first = 0; first < total; first += kSlots) {
      __syncwarp();  // what stood there has been read
      level_2(low_keys() + first, min(total - first, kSlots));
    }
  }
  __device__ void level_2(const uint8_t* keys, int total) {
    uint8_t* const rows = s_.rows[warp_];
    const uint32_t to = ptx::shared_address(rows);
    const uint8_t* const k_b = at(w_.place, s_.offsets.k_b, D);
#pragma unroll 1
    for (int slot = lane_ / kLowChunks; slot < total; slot += 32 / kLowChunks) {
      const int piece = lane_ % kLowChunks;
      ptx::copy_16(to + swizzled<D>(slot, piece), k_b + keys[slot] * D + 16 * piece);
    }
    ptx::wait_copies();
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < total; first += 16) {
      const int slot[2] = {first + g_, first + 8 + g_};
      int key[2];
      uint32_t b[2][2 * kWords];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        key[j] = slot[j] < total ? keys[slot[j]] : 0;
#pragma unroll
        for (int i = 0; i < kWords / 2; ++i) {
          const uint4 v = *reinterpret_cast<const uint4*>(rows + swizzled<D>(slot[j], c_ * (kWords / 2) + i));
          b[j][4 * i] = v.x, b[j][4 * i + 1] = v.y, b[j][4 * i + 2] = v.z, b[j][4 * i + 3] = v.w;
        }
      }
      const float e_k[2] = {key_scale(key[0]), key_scale(key[1])};
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        const typename Shared::Row& row = s_.row[4 * t + c_];
        int dot[4] = {0, 0, 0, 0};
        const uint8_t* const q = query(task_.g.a, task_.g.b, t) + c_ * 8 * kWords;
        uint32_t words[2][kWords];
        load_words(words[0], q);
        load_words(words[1], q + 4 * kWords);
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          const uint32_t(&of)[kWords] = words[2 * w / kWords];
          ptx::mma_s8s8(dot, b[0][2 * w], b[1][2 * w], b[0][2 * w + 1], b[1][2 * w + 1], of[2 * w % kWords],
                        of[2 * w % kWords + 1]);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (slot[j] >= total) continue;
          float& x = w_.x[4 * t + c_][numerics::scale_slot(key[j])];
          const float f = logit_2(__float_as_int(x), 256 * dot[2 * j] + dot[2 * j + 1], row.e_q);
          x = numerics::fma(f, e_k[j], row.neg_z);
        }
      }
    }
  }

  /// Which V planes are read, and every weight of the tile.
  __device__ void weigh(const float (&x)[8][Quads], const TileKeys& keys, bool settled) {
    const unsigned seen = keys.seen, forced = keys.forced;
    const float deeper = settled ? numerics::outlier_depth(of_block(w_.place.bound), task_.typical) : 0.0f;
    unsigned quiet_h = 0, quiet_l = 0, quiet_b = 0;  // sign bits of x above the gate
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      float h, l, b;
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        const typename Shared::Row& row = s_.row[4 * t + c_];
        const float above_h = numerics::add(x[i][t], numerics::add(row.v_h, deeper));
        const float above_l = numerics::add(x[i][t], numerics::add(row.v_l, deeper));
        const float above_b = numerics::add(x[i][t], numerics::add(row.v_b, deeper));
        h = t == 0 ? above_h : fmaxf(h, above_h);
        l = t == 0 ? above_l : fmaxf(l, above_l);
        b = t == 0 ? above_b : fmaxf(b, above_b);
      }
      quiet_h = __funnelshift_l(__float_as_uint(h), quiet_h, 1);
      quiet_l = __funnelshift_l(__float_as_uint(l), quiet_l, 1);
      quiet_b = __funnelshift_l(__float_as_uint(b), quiet_b, 1);
    }
    const unsigned asks = any_row(~(quiet_h | quiet_l << 8 | quiet_b << 16));
    const unsigned read = (asks | forced) & seen;
    const unsigned read_l = layout_.v_bits >= 8 ? (asks >> 8 | forced) & read : 0;
    const unsigned read_b = layout_.v_bits == 16 ? asks >> 16 & read_l : 0;
    // Slots: keys whose b is read before the rest.
    const Slots slots =
        number(__popc(read_b) | __popc(read & ~read_b) << 8 | __popc(read_l) << 16 | __popc(seen) << 24, lane_);
    const int low = slots.total & 0xFF, live = low + (slots.total >> 8 & 0xFF), l_keys = slots.total >> 16 & 0xFF;
    const auto entry = [&](int i) { return static_cast<uint16_t>((g_ + 8 * i) | (read_l >> i & 1) << 8); };
    list(w_.keys, read_b, slots.before & 0xFF, entry);
    list(w_.keys, read & ~read_b, low + (slots.before >> 8 & 0xFF), entry);
    __syncwarp();
    const bool gone = __any_sync(kWarp, read != seen);
    unsigned mean_weight[Quads] = {}, coded = 0;
    if (gone) {
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        float of_row[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) of_row[i] = x[i][t];
        coded |= s_.loud != 0 ? weigh_dropped<uint64_t>(of_row, t, seen & ~read, mean_weight[t])
                              : weigh_dropped<unsigned>(of_row, t, seen & ~read, mean_weight[t]);
      }
    }
    const bool mean = gone && layout_.tail;
    weigh_values(live, mean, mean_weight);
    if (lane_ != 0) return;
    const int filled = live + mean;
    w_.live = live;
    w_.slots = filled;
    w_.low = low;
    w_.rounds = max((filled + kSlots - 1) / kSlots, (low + kLowSlots - 1) / kLowSlots);
    w_.coded = static_cast<int>(coded);
    w_.values += live;
    w_.bytes += (slots.total >> 24) * (kHalf + 2) + live * (kHalf + 2) + l_keys * kHalf + low * D + (settled ? 2 : 0) +
                (mean ? D + 2 + (task_.fit_mark > 0 ? D : 0) : 0);
  }

  /// The sums and codes of query row 4 t + c's `dropped` keys (bit i: key g + 8 i), and the weight of the block's mean
  /// row. Sum: holds a tile's. Returns whether any key of any row has a code.
  template <typename Sum>
  __device__ bool weigh_dropped(const float (&x)[8], int t, unsigned dropped, unsigned& mean_weight) {
    const typename Shared::Row& row = s_.row[4 * t + c_];
    const unsigned half = (1u << row.fit_shift) >> 1;
    unsigned codes[2] = {0, 0};
    Sum sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned rounded =
          numerics::round_u32(scaled_exp2<numerics::kFraction>(fminf(x[i], numerics::kExp2Max), numerics::kExp2Min));
      const unsigned d = (dropped >> i & 1) != 0 ? rounded : 0;
      sum += d;
      const unsigned shifted = ((sizeof(Sum) == 8 ? min(d, 0xFF000000u) : d) + half) >> row.fit_shift;
      codes[i / 4] += min(255u, shifted) << (8 * (i % 4));
    }
    const Sum block_mass = sum_over_keys(sum);
    if (g_ == 0) w_.dropped[4 * t + c_] += block_mass;
    if (!layout_.tail) return false;
    if (const uint16_t mean_scale = of_block(w_.place.mean_scale); mean_scale != numerics::kBf16Nan) {
      const double share = numerics::ldexp_exact(static_cast<double>(numerics::from_bf16(mean_scale)), -row.e_exponent);
      mean_weight = static_cast<unsigned>(fmin(rint(__dmul_rn(static_cast<double>(block_mass), share)), 4294967295.0));
    }
    if (task_.fit_mark == 0) return false;
    auto* const to = reinterpret_cast<uint32_t*>(w_.code[4 * t + c_]) + 4 * (g_ / 4) + g_ % 4;
    to[0] = codes[0];
    to[8] = codes[1];
    const unsigned sum_codes = sum_over_keys(__dp4a(codes[0], 0x01010101u, __dp4a(codes[1], 0x01010101u, 0u)));
    if (g_ == 0) w_.codes[4 * t + c_] = static_cast<int>(sum_codes);
    return __any_sync(kWarp, sum_codes != 0);
  }

  /// The weights in the value products, by slot, for query rows c, c + 4: of keys, then of the mean row if there is
  /// one. Slots without a row weigh nothing.
  __device__ void weigh_values(int live, bool mean, const unsigned (&mean_weight)[Quads]) {
    const int filled = live + mean;
    int base = 0;
#pragma unroll 1
    for (; base < filled; base += 16) {  // slots base + g and 8 more
      bool read[2], only_h[2];
      float x[2][Quads], e_v[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int slot = base + g_ + 8 * j;
        read[j] = slot < live;
        const unsigned entry = read[j] ? w_.keys[slot] : 0;
        only_h[j] = read[j] && (entry >> 8 & 1) == 0;
        const int at = numerics::scale_slot(static_cast<int>(entry & 0xFF));
        e_v[j] = numerics::from_bf16(w_.v_scale[at]);
#pragma unroll
        for (int t = 0; t < Quads; ++t) x[j][t] = w_.x[4 * t + c_][at];
      }
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        const float per_e = s_.row[4 * t + c_].per_e;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int slot = base + g_ + 8 * j;
          const float scaled = scaled_exp2<numerics::kFraction>(fminf(x[j][t], numerics::kExp2Max), numerics::kExp2Min);
          const unsigned weight = numerics::round_u32(numerics::mul(scaled, numerics::mul(e_v[j], per_e)));
          const unsigned w = read[j] ? weight : slot == live ? mean_weight[t] : 0;
          w_.weight[4 * t + c_][slot] = w;
          den_[t] += read[j] ? numerics::round_u32(scaled) : 0;
          value_mass_[t] += w;
          half_mass_[t] += only_h[j] ? w : 0;
          peak_[t] = read[j] ? fmaxf(peak_[t], x[j][t]) : peak_[t];
        }
      }
    }
    if (base % kSlots == 0) return;
#pragma unroll
    for (int r = lane_ / 16; r < kRows; r += 2) w_.weight[r][base + lane_ % 16] = 0;
  }

  static constexpr int kPieces = kHalf / 16;  // 16-byte pieces of a plane h or l row

  /// Sends for the V rows of the warp's slots of a round, in the first one also for what stands in for dropped keys.
  __device__ void gather_values(const Place& place, int round) {
    __syncwarp();  // the tile's list and counts
    if (round == 0 && w_.slots > w_.live && lane_ < (w_.coded ? 2 : 1) * kLowChunks) {
      const uint8_t* const from =
          at(place, 0, 0) + place.slot / kTile * D + (lane_ < kLowChunks ? s_.offsets.mean : s_.offsets.ubar - D);
      ptx::copy_16(ptx::shared_address(mean_row(warp_)) + 16 * lane_, from + 16 * lane_);
    }
    const int first = kSlots * round, first_low = kLowSlots * round;
    const int total = min(w_.live - first, kSlots), low = w_.low - first_low;
    const uint8_t* const v_h = at(place, s_.offsets.v_h, kHalf);
    const uint8_t* const v_l = at(place, s_.offsets.v_l, kHalf);
    uint8_t* const rows = s_.rows[warp_];
    const uint32_t to = ptx::shared_address(rows);
    const uint16_t* keys = w_.keys + first;
#pragma unroll 1
    for (int slot = lane_ / kPieces; slot < total; slot += 32 / kPieces) {
      const int piece = lane_ % kPieces, key = keys[slot] & 0xFF;
      ptx::copy_16(to + place_of_row<D>(slot, piece), v_h + key * kHalf + 16 * piece);
      const int l_at = place_of_row<D>(slot, kPieces + piece);
      if ((keys[slot] >> 8 & 1) != 0) {
        ptx::copy_16(to + l_at, v_l + key * kHalf + 16 * piece);
      } else {  // 16 h + 7.5 is half above the value whose low nibble is 7
        *reinterpret_cast<uint4*>(rows + l_at) = {0x77777777u, 0x77777777u, 0x77777777u, 0x77777777u};
      }
    }
    if (low <= 0) return;
    const uint8_t* const v_b = at(place, s_.offsets.v_b, D);
    keys = w_.keys + first_low;
#pragma unroll 1
    for (int slot = lane_ / kLowChunks; slot < kLowSlots; slot += 32 / kLowChunks) {
      const int piece = lane_ % kLowChunks, key = slot < low ? keys[slot] & 0xFF : 0;
      ptx::copy_16_or_zero(to + kSlots * D + place_of_row<D>(slot, piece), v_b + key * D + 16 * piece, slot < low);
    }
  }

  /// A tile's mean row, (D,), and behind it the block's mean codes, (D,).
  __device__ const uint8_t* mean_row(int tile) const { return reinterpret_cast<const uint8_t*>(s_.warp[tile].x); }
  static_assert(sizeof(Warp::x) >= 2 * D);

  /// Brings the mean row, once it has arrived, into its slot if that is of this round.
  __device__ void store_mean(int round) {
    __syncwarp();
    const int slot = w_.live - kSlots * round;
    if (w_.slots == w_.live || slot < 0 || slot >= kSlots || lane_ >= D / 4) return;
    const uint32_t bytes = reinterpret_cast<const uint32_t*>(mean_row(warp_))[lane_] ^ 0x80808080u;
    const uint32_t even = __byte_perm(bytes, 0, 0x4420), odd = __byte_perm(bytes, 0, 0x4431);
    const auto store = [&](int first_piece, uint32_t nibbles) {
      const int at = place_of_row<D>(slot, first_piece + lane_ / 8) + 2 * (lane_ % 8);
      *reinterpret_cast<uint16_t*>(s_.rows[warp_] + at) = static_cast<uint16_t>(nibbles);
    };
    store(0, ptx::join_nibbles(even, odd >> 4));
    store(kPieces, ptx::join_nibbles(even << 4, odd));
  }

  /// The warp's 16-byte piece of a row of nibbles, and for D = 64 which byte of each pair is its.
  __device__ int nibble_piece() const { return D == 128 ? warp_ : warp_ / 2; }

  /// The V rows of a round, every tile's.
  __device__ void add_values(int round) {
    const int first = kSlots * round;
    const int slot = named_row(lane_);
    const int h_at = place_of_row<D>(slot, nibble_piece()), l_at = place_of_row<D>(slot, nibble_piece() + kHalf / 16);
    const unsigned pick = g_ % 2 == 0 ? 0x6240 : 0x7351;
#pragma unroll 1
    for (int from = 0; from < kChunkTiles; ++from) {
      if (s_.warp[from].slots > first) add_nibbles(from, first, h_at, l_at, pick);
      if (s_.warp[from].low > kLowSlots * round) add_low(from, kLowSlots * round, pick);
    }
  }

  /// Byte columns of the weights of the slots from 4 c on: (row g / 2, byte 2 n + g % 2).
  __device__ void load_weights(uint32_t (&columns)[2], int from, int t, int slot, unsigned pick) const {
    const uint4 w = *reinterpret_cast<const uint4*>(&s_.warp[from].weight[4 * t + g_ / 2][slot + 4 * c_]);
    const uint32_t low = __byte_perm(w.x, w.y, pick), high = __byte_perm(w.z, w.w, pick);
    columns[0] = __byte_perm(low, high, 0x5410);
    columns[1] = __byte_perm(low, high, 0x7632);
  }

  __device__ void add_nibbles(int from, int first, int h_at, int l_at, unsigned pick) {
    uint32_t weight[Quads][2][2];  // by half of the slots
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) load_weights(weight[t][half], from, t, first + 16 * half, pick);
    }
    const uint32_t rows = ptx::shared_address(s_.rows[from]);
    uint32_t h[2][2], l[2][2];  // by byte of the pair
    load_pairs(rows + h_at, h[0], h[1]);
    load_pairs(rows + l_at, l[0], l[1]);
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
      const int byte = D == 128 ? m : warp_ % 2;
      const uint32_t h0 = byte == 0 ? h[0][0] : h[1][0], h1 = byte == 0 ? h[0][1] : h[1][1];
      const uint32_t l0 = byte == 0 ? l[0][0] : l[1][0], l1 = byte == 0 ? l[0][1] : l[1][1];
      const uint32_t a0 = ptx::join_nibbles(h0, l0 >> 4), a1 = ptx::join_nibbles(h0 << 4, l0);
      const uint32_t a2 = ptx::join_nibbles(h1, l1 >> 4), a3 = ptx::join_nibbles(h1 << 4, l1);
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          ptx::mma_u8u8(value_[m][t][n], a0, a1, a2, a3, weight[t][0][n], weight[t][1][n]);
        }
      }
    }
  }

  /// Sixteen slots' plane b, from slot `first` on.
  __device__ void add_low(int from, int first, unsigned pick) {
    const int matrix = lane_ / 8, row = lane_ % 8;
    const int slot = 4 * (row / 2) + 2 * (matrix % 2) + row % 2, piece = warp_ * kTilesM + min(matrix / 2, kTilesM - 1);
    uint32_t pairs[4];
    ptx::load_transposed(pairs, ptx::shared_address(s_.rows[from]) + kSlots * D + place_of_row<D>(slot, piece));
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      uint32_t weight[2];
      load_weights(weight, from, t, first, pick);
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        const uint32_t even = __byte_perm(pairs[2 * m], pairs[2 * m + 1], 0x6420);
        const uint32_t odd = __byte_perm(pairs[2 * m], pairs[2 * m + 1], 0x7531);
#pragma unroll
        for (int n = 0; n < 2; ++n) ptx::mma_s8u8_k16(low_value_[m][t][n], even, odd, weight[n]);
      }
    }
  }

  /// sum C_b ubar_b of the tiles' blocks.
  __device__ void add_mean_codes() {
    const int channel = threadIdx.x % D, part = threadIdx.x / D;
#pragma unroll
    for (int i = 0; i < kChunkTiles / kParts; ++i) {
      const int from = i * kParts + part;
      const Warp& tile = s_.warp[from];
      if (!tile.coded) continue;
      const int ubar = mean_row(from)[D + channel];
#pragma unroll
      for (int t = 0; t < Quads; ++t) {
        const int4 codes = *reinterpret_cast<const int4*>(&tile.codes[4 * t]);
        s_.ubar[4 * t][threadIdx.x] += codes.x * ubar;
        s_.ubar[4 * t + 1][threadIdx.x] += codes.y * ubar;
        s_.ubar[4 * t + 2][threadIdx.x] += codes.z * ubar;
        s_.ubar[4 * t + 3][threadIdx.x] += codes.w * ubar;
      }
    }
  }

  /// sum c_j u_j of the tiles' dropped keys: byte columns 2 g, 2 g + 1 of the warp's piece as rows, query rows as
  /// columns.
  __device__ void add_codes() {
    const int matrix = lane_ / 8, row = lane_ % 8;
    // Key g + 8 i has its code at 32 (i / 4) + 4 g + i % 4, which the load has to match.
    const int key = 4 * (matrix / 2) + row / 2 + 8 * (2 * (matrix % 2) + row % 2);
    uint32_t rows = ptx::shared_address(s_.warp[0].k_h) + key * kHalf + 16 * nibble_piece();
    const auto* code =
        reinterpret_cast<const uint32_t*>(s_.warp[0].code[g_ % kRows]) + c_;  // columns beyond count nowhere
#pragma unroll 1
    for (int from = 0; from < kChunkTiles; ++from, rows += sizeof(Warp), code += sizeof(Warp) / 4) {
      if (!s_.warp[from].coded) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (D == 64 && half != warp_ % 2) continue;
        uint32_t even[2], odd[2];
        load_pairs(rows + 32 * half * kHalf, even, odd);
        const uint32_t b0 = code[8 * half], b1 = code[8 * half + 4];
        constexpr uint32_t kOdd = 0x0F0F0F0Fu;
        ptx::mma_u8u8(code_pair_, even[0], odd[0], even[1], odd[1], b0, b1);
        ptx::mma_u8u8(code_odd_, even[0] & kOdd, odd[0] & kOdd, even[1] & kOdd, odd[1] & kOdd, b0, b1);
      }
    }
  }

  __device__ void clear_accumulators() {
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      den_[t] = value_mass_[t] = half_mass_[t] = 0;
      peak_[t] = -INFINITY;
#pragma unroll
      for (int i = 0; i < kTilesM * 2 * 4; ++i) {
        value_[i / 8][t][i / 4 % 2][i % 4] = 0;
        low_value_[i / 8][t][i / 4 % 2][i % 4] = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) code_pair_[i] = code_odd_[i] = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) s_.ubar[r][threadIdx.x] = 0;
    if (lane_ == 0) w_.values = w_.bytes = 0;
    if (lane_ < kRows) w_.dropped[lane_] = 0;
  }

  /// Adds everything the threads hold to the group's sums, by way of shared memory.
  __device__ void flush() {
    // (rows, D): a numerator without its factor 2^8, and S of section 7. Over the gathered rows.
    auto* const num = reinterpret_cast<unsigned long long*>(s_.rows);
    static_assert(sizeof(s_.rows) >= 2 * kRows * D * sizeof(unsigned long long));
    unsigned long long* const code_sum = num + kRows * D;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * kRows * D; i += kNarrowThreads) num[i] = 0;
    __syncthreads();
    const auto add = [](unsigned long long* to, long long value) {
      atomicAdd(to, static_cast<unsigned long long>(value));
    };
#pragma unroll
    for (int t = 0; t < Quads; ++t) {
      const int r = 4 * t + c_;
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        const int byte = D == 128 ? m : warp_ % 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int(&high)[2][4] = value_[m][t];
          const int(&low)[2][4] = low_value_[m][t];
          const auto joined = [&](const int(&sum)[2][4]) {
            const long long pair[2] = {sum[0][2 * half] + 256ll * sum[0][2 * half + 1],
                                       sum[1][2 * half] + 256ll * sum[1][2 * half + 1]};
            return pair[0] + 65536 * pair[1];
          };
          add(&num[r * D + 32 * nibble_piece() + 4 * g_ + 2 * byte + half], 256 * joined(high));
          add(&num[r * D + 16 * (warp_ * kTilesM + m) + 2 * g_ + half], joined(low));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // byte columns g and g + 8 of the pairs, query rows 2 c and 2 c + 1
      const int r = 2 * c_ + i % 2, byte = 16 * nibble_piece() + 2 * g_ + i / 2;
      if (r >= kRows) continue;
      add(&code_sum[r * D + 2 * byte], static_cast<long long>(code_pair_[i]) - code_odd_[i]);
      add(&code_sum[r * D + 2 * byte + 1], 16ll * code_odd_[i]);
    }
    const int channel = threadIdx.x % D;
#pragma unroll
    for (int r = 0; r < kRows; ++r) add(&code_sum[r * D + channel], -static_cast<long long>(s_.ubar[r][threadIdx.x]));
#pragma unroll
    for (int t = 0; t < Quads; ++t) flush_row(t);
    __syncwarp();
    if (lane_ < kRows) {
      atomicAdd(&s_.dropped[lane_], w_.dropped[lane_]);
      atomicAdd(&s_.den[lane_], w_.dropped[lane_]);
    }
    if (lane_ == 0) {
      atomicAdd(&s_.values, static_cast<unsigned long long>(w_.values));
      atomicAdd(&s_.bytes, static_cast<unsigned long long>(w_.bytes));
    }
    __syncthreads();
    add_to_group(num, code_sum);
    clear_accumulators();
  }

  __device__ void flush_row(int t) {
    const int r = 4 * t + c_;
    const uint64_t den = sum_over_keys(static_cast<uint64_t>(den_[t]));
    const uint64_t value_mass = sum_over_keys(static_cast<uint64_t>(value_mass_[t]));
    const uint64_t half_mass = sum_over_keys(static_cast<uint64_t>(half_mass_[t]));
    int peak = ordered(peak_[t]);
    for (int s = 4; s < 32; s *= 2) peak = max(peak, __shfl_xor_sync(kWarp, peak, s));
    if (g_ != 0) return;
    atomicAdd(&s_.den[r], static_cast<unsigned long long>(den));
    atomicAdd(&s_.value_mass[r], static_cast<unsigned long long>(value_mass));
    atomicAdd(&s_.mass[r], static_cast<unsigned long long>(value_mass));
    atomicAdd(&s_.half_mass[r], static_cast<unsigned long long>(half_mass));
    atomicMax(&s_.peak[r], peak);
  }

  /// num and code_sum, (rows, D) in shared memory, to the group's; what the value products left out is made up for:
  /// their bytes are 128 above the values, and those of plane h alone half below.
  __device__ void add_to_group(const unsigned long long* num, const unsigned long long* code_sum) {
    const GroupState& g = task_.g;
#pragma unroll 1
    for (int i = threadIdx.x; i < task_.rows * D; i += kNarrowThreads) {
      const int r = i / D;
      if ((task_.active >> r & 1) == 0) continue;
      const unsigned long long sum = num[i] - (s_.value_mass[r] << 15) + (s_.half_mass[r] << 7);
      if (sum != 0) ptx::add_global(&g.num[i], sum << 8);
    }
    if (task_.fit_mark > 0) {
      const plan::HeadPage page = page_of(step_, task_.batch, task_.kv_head, task_.fit_mark - 1);
      const int8_t* in = page.fit_in + plan::fit_slot(task_.fit_mark, layout_.page_size) * numerics::kRank * D;
      constexpr int kMine = numerics::kRank / kChunkTiles;  // directions of a warp
      int8_t direction[kMine][D / 32];
#pragma unroll
      for (int j = 0; j < kMine; ++j) {
#pragma unroll
        for (int i = 0; i < D / 32; ++i) direction[j][i] = in[(warp_ * kMine + j) * D + lane_ + 32 * i];
      }
#pragma unroll 1
      for (int r = 0; r < task_.rows; ++r) {
        long long t[kMine] = {};
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
          const long long sum = static_cast<long long>(code_sum[r * D + lane_ + 32 * i]);
#pragma unroll
          for (int j = 0; j < kMine; ++j) t[j] += direction[j][i] * sum;
        }
        long long mine = 0;  // lane j < kMine takes direction j's
#pragma unroll
        for (int j = 0; j < kMine; ++j) {
          const long long sum = warp_sum(t[j]);
          mine = lane_ == j ? sum : mine;
        }
        if (mine == 0) continue;
        ptx::add_global(&g.t[r * numerics::kRank + warp_ * kMine + lane_], static_cast<unsigned long long>(mine));
      }
    }
    __syncthreads();
    if (threadIdx.x < kRows) s_.value_mass[threadIdx.x] = s_.half_mass[threadIdx.x] = 0;
  }

  __device__ void publish() {
    if (const int r = static_cast<int>(threadIdx.x); r < task_.rows) {
      add_row_sums(task_, r, {s_.den[r], s_.mass[r], s_.dropped[r], s_.values, s_.peak[r]});
    }
    if (threadIdx.x == 0) ptx::add_global(&task_.g.head->bytes, s_.bytes);
    if (lane_ == 0) {
      ptx::invalidate_barrier(ptx::shared_address(&w_.barrier));
    }
    __syncthreads();
  }

  const Step& step_;
  const plan::DecodeParams& p_;
  const RangeTask& task_;
  Shared& s_;
  const CacheLayout& layout_;
  const int warp_;
  Warp& w_;
  const int lane_, g_, c_;  // lane 4 g + c

  int value_[kTilesM][Quads][2][4], low_value_[kTilesM][Quads][2][4];  // products by weight byte 2 n + column % 2
  int code_pair_[4], code_odd_[4];                                     // of 16 u_even + u_odd, and of u_odd
  unsigned long long den_[Quads], value_mass_[Quads], half_mass_[Quads];
  float peak_[Quads];
};

}  // namespace fold::cuda
