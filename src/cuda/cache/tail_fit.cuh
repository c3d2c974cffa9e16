#pragma once
#include "cuda/cache/tail_solve.cuh"
#include "cuda/ptx/launch_order.cuh"

// The tail's fits of the marks that a call reaches (docs/numerics.md, section 9). Which they are is decided here, from
// lengths in device memory. Thread blocks take parts of them by tickets, a request's longest fits first. A part's sums
// go into a slot of the workspace; whoever makes a fit's last part solves it.
namespace fold::cuda::cache {

constexpr int kFinestCut = 8;  ///< part_blocks, at least: a part's sums have to be added, too

template <int D>
union FitShared {
  SumShared<D> sums;
  SolveShared<D> solve;
};

/// What a thread block is at. It lies in shared memory because registers are short.
struct FitState {
  int part_blocks;  // most 64-key blocks of a part; 0: fits are not cut
  unsigned unit;    // the part in hand, of all of the call's
  int slot;         // of its sums; a fit's are side by side
  int parts, part;  // of its fit, and which one it is
  int request, head;
  int64_t mark;
  int exponent;                  // of E_M
  unsigned largest;              // of the bounds
  unsigned long long exponents;  // sum over the bounds
  bool last;                     // whether the part in hand was its fit's last
  LocateShared locate;
};

__device__ inline unsigned parts_of(int64_t mark, int part_blocks) {
  if (part_blocks == 0) return 1;
  return (static_cast<unsigned>(mark / kTile) + part_blocks - 1) / static_cast<unsigned>(part_blocks);
}

/// Parts of the fits that a request reaches.
__device__ inline unsigned parts_of(const Write& w, const Request& r, int part_blocks) {
  unsigned count = 0;
  for (int64_t mark = plan::next_mark(r.length); mark <= r.new_length; mark = plan::next_mark(mark)) {
    count += parts_of(mark, part_blocks);
  }
  return count * static_cast<unsigned>(w.params.cache.layout.n_kv_heads);
}

/// Whether any request reaches a mark, by a whole thread block.
__device__ inline bool reaches_mark(const Write& w) {
  bool found = false;
  for (int request = threadIdx.x; request < w.params.batch; request += kFitThreads) {
    const Request r = request_of(w, request);
    found = found || plan::next_mark(r.length) <= r.new_length;
  }
  return __syncthreads_or(found) != 0;
}

__device__ inline Located locate_part(const Write& w, unsigned unit, int part_blocks, FitState& state) {
  const auto parts = [&w, part_blocks](int request) { return parts_of(w, request_of(w, request), part_blocks); };
  return locate(unit, w.params.batch, parts, state.locate);
}

/// Cuts fits so that all thread blocks have something to do, into parts for which there are slots; returns how many.
__device__ inline unsigned cut_fits(const Write& w, unsigned slots, FitState& state) {
  const unsigned fits = locate_part(w, 0, 0, state).total;
  const unsigned most = min(slots, max(gridDim.x, 2 * fits));
  int part_blocks = 0;
  unsigned parts = fits;
  if (fits <= most) {
    part_blocks = kFinestCut;
    while ((parts = locate_part(w, 0, part_blocks, state).total) > most) part_blocks *= 2;
  }
  if (threadIdx.x == 0) state.part_blocks = part_blocks;
  return parts;
}

/// Which part the unit is.
__device__ inline void find_part(const Write& w, FitState& state) {
  const Located place = locate_part(w, state.unit, state.part_blocks, state);
  if (threadIdx.x == 0) {
    const Request r = request_of(w, place.owner);
    unsigned at = parts_of(w, r, state.part_blocks) - 1 - place.offset;
    state.request = place.owner;
    // A fit that is not cut is solved by who sums it, and its slot may be another's afterwards.
    state.slot = static_cast<int>(state.part_blocks == 0 ? blockIdx.x : state.unit - place.offset + at);
    unsigned parts = 0, of_mark = 0;
    for (state.mark = plan::next_mark(r.length);; state.mark = plan::next_mark(state.mark)) {
      parts = parts_of(state.mark, state.part_blocks);
      of_mark = parts * static_cast<unsigned>(w.params.cache.layout.n_kv_heads);
      if (at < of_mark) break;
      at -= of_mark;
    }
    state.parts = static_cast<int>(parts);
    state.part = static_cast<int>(at % parts);
    state.head = static_cast<int>(at / parts);
  }
  __syncthreads();
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
    const unsigned parts = static_cast<unsigned>(state.parts);
    state.last = atomicAdd(&w.counters[state.slot - state.part], 1u) + 1 == parts;
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

/// The part in hand, and its fit if it is the last.
template <int D>
__device__ void make_part(const Write& w, FitSlot<D>* slots, FitShared<D>& shared, FitState& state) {
  if (!survey(w, state)) return;
  if (state.largest >= numerics::kBf16Nan) {
    if (state.part != 0) return;
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
  const int first = static_cast<int>(count * state.part / state.parts);
  const int last = static_cast<int>(count * (state.part + 1) / state.parts);
  sum_blocks<D, Sum::kA>(blocks, first, last, state.exponent, slots[state.slot].a, shared.sums);
  sum_blocks<D, Sum::kB>(blocks, first, last, state.exponent, slots[state.slot].b, shared.sums);
  if (state.parts > 1 && !is_last(w, state)) return;
  FitSolver<D> solver(slots + state.slot - state.part, state.parts, slots[state.slot], shared.solve);
  solver.run(state.exponent, [&] { return fit_out<D>(w, state); });
}

/// slots: (slot_count,), at least as many as thread blocks
template <int D>
__global__ void __launch_bounds__(kFitThreads, 1)
    fit_tails(const __grid_constant__ Write w, FitSlot<D>* slots, int slot_count) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  if (!reaches_mark(w)) return;  // as nearly always in a decoding step
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  __shared__ FitState state;
  const unsigned parts = cut_fits(w, static_cast<unsigned>(slot_count), state);
  while (true) {
    if (threadIdx.x == 0) state.unit = atomicAdd(&w.counters[kMaxFitSlots], 1u);
    __syncthreads();
    if (state.unit >= parts) return;
    find_part(w, state);
    make_part<D>(w, slots, *reinterpret_cast<FitShared<D>*>(shared_bytes), state);
    __syncthreads();
  }
}

}  // namespace fold::cuda::cache
