#pragma once
#include "cuda/cache/tail_solve.cuh"
#include "cuda/ptx/launch_order.cuh"

// The tail's fits of the marks that a call reaches (docs/numerics.md, section 9). Which they are is decided here, from
// lengths in device memory. The thread blocks of the grid share the fits out among themselves: each takes whole ones
// where there are many, and several take a part of one's keys where there are few; then the last of them solves it.
namespace fold::cuda::cache {

constexpr int kMaxParts = 16;
constexpr int kLeastBlocks = 8;  ///< of a part: its sums have to be added, too

template <int D>
union FitShared {
  SumShared<D> sums;
  SolveShared<D> solve;
};

/// What a thread block is at. It lies in shared memory because registers are short.
struct FitState {
  int64_t fits, index;  // of the call, and the one in hand
  int parts, groups;    // `groups` times `parts` thread blocks share out the fits
  int used;             // parts of the one in hand
  int request, head;
  int64_t mark;
  int exponent;                  // of E_M
  unsigned largest;              // of the bounds
  unsigned long long exponents;  // sum over the bounds
  bool last;                     // to finish its part
  LocateShared locate;
};

__device__ inline unsigned marks_reached(const Request& r) {
  unsigned count = 0;
  for (int64_t mark = plan::next_mark(r.length); mark <= r.new_length; mark = plan::next_mark(mark)) ++count;
  return count;
}

/// Whether any request does, by a whole thread block.
__device__ inline bool reaches_mark(const Write& w) {
  bool found = false;
  for (int request = threadIdx.x; request < w.params.batch; request += kFitThreads) {
    const Request r = request_of(w, request);
    found = found || plan::next_mark(r.length) <= r.new_length;
  }
  return __syncthreads_or(found) != 0;
}

__device__ inline Located find_mark(const Write& w, unsigned index, FitState& state) {
  const auto marks = [&w](int request) { return marks_reached(request_of(w, request)); };
  return locate(index, w.params.batch, marks, state.locate);
}

/// A block's place in the pages of the fit's request. page: of its head; slot: of its first key.
struct BlockAt {
  plan::HeadPage page;
  int slot;
};

__device__ inline BlockAt block_at(const Write& w, const FitState& state, int block) {
  const Location at = locate_key(w, state.request, int64_t{block} * kTile);
  return {plan::head_page(w.params.cache, at.page, state.head), at.slot};
}

/// Reads the bounds of the fit's blocks; false if a page is not in the pool.
__device__ inline bool survey(const Write& w, FitState& state) {
  __syncthreads();  // state may still be in use
  if (threadIdx.x == 0) {
    state.largest = 0;
    state.exponents = 0;
  }
  const int blocks = static_cast<int>(state.mark / kTile);
  bool missing = false;
  unsigned largest = 0;
  int64_t exponents = 0;
  for (int block = threadIdx.x; block < blocks; block += kFitThreads) {
    const Location at = locate_key(w, state.request, int64_t{block} * kTile);
    if (at.page < 0) {
      missing = true;
      continue;
    }
    const uint16_t bound = plan::head_page(w.params.cache, at.page, state.head).bound[at.slot / kTile];
    largest = max(largest, static_cast<unsigned>(bound));
    exponents += numerics::pow2_ceil_exponent(bound);
  }
  if (__syncthreads_or(missing) != 0) return false;
  atomicMax(&state.largest, largest);
  atomicAdd(&state.exponents, static_cast<unsigned long long>(exponents));
  __syncthreads();
  if (threadIdx.x == 0) {
    const int typical = numerics::typical_exponent(static_cast<int64_t>(state.exponents), blocks);
    state.exponent =
        min(numerics::pow2_ceil_exponent(static_cast<uint16_t>(state.largest)), typical + numerics::kOutlierBits);
  }
  __syncthreads();
  return true;
}

/// Whether all other parts are done.
__device__ inline bool is_last(const Write& w, FitState& state) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    state.last = atomicAdd(&w.arrivals[blockIdx.x / state.parts], 1u) + 1 == static_cast<unsigned>(state.used);
  }
  __syncthreads();
  __threadfence();
  return state.last;
}

/// Where a fit is stored. p, u: (16, D); f: (16,)
template <int D>
__device__ FitOut fit_out(const Write& w, const FitState& state) {
  const BlockAt last = block_at(w, state, static_cast<int>(state.mark / kTile) - 1);
  const int64_t first = plan::fit_slot(state.mark, w.params.cache.layout.page_size) * kRank;
  return {last.page.fit_in + first * D, last.page.fit_out + first * D, last.page.fit_scale + first};
}

/// The fit in hand, or this thread block's part of it.
template <int D>
__device__ void make_fit(const Write& w, FitSlot<D>* slots, FitShared<D>& shared, FitState& state) {
  const int part = static_cast<int>(blockIdx.x) % state.parts;
  if (part >= state.used || !survey(w, state)) return;
  if (state.largest >= numerics::kBf16Nan) {
    if (part != 0) return;
    const FitOut out = fit_out<D>(w, state);
    for (int at = threadIdx.x; at < kRank * D; at += kFitThreads) out.p[at] = out.u[at] = 0;
    if (threadIdx.x < kRank) out.f[threadIdx.x] = 0.0f;
    return;
  }
  const auto blocks = [&](int block) -> StoredBlock {
    const BlockAt at = block_at(w, state, block);
    return {at.page.k_h + at.slot * (D / 2), numerics::plane_row({at.page.v_h, at.page.v_l, at.page.v_b}, at.slot, D),
            at.page.v_scale + at.slot};
  };
  const int64_t count = state.mark / kTile;
  const int first = static_cast<int>(count * part / state.used);
  const int last = static_cast<int>(count * (part + 1) / state.used);
  sum_blocks<D, Sum::kA>(blocks, first, last, state.exponent, slots[blockIdx.x].a, shared.sums);
  sum_blocks<D, Sum::kB>(blocks, first, last, state.exponent, slots[blockIdx.x].b, shared.sums);
  if (state.used > 1 && !is_last(w, state)) return;
  FitSolver<D> solver(slots + blockIdx.x / state.parts * state.parts, state.used, slots[blockIdx.x], shared.solve);
  solver.run(state.exponent, [&] { return fit_out<D>(w, state); });
}

template <int D>
__global__ void __launch_bounds__(kFitThreads, 1) fit_tails(const __grid_constant__ Write w, FitSlot<D>* slots) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  if (!reaches_mark(w)) return;  // as nearly always in a decoding step
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  __shared__ FitState state;
  const int64_t fits = find_mark(w, 0, state).total * w.params.cache.layout.n_kv_heads;
  if (threadIdx.x == 0) {
    const int blocks = static_cast<int>(gridDim.x);
    state.fits = fits;
    state.parts = static_cast<int>(min(int64_t{kMaxParts}, max(int64_t{1}, blocks / fits)));
    state.groups = blocks / state.parts;
    state.index = blockIdx.x / state.parts;
    if (state.index >= state.groups) state.index = fits;
  }
  __syncthreads();
  while (state.index < state.fits) {  // once, if a fit has several parts
    const int heads = static_cast<int>(w.params.cache.layout.n_kv_heads);
    const int64_t fit = state.fits - 1 - state.index;  // a request's longest first
    const Located place = find_mark(w, static_cast<unsigned>(fit / heads), state);
    if (threadIdx.x == 0) {
      state.mark = plan::next_mark(request_of(w, place.owner).length);
      for (unsigned i = 0; i < place.offset; ++i) state.mark = plan::next_mark(state.mark);
      state.request = place.owner;
      state.head = static_cast<int>(fit % heads);
      state.used =
          static_cast<int>(min(int64_t{state.parts}, max(int64_t{1}, state.mark / (kTile * int64_t{kLeastBlocks}))));
    }
    __syncthreads();
    make_fit<D>(w, slots, *reinterpret_cast<FitShared<D>*>(shared_bytes), state);
    __syncthreads();
    if (threadIdx.x == 0) state.index += state.groups;
    __syncthreads();
  }
}

}  // namespace fold::cuda::cache
