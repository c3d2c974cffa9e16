#include "fold/page_table.h"

#include <algorithm>
#include <atomic>
#include <limits>
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
  try {
    references_.resize(num_pages);
    free_.resize(num_pages);
  } catch (const std::bad_alloc&) {
    fail("num_pages", num_pages, "memory for a table of that many pages");
  }
  free_count_ = num_pages;
  for (int64_t i = 0; i < num_pages; ++i) free_[i] = static_cast<int32_t>(num_pages - 1 - i);
}

const PageTable::Request& PageTable::find(int64_t id) const {
  const auto it = requests_.find(id);
  if (it == requests_.end()) fail("request", id, "a request of this cache that has not been freed");
  return it->second;
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

int32_t PageTable::take() noexcept {
  const int32_t page = free_[--free_count_];
  references_[page] = 1;
  return page;
}

void PageTable::release(int32_t page) noexcept {
  if (--references_[page] == 0) free_[free_count_++] = page;
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
  for (const auto& [other_id, other] : requests_) {
    for (size_t i = 0; i < other.pages.size(); ++i) {
      const bool shared = std::binary_search(sorted.begin(), sorted.end(), other.pages[i]);
      if (shared && (i >= pages.size() || pages[i] != other.pages[i])) {
        fail("page", other.pages[i], "the same place in every request that holds it");
      }
    }
  }
  const int64_t id = next_id();
  requests_.emplace(id, Request{length, {pages.begin(), pages.end()}});
  for (const int32_t page : sorted) ++references_[page];
  const auto free_end = std::remove_if(free_.begin(), free_.begin() + free_count_,
                                       [this](int32_t page) { return references_[page] > 0; });
  free_count_ = free_end - free_.begin();
  return id;
}

void PageTable::free_request(int64_t id) {
  for (const int32_t page : find(id).pages) release(page);
  requests_.erase(id);
}

std::vector<PageTable::Copy> PageTable::extend(std::span<const int64_t> ids, std::span<const int64_t> tokens) {
  check_distinct(ids, tokens.size());
  // First pass: what it takes. `leaving` counts the requests of this call that give up a page they share.
  std::map<int32_t, int32_t> leaving;
  std::vector<size_t> copied;  // indices into ids
  int64_t needed = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    Request& request = find(ids[i]);
    check_length("tokens", tokens[i], max_len_ - request.length);
    const int64_t pages = pages_for(request.length + tokens[i]);
    needed += pages - static_cast<int64_t>(request.pages.size());
    if (tokens[i] > 0 && request.length % page_size_ != 0) {
      const int32_t last = request.pages.back();
      if (references_[last] - leaving[last] > 1) {
        ++leaving[last];
        copied.push_back(i);
        ++needed;
      }
    }
    request.pages.reserve(pages);
  }
  if (needed > free_pages()) {
    fail("pages needed", needed, "free: " + std::to_string(free_pages()) + " of " + std::to_string(num_pages()));
  }
  std::vector<Copy> copies;
  copies.reserve(copied.size());

  // Second pass: nothing below throws.
  for (const size_t i : copied) {
    int32_t& last = find(ids[i]).pages.back();
    copies.push_back({last, take()});
    --references_[last];
    last = copies.back().destination;
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    Request& request = find(ids[i]);
    request.length += tokens[i];
    while (static_cast<int64_t>(request.pages.size()) < pages_for(request.length)) request.pages.push_back(take());
  }
  return copies;
}

void PageTable::truncate(std::span<const int64_t> ids, std::span<const int64_t> lengths) {
  check_distinct(ids, lengths.size());
  for (size_t i = 0; i < ids.size(); ++i) check_length("length", lengths[i], find(ids[i]).length);
  for (size_t i = 0; i < ids.size(); ++i) {
    Request& request = find(ids[i]);
    request.length = lengths[i];
    while (static_cast<int64_t>(request.pages.size()) > pages_for(lengths[i])) {
      release(request.pages.back());
      request.pages.pop_back();
    }
  }
}

int64_t PageTable::fork(int64_t id, int64_t length) {
  const Request& parent = find(id);
  if (length == -1) length = parent.length;
  check_length("length", length, parent.length);
  Request child{length, {parent.pages.begin(), parent.pages.begin() + pages_for(length)}};
  const int64_t child_id = next_id();
  const auto it = requests_.emplace(child_id, std::move(child)).first;
  for (const int32_t page : it->second.pages) ++references_[page];
  return child_id;
}

std::vector<int64_t> PageTable::requests() const {
  std::vector<int64_t> ids;
  ids.reserve(requests_.size());
  for (const auto& [id, request] : requests_) ids.push_back(id);
  return ids;
}

void PageTable::write_tables(std::span<const int64_t> ids, int64_t width, int32_t* out, int32_t* lengths) const {
  for (const int64_t id : ids) {
    const auto got = static_cast<int64_t>(find(id).pages.size());
    if (got > width) fail("block_table width", width, "at least " + std::to_string(got));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    const Request& request = find(ids[i]);
    int32_t* row = out + static_cast<int64_t>(i) * width;
    std::fill(std::copy(request.pages.begin(), request.pages.end(), row), row + width, -1);
    lengths[i] = static_cast<int32_t>(request.length);
  }
}

}  // namespace fold
