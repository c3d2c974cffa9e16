#pragma once
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "emulator.h"

// What the emulator's parts know of each other: fibers in warps, in CTAs, in grids.
namespace emu {

constexpr size_t kStack = 256 << 10;  // of a fiber
constexpr size_t kStatic = 4096;      // bytes of a CTA's static shared memory, before the dynamic one
constexpr size_t kArena = kStatic + (228 << 10);
constexpr uint8_t kGarbage = 0xA5;
constexpr uint32_t kSharedBase = 0x400;  // address of the first byte of shared memory

struct Cta;
struct Grid;
enum class State { ready, running, blocked, asleep, done };
/// A copy on its way to shared memory.
struct Copy {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes, kept;
  int group;  // -1: not committed
};
/// What a thread has asked for and happens later: in groups, the last one still open.
class Later {
 public:
  /// Or right now, with all that is left: that is chance, too.
  void add(std::function<void()> work);
  void commit() { groups_.emplace_back(); }
  /// Does all but the newest `but` groups, or more: that is chance.
  void wait(int but);
  bool empty() const { return groups_.size() == 1 && groups_.back().empty(); }

 private:
  std::deque<std::vector<std::function<void()>>> groups_ = {{}};
};
/// A CUDA thread.
struct Fiber : Thread {
  void* sp = nullptr;  // while it does not run
  uint8_t* stack = nullptr;
  Cta* cta;
  int warp, lane;
  State state = State::ready;
  const char* waits_for = "start";
  Where where;
  std::vector<Copy> copies;
  int committed = 0;  // groups
  Later products, additions;
};
/// What a warp's next collective has so far; two of them may overlap.
struct Warp {
  int arrived = 0;
  unsigned generation = 0;
  const char* name;
  Where where;
  Deposit in[2][32];
  Result out[2][32];
  Fiber* lanes[32];
};
struct Barrier {
  unsigned expected = 0, arrived = 0;
  bool value = true, last = true;
  std::vector<Fiber*> waiters;
};
struct Mbarrier {
  uint32_t count, pending;
  int64_t bytes = 0;
  uint32_t phase = 0;
  uint64_t pattern;  // what stands in its place, to see whether somebody writes there
  std::vector<Fiber*> waiters;
};
/// Copies that an mbarrier is told of: by their bytes, or by one arrival for all of them.
struct Bulk {
  std::vector<Copy> copies;
  uint32_t bytes, arrivals, barrier;
};
struct Cta {
  Grid* grid;
  unsigned index;
  uint8_t* arena;
  size_t used = 0, shared;
  std::vector<Fiber*> fibers;
  std::vector<std::unique_ptr<Warp>> warps;
  Barrier barriers[16];
  std::unordered_map<uint32_t, Mbarrier> mbarriers;
  std::vector<Bulk> bulks;
  std::map<const void*, void*> variables;
  unsigned live;
  bool triggered = false;
};
struct Grid {
  unsigned blocks, threads;
  size_t shared;
  bool overlap;
  std::function<void()> body;
  unsigned placed = 0, triggered = 0, finished = 0;
  Grid* before = nullptr;
  std::vector<Fiber*> waiters = {};
  bool complete() const { return finished == blocks; }
};

extern std::deque<Grid> queue;        // of grids, in the order of their launches
extern std::vector<Grid>* capturing;  // into a graph
extern void* capturing_stream;
extern std::vector<Cta*> ctas;  // resident
extern std::vector<Fiber*> ready;
extern uint64_t progress;                        // counts whatever brings the emulated program on
extern std::map<uintptr_t, size_t> allocations;  // device memory

inline const char* file_of(const Where& where) {
  const char* slash = std::strrchr(where.file_name(), '/');
  return slash ? slash + 1 : where.file_name();
}
inline Fiber& me() { return *static_cast<Fiber*>(current); }

// scheduler.cpp
uint64_t random64();
bool chance(unsigned one_in);
long env(const char* name, long otherwise);
void block(const char* what, Where where);
void wake(Fiber* f);
void wake_all(std::vector<Fiber*>& fibers);
void yield();

// memory.cpp
bool finish_some_bulk();

}  // namespace emu
