#include <algorithm>

#include "state.h"

// Where threads meet: collectives of a warp, barriers of a CTA.
namespace emu {

Result collective(const char* name, unsigned mask, const Deposit& in, Combine combine, Where where) {
  Fiber& f = me();
  Warp& w = *f.cta->warps[static_cast<size_t>(f.warp)];
  if (mask != 0xFFFFFFFFu) fail("a collective with a partial mask", where);
  if (w.arrived == 0) {
    w.name = name;
    w.where = where;
  } else if (w.name != name || w.where.line() != where.line() || w.where.file_name() != where.file_name()) {
    std::fprintf(stderr, "%s at %s:%u meets %s\n", w.name, file_of(w.where), w.where.line(), name);
    fail("lanes of a warp meet in different collectives", where);
  }
  const unsigned p = w.generation & 1;
  w.in[p][f.lane] = in;
  if (++w.arrived == 32) {
    combine(w.in[p], w.out[p]);
    w.arrived = 0;
    ++w.generation;
    ++progress;
    for (Fiber* lane : w.lanes) {
      if (lane != &f) wake(lane);
    }
    yield();  // the last one has no right to go first
  } else {
    block(name, where);
  }
  return w.out[p][f.lane];
}

bool barrier(int index, unsigned threads, bool waits, bool value, Where where) {
  Fiber& f = me();
  Barrier& b = f.cta->barriers[index];
  if (b.arrived == 0) {
    b.expected = threads;
    b.value = true;
  } else if (b.expected != threads) {
    fail("threads disagree on how many a barrier is for", where);
  }
  b.value = b.value && value;
  if (++b.arrived == b.expected) {
    b.last = b.value;
    b.arrived = 0;
    wake_all(b.waiters);
  } else if (waits) {
    b.waiters.push_back(&f);
    block(index == 0 ? "syncthreads" : "a named barrier", where);
  }
  if (!waits) return true;
  const bool last = b.last;  // nobody passes the next one before this thread has
  maybe_yield();
  return last;
}

// What collectives compute.
void combine_nothing(const Deposit (&)[32], Result (&)[32]) {}
void combine_shuffle(const Deposit (&in)[32], Result (&out)[32]) {
  for (int i = 0; i < 32; ++i) {
    const uint32_t from = in[i].w[2];
    if (from >= 32) fail("a shuffle from no lane");
    out[i].w[0] = in[from].w[0];
    out[i].w[1] = in[from].w[1];
  }
}
void combine_ballot(const Deposit (&in)[32], Result (&out)[32]) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= in[i].w[0] << i;
  for (Result& r : out) r.w[0] = bits;
}
template <typename F>
void reduce(const Deposit (&in)[32], Result (&out)[32], F f) {
  uint32_t value = in[0].w[0];
  for (int i = 1; i < 32; ++i) value = f(value, in[i].w[0]);
  for (Result& r : out) r.w[0] = value;
}
void combine_add(const Deposit (&in)[32], Result (&out)[32]) {
  reduce(in, out, [](uint32_t a, uint32_t b) { return a + b; });
}
void combine_max_u(const Deposit (&in)[32], Result (&out)[32]) {
  reduce(in, out, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}
void combine_max_s(const Deposit (&in)[32], Result (&out)[32]) {
  reduce(in, out, [](uint32_t a, uint32_t b) {
    return static_cast<uint32_t>(std::max(static_cast<int32_t>(a), static_cast<int32_t>(b)));
  });
}

// w: a0 .. a3, b0, b1, then d.
template <typename A, typename B>
void multiply(const Deposit (&in)[32], Result (&out)[32]) {
  alignas(64) int16_t a[16][32], b[8][32];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, c = lane % 4;
    for (int j = 0; j < 4; ++j) {
      const auto byte = [&](int w) { return static_cast<uint8_t>(in[lane].w[w] >> (8 * j)); };
      a[g][4 * c + j] = static_cast<A>(byte(0));
      a[g + 8][4 * c + j] = static_cast<A>(byte(1));
      a[g][16 + 4 * c + j] = static_cast<A>(byte(2));
      a[g + 8][16 + 4 * c + j] = static_cast<A>(byte(3));
      b[g][4 * c + j] = static_cast<B>(byte(4));
      b[g][16 + 4 * c + j] = static_cast<B>(byte(5));
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, c = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const int16_t *row = a[g + i / 2 * 8], *column = b[2 * c + i % 2];
      int32_t sum = 0;
      for (int k = 0; k < 32; ++k) sum += row[k] * column[k];
      out[lane].w[i] = in[lane].w[6 + i] + static_cast<uint32_t>(sum);
    }
  }
}
void combine_u8s8(const Deposit (&in)[32], Result (&out)[32]) { multiply<uint8_t, int8_t>(in, out); }
void combine_u8u8(const Deposit (&in)[32], Result (&out)[32]) { multiply<uint8_t, uint8_t>(in, out); }
void combine_s8u8(const Deposit (&in)[32], Result (&out)[32]) { multiply<int8_t, uint8_t>(in, out); }
void combine_s8s8(const Deposit (&in)[32], Result (&out)[32]) { multiply<int8_t, int8_t>(in, out); }

void mma(const char* name, int (&d)[4], const uint32_t (&ab)[6], Combine combine, Where where) {
  Deposit in;
  std::memcpy(in.w, ab, 24);
  std::memcpy(in.w + 6, d, 16);
  const Result r = collective(name, 0xFFFFFFFFu, in, combine, where);
  std::memcpy(d, r.w, 16);
}

namespace {
Where transposed_where;
void combine_transposed(const Deposit (&in)[32], Result (&out)[32]) {
  uint16_t element[4][8][8];
  for (int lane = 0; lane < 32; ++lane) {
    std::memcpy(element[lane / 8][lane % 8], shared_pointer(in[lane].w[0], 16, 16, transposed_where), 16);
  }
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, c = lane % 4;
    for (int q = 0; q < 4; ++q)
      out[lane].w[q] = element[q][2 * c][g] | static_cast<uint32_t>(element[q][2 * c + 1][g]) << 16;
  }
}
}  // namespace
void load_transposed(uint32_t (&m)[4], uint32_t address, Where where) {
  Deposit in;
  in.w[0] = address;
  transposed_where = where;
  const Result r = collective("ldmatrix", 0xFFFFFFFFu, in, combine_transposed, where);
  std::memcpy(m, r.w, 16);
}

void product(std::function<void()> share) {
  me().products.add(std::move(share));
  maybe_yield();
}
void commit_products() { me().products.commit(); }
void wait_products(int but) { me().products.wait(but); }

}  // namespace emu
