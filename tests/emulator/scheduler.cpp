#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "state.h"

// Fibers and who runs next; grids and which of their CTAs are resident.
namespace emu {

Thread* current = nullptr;
std::deque<Grid> queue;
std::vector<Grid>* capturing = nullptr;
void* capturing_stream = nullptr;
std::vector<Cta*> ctas;
std::vector<Fiber*> ready;
uint64_t progress = 0;
std::map<uintptr_t, size_t> allocations;

namespace {

std::vector<Fiber*> sleepers;
std::vector<uint8_t*> free_stacks, free_arenas;
void* scheduler_sp;
unsigned one_in_yield = 4;
uint64_t rng = 0x9E3779B97F4A7C15ull;

extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
emu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

void to_scheduler() {
  Fiber& f = me();
  emu_switch(&f.sp, scheduler_sp);
}
void print_waits() {
  for (Cta* cta : ctas) {
    std::fprintf(stderr, "CTA %u of a grid of %u x %u\n", cta->index, cta->grid->blocks, cta->grid->threads);
    for (auto& warp : cta->warps) {
      std::map<std::string, std::string> lanes;
      for (Fiber* f : warp->lanes) {
        if (!f) continue;
        const std::string at = f->state == State::done ? "done"
                                                       : std::string(f->waits_for) + " at " + file_of(f->where) + ":" +
                                                             std::to_string(f->where.line()) +
                                                             (f->state == State::blocked ? "" : " (ready)");
        lanes[at] += " " + std::to_string(f->lane);
      }
      for (auto& [at, who] : lanes) {
        std::fprintf(stderr, "  warp %d: %s: lanes%s\n", warp->lanes[0]->warp, at.c_str(),
                     lanes.size() == 1 ? " all" : who.c_str());
      }
    }
    for (auto& [at, m] : cta->mbarriers) {
      std::fprintf(stderr, "  mbarrier %#x: phase %u, %u of %u arrivals pending, %lld bytes\n", at, m.phase, m.pending,
                   m.count, static_cast<long long>(m.bytes));
    }
  }
}

extern "C" void emu_entry() {
  Fiber& f = me();
  f.cta->grid->body();
  if (!f.copies.empty()) fail("a thread ends with copies that it did not wait for");
  if (!f.products.empty()) fail("a thread ends with products that it did not wait for");
  f.additions.wait(0);
  if (!f.additions.empty()) fail("a thread ends with additions that it did not commit");
  f.state = State::done;
  to_scheduler();
  std::abort();
}

void place(Grid& grid, unsigned index) {
  Cta* cta = new Cta;
  cta->grid = &grid;
  cta->index = index;
  cta->live = grid.threads;
  cta->shared = grid.shared;
  if (free_arenas.empty()) free_arenas.push_back(static_cast<uint8_t*>(std::aligned_alloc(1024, kArena)));
  cta->arena = free_arenas.back();
  free_arenas.pop_back();
  std::memset(cta->arena, kGarbage, kArena);
  for (unsigned t = 0; t < grid.threads; ++t) {
    Fiber* f = new Fiber;
    f->thread = {t, 0, 0};
    f->block = {index, 0, 0};
    f->block_dim = {grid.threads, 1, 1};
    f->grid_dim = {grid.blocks, 1, 1};
    f->cta = cta;
    f->warp = static_cast<int>(t / 32);
    f->lane = static_cast<int>(t % 32);
    if (free_stacks.empty()) {
      auto* s = static_cast<uint8_t*>(
          mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      mprotect(s, 4096, PROT_NONE);
      free_stacks.push_back(s);
    }
    f->stack = free_stacks.back();
    free_stacks.pop_back();
    auto** top = reinterpret_cast<void**>(f->stack + kStack - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&emu_entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    f->sp = top;
    if (f->lane == 0) {
      cta->warps.push_back(std::make_unique<Warp>());
      std::fill(std::begin(cta->warps.back()->lanes), std::end(cta->warps.back()->lanes), nullptr);
    }
    cta->warps.back()->lanes[f->lane] = f;
    cta->fibers.push_back(f);
    ready.push_back(f);
  }
  ctas.push_back(cta);
  ++grid.placed;
}

void trigger(Cta* cta) {
  if (cta->triggered) return;
  cta->triggered = true;
  ++cta->grid->triggered;
}

void retire(Cta* cta) {
  if (!cta->bulks.empty()) fail("a CTA ends with bulk copies on their way");
  trigger(cta);
  for (Fiber* f : cta->fibers) {
    free_stacks.push_back(f->stack);
    delete f;
  }
  free_arenas.push_back(cta->arena);
  Grid* grid = cta->grid;
  ctas.erase(std::find(ctas.begin(), ctas.end(), cta));
  delete cta;
  ++progress;
  if (++grid->finished == grid->blocks) wake_all(grid->waiters);
}

}  // namespace

uint64_t random64() {
  rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
  return rng;
}
bool chance(unsigned one_in) { return (random64() >> 20) % one_in == 0; }
long env(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atol(value) : otherwise;
}

void block(const char* what, Where where) {
  Fiber& f = me();
  f.state = State::blocked;
  f.waits_for = what;
  f.where = where;
  to_scheduler();
}
void wake(Fiber* f) {
  if (f->state != State::blocked) return;
  f->state = State::ready;
  ready.push_back(f);
}
void wake_all(std::vector<Fiber*>& fibers) {
  ++progress;
  for (Fiber* f : fibers) wake(f);
  fibers.clear();
}

void fail(const char* what, Where where) {
  std::fprintf(stderr, "\nemulator: %s, %s:%u\n", what, file_of(where), where.line());
  if (current) {
    std::fprintf(stderr, "in CTA %u, thread %u (warp %u, lane %u)\n", current->block.x, current->thread.x,
                 current->thread.x / 32, current->thread.x % 32);
  }
  if (env("EMU_WAITS", 0)) print_waits();
  std::fflush(nullptr);
  std::abort();
}

void maybe_yield() {
  if (!chance(one_in_yield)) return;
  yield();
}
void yield() {
  Fiber& f = me();
  f.state = State::ready;
  f.waits_for = "nothing";
  ready.push_back(&f);
  to_scheduler();
}
void sleep(Where where) {
  Fiber& f = me();
  f.state = State::asleep;
  f.waits_for = "nanosleep";
  f.where = where;
  sleepers.push_back(&f);
  to_scheduler();
}

void launch(unsigned blocks, unsigned threads, size_t shared, bool overlap, std::function<void()> body, void* stream) {
  Grid grid{blocks, threads, shared, overlap, std::move(body)};
  if (threads % 32 != 0 || shared + kStatic > kArena) fail("launch");
  if (capturing && stream == capturing_stream) {
    capturing->push_back(std::move(grid));
  } else {
    queue.push_back(std::move(grid));
  }
}

void run_all() {
  static bool first = true;
  if (first) {
    first = false;
    rng ^= static_cast<uint64_t>(env("EMU_SEED", 1)) * 0xD1342543DE82EF95ull;
    for (int i = 0; i < 10; ++i) random64();
    one_in_yield = static_cast<unsigned>(env("EMU_YIELD", 4));
  }
  const size_t resident = static_cast<size_t>(env("EMU_RESIDENT", 12));
  for (size_t i = 1; i < queue.size(); ++i) queue[i].before = &queue[i - 1];
  const unsigned one_in_copy = chance(2) ? 32 : 1 << 16;  // else they end when everybody waits for them
  size_t next_grid = 0;
  uint64_t idle_from = progress, idle_rounds = 0;
  while (true) {
    while (next_grid < queue.size()) {
      Grid& g = queue[next_grid];
      const Grid* before = g.before;
      bool earlier = true;  // all grids before the last one
      for (size_t i = 0; i + 1 < next_grid; ++i) earlier = earlier && queue[i].complete();
      if (before && !before->complete() && !(g.overlap && earlier && before->triggered == before->blocks)) break;
      while (g.placed < g.blocks && ctas.size() < resident) place(g, g.placed);
      if (g.placed < g.blocks) break;
      ++next_grid;
    }
    if (chance(one_in_copy)) finish_some_bulk();
    if (!sleepers.empty() && (ready.empty() || chance(512))) {
      if (ready.empty() && !finish_some_bulk()) {
        if (idle_from == progress && ++idle_rounds > 3000) {
          print_waits();
          current = nullptr;
          fail("nothing but sleepers: they wait for ever");
        }
        if (idle_from != progress) idle_from = progress, idle_rounds = 0;
      }
      for (Fiber* f : sleepers) f->state = State::ready, ready.push_back(f);
      sleepers.clear();
    }
    if (ready.empty()) {
      if (finish_some_bulk()) continue;
      if (ctas.empty() && next_grid == queue.size()) break;
      if (ctas.empty()) continue;
      print_waits();
      current = nullptr;
      fail("deadlock");
    }
    const size_t i = random64() % ready.size();
    Fiber* f = ready[i];
    ready[i] = ready.back();
    ready.pop_back();
    current = f;
    f->state = State::running;
    emu_switch(&scheduler_sp, f->sp);
    if (f->state == State::done) {
      ++progress;
      if (--f->cta->live == 0) retire(f->cta);
    }
    current = nullptr;
  }
  queue.clear();
}

void wait_for_earlier_kernels(Where where) {
  Grid* before = me().cta->grid->before;
  if (!before) return;
  while (!before->complete()) {
    before->waiters.push_back(&me());
    block("griddepcontrol.wait", where);
  }
}
void let_next_kernel_start() { trigger(me().cta); }  // by the first thread: more than the device allows

}  // namespace emu
