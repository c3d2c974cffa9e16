#include "fold/page_table.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <new>
#include <utility>

namespace fold {
namespace {

[[noreturn]] void fail(const char* what, int64_t got, const std::string& allowed) {
  throw Error(Error::Kind::value, what, std::to_string(got), allowed);
}

int64_t next_id() {
  static std::atomic<int64_t> last{0};
  return ++last;
}

}  // namespace

PageTable::PageTable(int64_t num_pages, int64_t page_size, int64_t max_len) : page_size_(page_size), max_len_(max_len) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (num_pages < 0 || num_pages > kMost) fail("num_pages", num_pages, "allowed: 0 to 2147483647");
  if (page_size < 1 || page_size > kMost) fail("page_size", page_size, "at least 1");
  if (max_len < 1 || max_len > kMost) fail("max_len", max_len, "allowed: 1 to 2147483647");
  Pool& pool = pool_.own();
  try {
    pool.references.resize(num_pages);
    pool.free.resize(num_pages);
  } catch (const std::bad_alloc&) {
    fail("num_pages", num_pages, "memory for a table of that many pages");
  }
  pool.free_count = num_pages;
  for (int64_t i = 0; i < num_pages; ++i) pool.free[i] = static_cast<int32_t>(num_pages - 1 - i);
}

const PageTable::Request& PageTable::find(int64_t id) const {
  const auto it = std::ranges::lower_bound(requests_, id, {}, &Request::id);
  if (it == requests_.end() || it->id != id) fail("request", id, "a request of this cache that has not been freed");
  return *it;
}

void PageTable::check_distinct(std::span<const int64_t> ids, size_t values) const {
  if (values != ids.size()) fail("ids", static_cast<int64_t>(ids.size()), std::to_string(values) + ", one per value");
  std::vector<int64_t> sorted(ids.begin(), ids.end());
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) fail("request", *twice, "each request once in a call");
  for (const int64_t id : ids) find(id);
}

void PageTable::check_length(const char* what, int64_t got, int64_t most) const {
  if (got < 0 || got > most) fail(what, got, "allowed: 0 to " + std::to_string(most));
}

int32_t PageTable::Pool::take() noexcept {
  const int32_t page = free[--free_count];
  references[page] = 1;
  return page;
}

void PageTable::Pool::release(int32_t page) noexcept {
  if (--references[page] == 0) free[free_count++] = page;
}

int64_t PageTable::add_request() { return add_request({}, 0); }

int64_t PageTable::add_request(std::span<const int32_t> pages, int64_t length) {
  check_length("length", length, max_len_);
  if (static_cast<int64_t>(pages.size()) != pages_for(length)) {
    fail("pages", static_cast<int64_t>(pages.size()), std::to_string(pages_for(length)) + " for this length");
  }
  std::vector<int32_t> sorted(pages.begin(), pages.end());
  std::sort(sorted.begin(), sorted.end());
  if (!sorted.empty() && (sorted.front() < 0 || sorted.back() >= num_pages())) {
    fail("page", sorted.front() < 0 ? sorted.front() : sorted.back(), "below " + std::to_string(num_pages()));
  }
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) fail("page", *twice, "each page once in a request");
  for (const Request& other : requests_) {
    for (size_t i = 0; i < other.pages->size(); ++i) {
      const int32_t page = (*other.pages)[i];
      const bool shared = std::binary_search(sorted.begin(), sorted.end(), page);
      if (shared && (i >= pages.size() || pages[i] != page)) {
        fail("page", page, "the same place in every request that holds it");
      }
    }
  }
  Pool* const pool = sorted.empty() ? nullptr : &pool_.own();
  const int64_t id = next_id();
  requests_.push_back({id, length, CopyOnWrite(std::vector<int32_t>(pages.begin(), pages.end()))});
  if (pool == nullptr) return id;
  for (const int32_t page : sorted) ++pool->references[page];
  const auto free_end = std::remove_if(pool->free.begin(), pool->free.begin() + pool->free_count,
                                       [pool](int32_t page) { return pool->references[page] > 0; });
  pool->free_count = free_end - pool->free.begin();
  return id;
}

void PageTable::free_request(int64_t id) {
  const auto it = requests_.begin() + (&find(id) - requests_.data());
  Pool& pool = pool_.own();
  for (const int32_t page : *it->pages) pool.release(page);
  requests_.erase(it);
}

std::vector<PageTable::Copy> PageTable::extend(std::span<const int64_t> ids, std::span<const int64_t> tokens) {
  check_distinct(ids, tokens.size());
  // First pass: what it takes. `leaving` counts the requests of this call that give up a page they share.
  std::map<int32_t, int32_t> leaving;
  std::vector<size_t> copied, grown;  // indices into ids
  int64_t needed = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const Request& request = std::as_const(*this).find(ids[i]);
    check_length("tokens", tokens[i], max_len_ - request.length);
    const int64_t more = pages_for(request.length + tokens[i]) - static_cast<int64_t>(request.pages->size());
    if (more > 0) grown.push_back(i);
    needed += more;
    if (tokens[i] > 0 && request.length % page_size_ != 0) {
      const int32_t last = request.pages->back();
      if (pool_->references[last] > 1 && pool_->references[last] - leaving[last] > 1) {
        ++leaving[last];
        copied.push_back(i);
        ++needed;
      }
    }
  }
  if (needed > free_pages()) {
    fail("pages needed", needed, "free: " + std::to_string(free_pages()) + " of " + std::to_string(num_pages()));
  }
  std::vector<Copy> copies;
  copies.reserve(copied.size());
  Pool* const pool = needed > 0 ? &pool_.own() : nullptr;
  for (const size_t i : copied) find(ids[i]).pages.own();
  for (const size_t i : grown) find(ids[i]).pages.own().reserve(pages_for(find(ids[i]).length + tokens[i]));

  // Second pass: nothing below throws.
  for (const size_t i : copied) {
    int32_t& last = find(ids[i]).pages.own().back();
    copies.push_back({last, pool->take()});
    --pool->references[last];
    last = copies.back().destination;
  }
  for (size_t i = 0; i < ids.size(); ++i) find(ids[i]).length += tokens[i];
  for (const size_t i : grown) {
    Request& request = find(ids[i]);
    std::vector<int32_t>& pages = request.pages.own();
    while (static_cast<int64_t>(pages.size()) < pages_for(request.length)) pages.push_back(pool->take());
  }
  return copies;
}

void PageTable::truncate(std::span<const int64_t> ids, std::span<const int64_t> lengths) {
  check_distinct(ids, lengths.size());
  for (size_t i = 0; i < ids.size(); ++i) check_length("length", lengths[i], find(ids[i]).length);
  std::vector<size_t> shrunk;  // indices into ids
  for (size_t i = 0; i < ids.size(); ++i) {
    if (static_cast<int64_t>(find(ids[i]).pages->size()) > pages_for(lengths[i])) shrunk.push_back(i);
  }
  Pool* const pool = shrunk.empty() ? nullptr : &pool_.own();
  for (const size_t i : shrunk) find(ids[i]).pages.own();

  // Nothing below throws.
  for (size_t i = 0; i < ids.size(); ++i) find(ids[i]).length = lengths[i];
  for (const size_t i : shrunk) {
    std::vector<int32_t>& pages = find(ids[i]).pages.own();
    while (static_cast<int64_t>(pages.size()) > pages_for(lengths[i])) {
      pool->release(pages.back());
      pages.pop_back();
    }
  }
}

int64_t PageTable::fork(int64_t id, int64_t length) {
  const Request& parent = find(id);
  if (length == -1) length = parent.length;
  check_length("length", length, parent.length);
  CopyOnWrite pages(std::vector<int32_t>(parent.pages->begin(), parent.pages->begin() + pages_for(length)));
  Pool& pool = pool_.own();
  const int64_t child = next_id();
  requests_.push_back({child, length, std::move(pages)});
  for (const int32_t page : *requests_.back().pages) ++pool.references[page];
  return child;
}

std::vector<int64_t> PageTable::requests() const {
  std::vector<int64_t> ids;
  ids.reserve(requests_.size());
  for (const Request& request : requests_) ids.push_back(request.id);
  return ids;
}

void PageTable::write_tables(std::span<const int64_t> ids, int64_t width, int32_t* out, int32_t* lengths) const {
  for (const int64_t id : ids) {
    const auto got = static_cast<int64_t>(find(id).pages->size());
    if (got > width) fail("block_table width", width, "at least " + std::to_string(got));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::vector<int32_t>& pages = *find(ids[i]).pages;
    int32_t* row = out + static_cast<int64_t>(i) * width;
    std::fill(std::copy(pages.begin(), pages.end(), row), row + width, -1);
  }
  write_lengths(ids, lengths);
}

void PageTable::write_lengths(std::span<const int64_t> ids, int32_t* lengths) const {
  for (size_t i = 0; i < ids.size(); ++i) lengths[i] = static_cast<int32_t>(length(ids[i]));
}

}  // namespace fold
