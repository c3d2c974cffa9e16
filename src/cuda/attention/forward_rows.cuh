#pragma once
#include <limits>

#include "cuda/attention/forward_shape.cuh"

// The rows of a consumer warpgroup: logits to weights, and sums over key tiles. A thread holds a share of two rows, 8
// apart (ptx/wgmma.cuh): lanes 4 g .. 4 g + 3 have the same two, lane 4 g + c columns 8 i + 2 c and 8 i + 2 c + 1.
namespace fold::cuda::attention {

/// Bits 15 and 31: whether the low, the high 16-bit number of a word is an infinity or a NaN.
template <typename T>
__device__ inline uint32_t not_finite(uint32_t word) {
  constexpr uint32_t kExponent = std::is_same_v<T, __nv_bfloat16> ? 0x7f80 : 0x7c00;
  return ((word & kExponent * 0x10001) + (0x8000 - kExponent) * 0x10001) & 0x80008000;
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

/// Element c of lane k of a quad becomes element k of its lane c.
__device__ inline void transpose_quad(uint32_t (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool high = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t other = __shfl_xor_sync(~0u, high ? x[i] : x[i | bit], bit);
      (high ? x[i] : x[i | bit]) = other;
    }
  }
}

/// A number for each of a thread's two rows.
struct PerRow {
  float of[2];
};

/// What the weights of a tile refer to, for each of a thread's rows.
struct Reference {
  float offset[2];  // taken from logits in base 2: the largest so far, or 0 where raise() has taken it already
  float factor[2];  // what the sums so far are multiplied by
};

template <typename T, int D, int Keys>
struct Rows {
  /// Above it (base 2) the rounding of a row's maximum would show in its weights: it is subtracted from the logits
  /// before they are scaled, not after.
  static constexpr float kLargeLogit = 1024;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  const Forward& f;
  const Item& item;  // in shared memory
  int first_row;     // this thread's first row in the sequence; the other is 8 further
  float sums[D / 2];
  float top[2];   // largest logit, before log2_scale
  float mass[2];  // this thread's share of the sum of weights

  __device__ Rows(const Forward& forward, const Item& of, int consumer)
      : f(forward),
        item(of),
        first_row(of.first_row + 64 * consumer + static_cast<int>(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4)) {
#pragma unroll
    for (float& sum : sums) sum = 0;
    top[0] = top[1] = -kInfinity;
    mass[0] = mass[1] = 0;
  }

  __device__ KeyRange seen(int r) const { return visible_keys(f.schedule, item.q_len, item.k_len, first_row + 8 * r); }

  /// Bit i: whether the thread's i-th column is before x, both counted from its first.
  static __device__ uint32_t columns_before(int x) {
    static_assert(Keys <= 128, "at most 32 columns: 8 i and 8 i + 1");
    x = min(max(x, 0), Keys);
    return static_cast<uint32_t>((uint64_t{1} << (x / 8 * 2 + min(x % 8, 2))) - 1);
  }

  __device__ void mask(float (&s)[Keys / 2], int tile) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const KeyRange keys = seen(r);
      const int first_column = tile * Keys + static_cast<int>(2 * (threadIdx.x % 4));
      const uint32_t sees = columns_before(keys.last - first_column) & ~columns_before(keys.first - first_column);
#pragma unroll
      for (int i = 0; i < Keys / 4; ++i) {
        float& x = s[i / 2 * 4 + 2 * r + i % 2];
        if (!(sees >> i & 1)) x = -kInfinity;
      }
    }
  }

  /// Logits before log2_scale: with its sign, and -inf where a row does not see a key.
  __device__ void sign_and_mask(float (&s)[Keys / 2], int tile, bool masked) const {
    if (f.sign != 1) {
#pragma unroll
      for (float& x : s) x *= f.sign;
    }
    if (masked) mask(s, tile);
  }

  /// The thread's largest logits of a tile, for each of its rows.
  static __device__ PerRow largest(const float (&s)[Keys / 2]) {
    float most[4] = {s[0], s[1], s[2], s[3]};  // even and odd columns of each row
#pragma unroll
    for (int i = 4; i < Keys / 2; ++i) most[i % 4] = fmaxf(most[i % 4], s[i]);
    return {{fmaxf(most[0], most[1]), fmaxf(most[2], most[3])}};
  }

  /// Raises the rows' maxima to a tile's, of which the thread has `most`, and scales their masses likewise. Where the
  /// reference is large it is taken from the logits here. Both rows together: each alone is a chain of latencies.
  __device__ Reference raise(float (&s)[Keys / 2], const PerRow& most) {
    Reference to;
    float shift[2];
    bool large = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = top[r];
      top[r] = fmaxf(before, quad_max(most.of[r]));
      const float base = top[r] == -kInfinity ? 0.0f : top[r];  // of a row that has seen no key
      to.factor[r] = ptx::exp2_fast((before - base) * f.log2_scale);
      to.offset[r] = base * f.log2_scale;
      shift[r] = fabsf(to.offset[r]) > kLargeLogit ? base : 0.0f;
      large = large || shift[r] != 0;
      mass[r] *= to.factor[r];
    }
    if (__any_sync(~0u, large)) [[unlikely]] {
#pragma unroll
      for (int r = 0; r < 2; ++r) to.offset[r] = shift[r] != 0 ? 0.0f : to.offset[r];
#pragma unroll
      for (int i = 0; i < Keys / 2; ++i) s[i] -= shift[i / 2 % 2];
    }
    return to;
  }

  /// Logits become weights.
  __device__ void weigh(float (&s)[Keys / 2], const Reference& reference) {
    float sum[4] = {0, 0, 0, 0};  // even and odd columns of each row
#pragma unroll
    for (int i = 0; i < Keys / 2; ++i) {
      s[i] = ptx::exp2_fast(__fmaf_rn(s[i], f.log2_scale, -reference.offset[i / 2 % 2]));
      sum[i % 4] += s[i];
    }
    mass[0] += sum[0] + sum[1];
    mass[1] += sum[2] + sum[3];
  }

  /// Weights as the operand of the value product.
  static __device__ void round(const float (&s)[Keys / 2], uint32_t (&p)[Keys / 16][4]) {
#pragma unroll
    for (int i = 0; i < Keys / 4; ++i) p[i / 4][i % 4] = ptx::pair<T>(s[2 * i], s[2 * i + 1]);
  }

  /// Whether a maximum was raised or not: beside the exponentials that costs less than a branch.
  __device__ void scale(const Reference& reference) {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) sums[i] *= reference.factor[i / 2 % 2];
  }

  /// Adds the values that were cut (a bit for each key of the tile, from several cleaners) where they are seen: what is
  /// not finite stays so whatever its weight.
  template <int Cleaners, int Words>
  __device__ void add_broken(int tile, const uint32_t (&broken)[Cleaners][Words]) {
    uint32_t any = 0;  // of all words at once, as each load waits behind the operands that products read
#pragma unroll
    for (int i = 0; i < Cleaners * Words; ++i) any |= broken[i / Words][i % Words];
    if (any != 0) {
      for (int word = 0; word < Words; ++word) {
        uint32_t bits = 0;
        for (const auto& of_cleaner : broken) bits |= of_cleaner[word];
        for (; bits != 0; bits &= bits - 1) {
          add_broken_values(tile * Keys + 32 * word + __ffs(static_cast<int>(bits)) - 1);
        }
      }
    }
    __syncwarp();  // every lane has read `broken` before one of them gives it back
  }

  /// What is not finite of a key's values, to the rows that see it.
  __device__ void add_broken_values(int key) {
    const plan::ForwardParams& p = f.params;
    const T* const v = static_cast<const T*>(p.v.data) + batch_offset(p.v, item.sequence) +
                       (item.k_begin + int64_t{key}) * p.v.stride_row +
                       item.head / (p.heads / p.kv_heads) * p.v.stride_head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const KeyRange keys = seen(r);
      if (key < keys.first || key >= keys.last) continue;
#pragma unroll
      for (int i = 0; i < D / 4; ++i) {
        const float value = static_cast<float>(v[i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2]);
        if (!isfinite(value)) sums[i / 2 * 4 + 2 * r + i % 2] += value;
      }
    }
  }

  __device__ int64_t batch_offset(const plan::RowsView& x, int sequence) const {
    return f.params.cu_seqlens_q == nullptr ? sequence * x.stride_b : 0;
  }

  __device__ void write() {
    const plan::ForwardParams& p = f.params;
    const int sequence = item.sequence, head = item.head, q_begin = item.q_begin, q_len = item.q_len;
    const auto offset = [&](const plan::RowsView& x) {  // of the thread's first row
      return batch_offset(x, sequence) + (q_begin + int64_t{first_row}) * x.stride_row + head * x.stride_head;
    };
    T* const out = static_cast<T*>(p.out.data) + offset(p.out) + threadIdx.x % 4 * 8;
    float* const lse = p.lse.data == nullptr ? nullptr : static_cast<float*>(p.lse.data) + offset(p.lse);
    const float sink = p.sinks == nullptr ? -kInfinity : p.sinks[head];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = quad_sum(mass[r]), factor = 0, log_sum = -kInfinity;
      if (total != 0) {
        float natural = top[r] * fabsf(p.softmax_scale), shrink = 1;
        if (sink != -kInfinity) {
          constexpr float kLog2E = 1.44269504f;
          const float above = (sink - natural) * kLog2E;
          if (above > 0) {
            natural = sink;
            shrink = exp2f(-above);
          }
          total = above > 0 ? total * shrink + 1 : total + exp2f(above);
        }
        factor = shrink / total;
        log_sum = natural + logf(total);
      }
      const bool inside = first_row + 8 * r < q_len;
      auto* const row = reinterpret_cast<uint4*>(out + 8 * r * p.out.stride_row);
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const pair = &sums[16 * i + 4 * j + 2 * r];
          words[j] = ptx::pair<T>(pair[0] * factor, pair[1] * factor);
        }
        transpose_quad(words);
        if (inside) row[4 * i] = make_uint4(words[0], words[1], words[2], words[3]);
      }
      if (lse != nullptr && inside && threadIdx.x % 4 == 0) lse[8 * r * p.lse.stride_row] = log_sum;
    }
  }
};

}  // namespace fold::cuda::attention
