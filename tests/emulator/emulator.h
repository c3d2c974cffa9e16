#pragma once
// Runs CUDA kernels on the host: every CUDA thread is a fiber of one OS thread, scheduled at random (EMU_SEED).
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <source_location>
#include <tuple>
#include <type_traits>
#include <vector>

namespace emu {

using Where = std::source_location;
#define EMU_WHERE emu::Where where = emu::Where::current()  // a last parameter: who calls
struct Index {
  unsigned x, y, z;
};
struct Thread {
  Index thread, block, block_dim, grid_dim;
};
extern Thread* current;

[[noreturn]] void fail(const char* what, Where where = Where::current());

// Scheduling.
void maybe_yield();
void sleep(Where where = Where::current());
void launch(unsigned blocks, unsigned threads, size_t shared, bool overlap, std::function<void()> body, void* stream);
void run_all();
void wait_for_earlier_kernels(Where where);
void let_next_kernel_start();

// Warps.
struct Deposit {
  uint32_t w[12];
};
struct Result {
  uint32_t w[4];
};
using Combine = void (*)(const Deposit (&in)[32], Result (&out)[32]);
Result collective(const char* name, unsigned mask, const Deposit& in, Combine combine, Where where);

// CTAs.
bool barrier(int index, unsigned threads, bool waits, bool value, Where where);  // returns the conjunction
void* shared_variable(const void* id, size_t bytes, size_t alignment);
uint8_t* dynamic_shared();
uint32_t shared_address(const void* p);
uint8_t* shared_pointer(uint32_t address, uint32_t bytes, uint32_t alignment, Where where);

// mbarriers and copies.
void init_mbarrier(uint32_t at, uint32_t count, Where where);
void invalidate_mbarrier(uint32_t at, Where where);
void arrive(uint32_t at, uint32_t count, uint32_t bytes, Where where);
bool phase_is_over(uint32_t at, uint32_t parity, Where where);
void wait_phase(uint32_t at, uint32_t parity, Where where);
void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, Where where);
/// 16 bytes, or zeros.
struct Piece {
  uint32_t to;
  const void* from;
};
void copy_pieces(const std::vector<Piece>& pieces, uint32_t barrier, Where where);
/// Of int32 values, out of shared memory, which is read when it has to be waited for at the latest.
void bulk_add(void* to, uint32_t from, uint32_t bytes, Where where);
void commit_additions();
void wait_additions(int but);
void copy_async(uint32_t to, const void* from, uint32_t bytes, uint32_t kept, Where where);
void arrive_when_copied(uint32_t at, Where where);
void commit_copies();
void wait_copies(int but, Where where);  // -1: all

template <typename T>
T& shared() {
  static const char id = 0;
  return *static_cast<T*>(shared_variable(&id, sizeof(T), alignof(T)));
}

template <typename T>
Deposit deposit(T value, int lane = 0) {
  static_assert(sizeof(T) <= 8);
  Deposit d{};
  std::memcpy(d.w, &value, sizeof(T));
  d.w[2] = static_cast<uint32_t>(lane);
  return d;
}
template <typename T>
T result(const Result& r) {
  T value;
  std::memcpy(&value, r.w, sizeof(T));
  return value;
}
void combine_shuffle(const Deposit (&in)[32], Result (&out)[32]);
void combine_ballot(const Deposit (&in)[32], Result (&out)[32]);
void combine_add(const Deposit (&in)[32], Result (&out)[32]);
void combine_max_s(const Deposit (&in)[32], Result (&out)[32]);
void combine_max_u(const Deposit (&in)[32], Result (&out)[32]);
void combine_nothing(const Deposit (&in)[32], Result (&out)[32]);

// Products.
void mma(const char* name, int (&d)[4], const uint32_t (&ab)[6], Combine combine, Where where);
void combine_u8s8(const Deposit (&in)[32], Result (&out)[32]);
void combine_u8u8(const Deposit (&in)[32], Result (&out)[32]);
void combine_s8u8(const Deposit (&in)[32], Result (&out)[32]);
void combine_s8s8(const Deposit (&in)[32], Result (&out)[32]);
void load_transposed(uint32_t (&m)[4], uint32_t address, Where where);

// Products of warpgroups, a thread's share each: they happen at any time until they are waited for.
void product(std::function<void()> share);
void commit_products();
void wait_products(int but);

}  // namespace emu
