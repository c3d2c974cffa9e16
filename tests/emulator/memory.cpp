#include <cstdlib>

#include "state.h"

// Shared memory, mbarriers and copies that take their time.
namespace emu {
namespace {

Mbarrier& mbarrier(Cta* cta, uint32_t at, Where where) {
  const auto found = cta->mbarriers.find(at);
  if (found == cta->mbarriers.end()) fail("not an mbarrier", where);
  uint64_t now;
  std::memcpy(&now, cta->arena + (at - kSharedBase), 8);
  if (now != found->second.pattern) fail("an mbarrier was overwritten", where);
  return found->second;
}
void check_phase(Mbarrier& m) {
  if (m.pending != 0 || m.bytes != 0) return;
  ++m.phase;
  m.pending = m.count;
  wake_all(m.waiters);
}

void finish_copy(const Copy& c) {
  if (c.kept != 0) std::memcpy(c.to, c.from, c.kept);
  std::memset(c.to + c.kept, 0, c.bytes - c.kept);
}

void finish_bulk(Cta* cta, size_t i) {
  const Bulk b = cta->bulks[i];
  cta->bulks[i] = cta->bulks.back();
  cta->bulks.pop_back();
  for (const Copy& c : b.copies) finish_copy(c);
  Mbarrier& m = mbarrier(cta, b.barrier, Where::current());
  if (b.arrivals > m.pending) fail("more arrivals than the mbarrier's phase expects");
  m.bytes -= b.bytes;
  m.pending -= b.arrivals;
  check_phase(m);
  ++progress;
}
}  // namespace

bool finish_some_bulk() {
  std::vector<Cta*> with;
  for (Cta* cta : ctas) {
    if (!cta->bulks.empty()) with.push_back(cta);
  }
  if (with.empty()) return false;
  Cta* cta = with[random64() % with.size()];
  finish_bulk(cta, random64() % cta->bulks.size());
  return true;
}

namespace {

/// Whether the bytes are device memory.
void check_global(const void* p, size_t bytes, const char* what, Where where) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  auto next = allocations.upper_bound(at);
  if (next != allocations.begin()) {
    --next;
    if (at + bytes <= next->first + next->second) return;
  }
  fail(what, where);
}

}  // namespace

void* shared_variable(const void* id, size_t bytes, size_t alignment) {
  Cta* cta = me().cta;
  auto [at, fresh] = cta->variables.try_emplace(id, nullptr);
  if (fresh) {
    cta->used = (cta->used + alignment - 1) / alignment * alignment;
    at->second = cta->arena + cta->used;
    cta->used += bytes;
    if (cta->used > kStatic) fail("static shared memory");
  }
  return at->second;
}
uint8_t* dynamic_shared() { return me().cta->arena + kStatic; }
uint32_t shared_address(const void* p) {
  const auto offset = static_cast<const uint8_t*>(p) - me().cta->arena;
  if (offset < 0 || offset > static_cast<ptrdiff_t>(kStatic + me().cta->shared)) fail("not in shared memory");
  return kSharedBase + static_cast<uint32_t>(offset);
}
uint8_t* shared_pointer(uint32_t address, uint32_t bytes, uint32_t alignment, Where where) {
  Cta* cta = me().cta;
  if (address < kSharedBase || address - kSharedBase + bytes > kStatic + cta->shared) fail("past shared memory", where);
  if (address % alignment != 0) fail("a shared address is not aligned", where);
  return cta->arena + (address - kSharedBase);
}

void init_mbarrier(uint32_t at, uint32_t count, Where where) {
  Cta* cta = me().cta;
  uint8_t* p = shared_pointer(at, 8, 8, where);
  if (cta->mbarriers.count(at)) fail("an mbarrier is initialised twice", where);
  Mbarrier& m = cta->mbarriers[at];
  m.count = m.pending = count;
  m.pattern = random64();
  std::memcpy(p, &m.pattern, 8);
}
void invalidate_mbarrier(uint32_t at, Where where) {
  Cta* cta = me().cta;
  Mbarrier& m = mbarrier(cta, at, where);
  if (!m.waiters.empty()) fail("an mbarrier that is waited for is invalidated", where);
  if (m.bytes != 0) fail("an mbarrier that expects bytes is invalidated", where);
  cta->mbarriers.erase(at);
}
void arrive(uint32_t at, uint32_t count, uint32_t bytes, Where where) {
  maybe_yield();
  Mbarrier& m = mbarrier(me().cta, at, where);
  if (count > m.pending) fail("more arrivals than the mbarrier's phase expects", where);
  m.bytes += bytes;
  m.pending -= count;
  check_phase(m);
  maybe_yield();
}
bool phase_is_over(uint32_t at, uint32_t parity, Where where) {
  maybe_yield();
  Mbarrier& m = mbarrier(me().cta, at, where);
  return (m.phase & 1) != parity;
}
void wait_phase(uint32_t at, uint32_t parity, Where where) {
  maybe_yield();
  while (true) {
    Mbarrier& m = mbarrier(me().cta, at, where);
    if ((m.phase & 1) != parity) return;
    m.waiters.push_back(&me());
    block("an mbarrier", where);
  }
}

namespace {

/// Its place holds garbage until it is done. kept: bytes that are read, zeros follow.
Copy start_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t kept, uint32_t alignment, Where where) {
  uint8_t* const p = shared_pointer(to, bytes, alignment, where);
  if (reinterpret_cast<uintptr_t>(from) % alignment != 0) fail("a copy is not aligned", where);
  if (kept != 0) check_global(from, kept, "a copy reads past device memory", where);
  std::memset(p, kGarbage ^ 0xFF, bytes);
  return {p, static_cast<const uint8_t*>(from), bytes, kept, -1};
}

/// Copies that the mbarrier was told of by their bytes.
void start_bulk(std::vector<Copy> copies, uint32_t at, Where where) {
  uint32_t bytes = 0;
  for (const Copy& c : copies) bytes += c.bytes;
  Cta* cta = me().cta;
  if (mbarrier(cta, at, where).bytes < bytes) fail("a copy of more bytes than its mbarrier expects", where);
  cta->bulks.push_back({std::move(copies), bytes, 0, at});
}

}  // namespace

void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t at, Where where) {
  if (bytes % 16 != 0) fail("a bulk copy is not aligned", where);
  start_bulk({start_copy(to, from, bytes, bytes, 16, where)}, at, where);
}

void copy_pieces(const std::vector<Piece>& pieces, uint32_t at, Where where) {
  std::vector<Copy> copies;
  for (const Piece& piece : pieces) {
    copies.push_back(start_copy(piece.to, piece.from, 16, piece.from != nullptr ? 16 : 0, 16, where));
  }
  start_bulk(std::move(copies), at, where);
}

void copy_async(uint32_t to, const void* from, uint32_t bytes, uint32_t kept, Where where) {
  const Copy c = start_copy(to, from, bytes, kept, bytes, where);
  if (chance(4)) {
    finish_copy(c);
  } else {
    me().copies.push_back(c);
  }
}
void arrive_when_copied(uint32_t at, Where where) {
  mbarrier(me().cta, at, where);
  me().cta->bulks.push_back({std::move(me().copies), 0, 1, at});
  me().copies.clear();
}
void commit_copies() {
  Fiber& f = me();
  for (Copy& c : f.copies) {
    if (c.group < 0) c.group = f.committed;
  }
  ++f.committed;
}
void wait_copies(int but, Where) {
  Fiber& f = me();
  std::erase_if(f.copies, [&](const Copy& c) {
    const bool waited = but < 0 || (c.group >= 0 && c.group < f.committed - but);
    if (waited || chance(4))
      finish_copy(c);
    else
      return false;
    return true;
  });
}

void bulk_add(void* to, uint32_t from, uint32_t bytes, Where where) {
  const uint8_t* const values = shared_pointer(from, bytes, 16, where);
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0) fail("a bulk addition is not aligned", where);
  check_global(to, bytes, "a bulk addition past device memory", where);
  me().additions.add([=] {
    for (uint32_t i = 0; i < bytes / 4; ++i) {
      uint32_t value;
      std::memcpy(&value, values + 4 * i, 4);
      __atomic_fetch_add(static_cast<uint32_t*>(to) + i, value, __ATOMIC_RELAXED);
    }
  });
}
void commit_additions() { me().additions.commit(); }
void wait_additions(int but) { me().additions.wait(but); }

void Later::add(std::function<void()> work) {
  groups_.back().push_back(std::move(work));
  if (!chance(4)) return;
  for (auto& group : groups_) {
    for (const auto& each : group) each();
    group.clear();
  }
}
void Later::wait(int but) {
  while (groups_.size() > 1 && (static_cast<int>(groups_.size()) - 1 > but || chance(4))) {
    for (const auto& work : groups_.front()) work();
    groups_.pop_front();
  }
}

}  // namespace emu
