#pragma once
#include "cuda/decode/prepare.cuh"
#include "cuda/decode/range_task.cuh"

// The sums of a range of tiles for any group size, a tile at a time by a whole CTA (docs/numerics.md, sections 6 and
// 7).
namespace fold::cuda {

constexpr int kSumThreads = 256;
constexpr int kPartRows = 16;  ///< rows whose values one CTA sums; every CTA of a group forms all rows' logits

template <int D>
struct SumShared {
  unsigned long long num[kPartRows][D];  // without the factor 2^8
  long long code_sum[kPartRows][D];      // S of section 7
  unsigned long long den[kMaxRows], mass[kMaxRows], dropped[kMaxRows];
  int peak[kMaxRows];
  float x[kMaxRows][kTile];
  int d1[kMaxRows][kTile];
  uint32_t weight[kPartRows][kTile];
  uint8_t code[kPartRows][kTile];
  unsigned long long block_mass[kPartRows];  // D_b
  unsigned block_codes[kPartRows];           // C_b
  float key_scale[kTile], value_scale[kTile];
  unsigned wanted[5][2];  // key sets by plane: K's l and b, V's h, l, b
};

enum WantedPlane { kWantKl, kWantKb, kWantVh, kWantVl, kWantVb };

template <int D>
class RangeSummer {
 public:
  using Shared = SumShared<D>;

  __device__ RangeSummer(const Step& step, const RangeTask& task, Shared& shared)
      : step_(step), p_(step.params), task_(task), s_(shared), layout_(step.params.cache.layout) {}

  static constexpr bool kTail = true;
  static constexpr bool kStartsEarly = false;  ///< before the references are declared
  static constexpr bool kFillsWaves = false;   ///< more groups than fit at once are cut further for full waves
  static constexpr int kThreads = kSumThreads, kCtas = 1;

  __device__ void run() {
    const int tile_begin = task_.tiles.begin, tile_end = task_.tiles.end;
    const int part = task_.row_end - task_.row_begin;
    for (int i = threadIdx.x; i < part * D; i += kSumThreads) {
      s_.num[i / D][i % D] = 0;
      s_.code_sum[i / D][i % D] = 0;
    }
    for (int r = threadIdx.x; r < part; r += kSumThreads) {
      s_.den[r] = s_.mass[r] = s_.dropped[r] = 0;
      s_.peak[r] = ordered(-INFINITY);
    }
    unsigned long long bytes = 0, values = 0;
    for (int tile = tile_begin; tile < tile_end; ++tile) {
      const uint64_t visible = task_.visible.mask(tile);
      if (visible != 0) add_tile(tile, visible, bytes, values);
    }
    __syncthreads();
    publish(bytes, values);
  }

 private:
  static constexpr int kHalf = D / 2;

  __device__ bool active(int r) const { return (task_.active >> r & 1) != 0; }
  __device__ uint64_t wanted(int plane) const {
    return static_cast<uint64_t>(s_.wanted[plane][1]) << 32 | s_.wanted[plane][0];
  }

  /// Collects which keys of a row ask; a warp holds 32 consecutive keys.
  __device__ void ask(int plane, int key, bool wants) {
    const unsigned keys = __ballot_sync(kWarp, wants);
    if (threadIdx.x % 32 == 0 && keys != 0) atomicOr(&s_.wanted[plane][key / 32], keys);
  }

  /// f(row, key) for all rows, 32 consecutive keys a warp.
  template <class F>
  __device__ void for_scores(int row_begin, int row_end, F f) {
    for (int i = row_begin * kTile + threadIdx.x; i < row_end * kTile; i += kSumThreads) f(i / kTile, i % kTile);
  }

  __device__ void add_tile(int tile, uint64_t visible, unsigned long long& bytes, unsigned long long& values) {
    const uint64_t always = task_.visible.always(tile);
    const plan::HeadPage page = page_of(step_, task_.batch, task_.kv_head, tile * kTile);
    const int64_t slot = slot_of(step_, tile * kTile);
    const GroupState& g = task_.g;
    const auto seen = [&](int k) { return (visible >> k & 1) != 0; };

    __syncthreads();  // the tile before is done with what is shared
    if (threadIdx.x < 10) s_.wanted[threadIdx.x / 2][threadIdx.x % 2] = 0;
    if (threadIdx.x < kPartRows) s_.block_mass[threadIdx.x] = s_.block_codes[threadIdx.x] = 0;
    if (threadIdx.x < kTile) {
      const int at = static_cast<int>(slot) + numerics::scale_slot(threadIdx.x);
      s_.key_scale[threadIdx.x] = seen(threadIdx.x) ? numerics::from_bf16(page.k_scale[at]) : 0.0f;
      s_.value_scale[threadIdx.x] = seen(threadIdx.x) ? numerics::from_bf16(page.v_scale[at]) : 0.0f;
    }
    __syncthreads();

    for_scores(0, task_.rows, [&](int r, int k) {
      const RowState& row = g.rows[r];
      bool wants = false;
      if (active(r) && seen(k)) {
        const int dot = dot_h<D>(page.k_h + (slot + k) * kHalf, g.a_split + r * D, row.sum_a);
        const float x = numerics::fma(logit(dot, unit_of_level(row.e_q, 0)), s_.key_scale[k], -row.z);
        s_.x[r][k] = x;
        wants = numerics::fma(row.margin, s_.key_scale[k], x) >= -row.gates.k_l;
      }
      ask(kWantKl, k, wants);
    });
    __syncthreads();
    const uint64_t k_l = layout_.k_bits >= 8 ? (wanted(kWantKl) | always) & visible : 0;
    for_scores(0, task_.rows, [&](int r, int k) {
      const RowState& row = g.rows[r];
      bool wants = false;
      if (active(r) && (k_l >> k & 1) != 0) {
        const int dot = dot_hl<D>(page.k_h + (slot + k) * kHalf, page.k_l + (slot + k) * kHalf, g.a_split + r * D,
                                  g.b_split + r * D);
        const float x = numerics::fma(logit(dot, unit_of_level(row.e_q, 1)), s_.key_scale[k], -row.z);
        s_.d1[r][k] = dot;
        s_.x[r][k] = x;
        wants = numerics::fma(numerics::mul(row.margin, 0x1p-4f), s_.key_scale[k], x) >= -row.gates.k_b;
      }
      ask(kWantKb, k, wants);
    });
    __syncthreads();
    const uint64_t k_b = layout_.k_bits == 16 ? wanted(kWantKb) : 0;
    const float deeper =
        task_.visible.settled(tile) ? numerics::outlier_depth(page.bound[slot / kTile], task_.typical) : 0.0f;
    for_scores(0, task_.rows, [&](int r, int k) {
      const RowState& row = g.rows[r];
      const bool counts = active(r) && seen(k);
      if (active(r) && (k_b >> k & 1) != 0) {
        const int dot = dot_b<D>(page.k_b + (slot + k) * D, g.a + r * D, g.b + r * D);
        s_.x[r][k] = numerics::fma(logit_2(s_.d1[r][k], dot, row.e_q), s_.key_scale[k], -row.z);
      }
      const float x = counts ? s_.x[r][k] : numerics::quiet_nan();
      ask(kWantVh, k, x >= -numerics::add(row.gates.v_h, deeper));
      ask(kWantVl, k, x >= -numerics::add(row.gates.v_l, deeper));
      ask(kWantVb, k, x >= -numerics::add(row.gates.v_b, deeper));
    });
    __syncthreads();
    const uint64_t v_h = (wanted(kWantVh) | always) & visible;
    const uint64_t v_l = layout_.v_bits >= 8 ? (wanted(kWantVl) | always) & v_h : 0;
    const uint64_t v_b = layout_.v_bits == 16 ? wanted(kWantVb) & v_l : 0;
    for_scores(task_.row_begin, task_.row_end,
               [&](int r, int k) { weigh(r, k, active(r) && seen(k), (v_h >> k & 1) != 0); });
    __syncthreads();
    const bool gone = layout_.tail && v_h != visible;
    add_values(page, slot, v_h, v_l, v_b, gone ? visible & ~v_h : 0);

    values += __popcll(v_h);
    bytes += __popcll(visible) * (kHalf + 2) + __popcll(k_l) * kHalf + __popcll(k_b) * D + __popcll(v_h) * (kHalf + 2) +
             __popcll(v_l) * kHalf + __popcll(v_b) * D + (task_.visible.settled(tile) ? 2 : 0) +
             (gone ? D + 2 + (task_.fit_mark > 0 ? D : 0) : 0);
  }

  /// The weights of one key for one row.
  __device__ void weigh(int r, int k, bool counts, bool read) {
    const int part_row = r - task_.row_begin;
    const RowState& row = task_.g.rows[r];
    const float x = counts ? s_.x[r][k] : numerics::quiet_nan();
    const numerics::Exp2 e = numerics::exp2_parts(x);
    const uint32_t d = counts ? numerics::fix(e, 1.0f) : 0;
    const float share = numerics::mul(s_.value_scale[k], numerics::pow2(-row.e_exponent));
    const uint32_t w = counts && read ? numerics::fix(e, share) : 0;
    const uint32_t dropped = read ? 0 : d;
    const unsigned half = (1u << row.fit_shift) >> 1;
    const unsigned code = min(255u, static_cast<unsigned>((uint64_t{dropped} + half) >> row.fit_shift));
    s_.weight[part_row][k] = w;
    s_.code[part_row][k] = static_cast<uint8_t>(code);
    const int64_t den = warp_sum(d), mass = warp_sum(w), gone = warp_sum(dropped), codes = warp_sum(code);
    const int peak = __reduce_max_sync(kWarp, counts && read && x == x ? ordered(x) : ordered(-INFINITY));
    if (threadIdx.x % 32 != 0) return;
    atomicAdd(&s_.den[part_row], static_cast<unsigned long long>(den));
    atomicAdd(&s_.mass[part_row], static_cast<unsigned long long>(mass));
    atomicAdd(&s_.dropped[part_row], static_cast<unsigned long long>(gone));
    atomicAdd(&s_.block_mass[part_row], static_cast<unsigned long long>(gone));
    atomicAdd(&s_.block_codes[part_row], static_cast<unsigned>(codes));
    atomicMax(&s_.peak[part_row], peak);
  }

  /// The values read and, for the dropped keys `gone`, what stands in for theirs. A thread's channels are its own.
  __device__ void add_values(const plan::HeadPage& page, int64_t slot, uint64_t v_h, uint64_t v_l, uint64_t v_b,
                             uint64_t gone) {
    const int64_t block = slot / kTile;
    for (int i = threadIdx.x; i < (task_.row_end - task_.row_begin) * kHalf; i += kSumThreads) {
      const int r = i / kHalf, c = i % kHalf;
      if (!active(task_.row_begin + r)) continue;
      long long even = 0, odd = 0;
      for (uint64_t keys = v_h; keys != 0; keys &= keys - 1) {
        const int k = __ffsll(static_cast<long long>(keys)) - 1;
        const int64_t row = slot + k;
        const int h = page.v_h[row * kHalf + c];
        int value[2] = {4096 * ((h >> 4) - 8), 4096 * ((h & 15) - 8)};
        if ((v_l >> k & 1) != 0) {
          const int l = page.v_l[row * kHalf + c];
          value[0] += 256 * (l >> 4);
          value[1] += 256 * (l & 15);
        } else {
          value[0] += numerics::kHalfReading;
          value[1] += numerics::kHalfReading;
        }
        if ((v_b >> k & 1) != 0) {
          value[0] += page.v_b[row * D + 2 * c];
          value[1] += page.v_b[row * D + 2 * c + 1];
        }
        even += static_cast<long long>(s_.weight[r][k]) * value[0];
        odd += static_cast<long long>(s_.weight[r][k]) * value[1];
      }
      if (gone != 0) {
        const long long mean = mean_weight(page, block, r);
        if (c == 0) s_.mass[r] += static_cast<unsigned long long>(mean);
        even += 256 * mean * page.mean[block * D + 2 * c];
        odd += 256 * mean * page.mean[block * D + 2 * c + 1];
        if (task_.fit_mark > 0 && s_.block_codes[r] != 0) add_codes(page, slot, gone, r, c);
      }
      s_.num[r][2 * c] += static_cast<unsigned long long>(even);
      s_.num[r][2 * c + 1] += static_cast<unsigned long long>(odd);
    }
  }

  /// W_b.
  __device__ uint32_t mean_weight(const plan::HeadPage& page, int64_t block, int r) const {
    const uint16_t scale = page.mean_scale[block];
    if (scale == numerics::kBf16Nan) return 0;
    const double share = numerics::ldexp_exact(static_cast<double>(numerics::from_bf16(scale)),
                                               -task_.g.rows[task_.row_begin + r].e_exponent);
    return static_cast<uint32_t>(fmin(rint(__dmul_rn(static_cast<double>(s_.block_mass[r]), share)), 4294967295.0));
  }

  __device__ void add_codes(const plan::HeadPage& page, int64_t slot, uint64_t gone, int r, int c) {
    const int64_t block = slot / kTile;
    int even = 0, odd = 0;
    for (uint64_t keys = gone; keys != 0; keys &= keys - 1) {
      const int k = __ffsll(static_cast<long long>(keys)) - 1;
      const int h = page.k_h[(slot + k) * kHalf + c], code = s_.code[r][k];
      even += code * (h >> 4);
      odd += code * (h & 15);
    }
    const int codes = static_cast<int>(s_.block_codes[r]);
    s_.code_sum[r][2 * c] += 16 * even - codes * page.ubar[block * D + 2 * c];
    s_.code_sum[r][2 * c + 1] += 16 * odd - codes * page.ubar[block * D + 2 * c + 1];
  }

  /// Adds what the CTA summed to the group's sums.
  __device__ void publish(unsigned long long bytes, unsigned long long values) {
    const GroupState& g = task_.g;
    const int part = task_.row_end - task_.row_begin;
    for (int i = threadIdx.x; i < part * D; i += kSumThreads) {
      const unsigned long long num = s_.num[i / D][i % D] << 8;
      if (num != 0) ptx::add_global(&g.num[task_.row_begin * D + i], num);
    }
    if (task_.fit_mark > 0) {
      const plan::HeadPage page = page_of(step_, task_.batch, task_.kv_head, task_.fit_mark - 1);
      const int8_t* in = page.fit_in + plan::fit_slot(task_.fit_mark, layout_.page_size) * numerics::kRank * D;
      for (int i = threadIdx.x; i < part * numerics::kRank; i += kSumThreads) {
        const int8_t* direction = in + i % numerics::kRank * D;
        long long t = 0;
        for (int c = 0; c < D; ++c) t += direction[c] * s_.code_sum[i / numerics::kRank][c];
        if (t != 0) ptx::add_global(&g.t[task_.row_begin * numerics::kRank + i], static_cast<unsigned long long>(t));
      }
    }
    for (int r = threadIdx.x; r < part; r += kSumThreads) {
      add_row_sums(task_, task_.row_begin + r, {s_.den[r], s_.mass[r], s_.dropped[r], values, s_.peak[r]});
    }
    if (threadIdx.x == 0 && task_.row_begin == 0) ptx::add_global(&g.head->bytes, bytes);
  }

  const Step& step_;
  const plan::DecodeParams& p_;
  const RangeTask& task_;
  Shared& s_;
  const CacheLayout layout_;
};

}  // namespace fold::cuda
