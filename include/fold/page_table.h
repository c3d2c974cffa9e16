#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "fold/error.h"

namespace fold {

/// A value that copies share until one of them changes it. Copies may be used by different threads.
template <typename T>
class CopyOnWrite {
 public:
  explicit CopyOnWrite(T value = {}) : value_(std::make_shared<T>(std::move(value))) {}
  CopyOnWrite(const CopyOnWrite&) = default;  // no moves, which would leave nothing behind
  CopyOnWrite& operator=(const CopyOnWrite&) = default;

  const T& operator*() const { return *value_; }
  const T* operator->() const { return value_.get(); }

  /// To be changed: nobody else sees it.
  T& own() {
    if (value_.use_count() > 1) value_ = std::make_shared<T>(*value_);
    std::atomic_thread_fence(std::memory_order_acquire);  // who shared it before has looked at it for the last time
    return *value_;
  }

 private:
  std::shared_ptr<T> value_;
};

/// Which pages hold which request's keys: lengths and reference-counted page ids, no tensor memory.
///
/// Requests come and go (continuous batching) and may share pages: a fork shares every page of its prefix, and a page
/// that two requests hold is copied when one of them writes to it. Pages that receive no new keys are never written.
///
/// Every call either succeeds or throws fold::Error and changes nothing. Copies of a table are independent, so a caller
/// may extend a copy, write the keys, and keep the copy only if that worked; a copy costs as much as there are
/// requests, whatever these hold, and its first call that takes or gives up a page as much as there are pages.
/// Not safe for concurrent use.
class FOLD_API PageTable {
 public:
  /// A page whose contents must be copied before the new keys are written.
  struct Copy {
    int32_t source, destination;
    bool operator==(const Copy&) const = default;
  };

  /// num_pages: size of the pool (0 .. 2^31 - 1). page_size: keys a page. max_len: most keys a request may hold.
  PageTable(int64_t num_pages, int64_t page_size, int64_t max_len);

  /// An empty request. Ids are never used twice in a process, so an id that was freed, or that another table gave out,
  /// is refused by every call.
  int64_t add_request();

  /// Adds a request that holds `length` keys in these pages, ceil(length / page_size) of them. A page that other
  /// requests hold too must be the same page of theirs.
  int64_t add_request(std::span<const int32_t> pages, int64_t length);

  void free_request(int64_t id);

  /// Makes room for tokens[i] >= 0 new keys of request ids[i] (ids distinct). The copies returned are to be performed,
  /// in any order, before any of the new keys is written. A request that needs no other page shares its list of pages
  /// with the copies of this table.
  std::vector<Copy> extend(std::span<const int64_t> ids, std::span<const int64_t> tokens);

  /// Shortens request ids[i] to lengths[i] keys (ids distinct).
  void truncate(std::span<const int64_t> ids, std::span<const int64_t> lengths);

  /// A new request that shares the first `length` keys of `id` (-1: all of them).
  int64_t fork(int64_t id, int64_t length = -1);

  int64_t length(int64_t id) const { return find(id).length; }

  /// Page ids in order of position.
  std::span<const int32_t> pages(int64_t id) const { return *find(id).pages; }

  /// The requests, in the order in which they were added.
  std::vector<int64_t> requests() const;

  /// out: (ids.size(), width) i32, contiguous; entries past a request's pages are -1. lengths: (ids.size(),) i32.
  void write_tables(std::span<const int64_t> ids, int64_t width, int32_t* out, int32_t* lengths) const;
  /// The lengths alone.
  void write_lengths(std::span<const int64_t> ids, int32_t* lengths) const;

  int64_t num_pages() const { return static_cast<int64_t>(pool_->references.size()); }
  int64_t free_pages() const { return pool_->free_count; }
  int64_t page_size() const { return page_size_; }
  int64_t max_len() const { return max_len_; }
  int64_t max_pages() const { return pages_for(max_len_); }  ///< most pages a request may hold

 private:
  struct Request {
    int64_t id, length;
    CopyOnWrite<std::vector<int32_t>> pages;
  };
  struct Pool {
    std::vector<int32_t> references;  // (num_pages,): requests that hold a page
    std::vector<int32_t> free;        // (num_pages,): the first free_count are free; the last of them is used next
    int64_t free_count;

    int32_t take() noexcept;
    void release(int32_t page) noexcept;
  };

  int64_t pages_for(int64_t keys) const { return (keys + page_size_ - 1) / page_size_; }
  const Request& find(int64_t id) const;
  Request& find(int64_t id) { return const_cast<Request&>(std::as_const(*this).find(id)); }
  void check_distinct(std::span<const int64_t> ids, size_t values) const;
  void check_length(const char* what, int64_t got, int64_t most) const;

  int64_t page_size_, max_len_;
  CopyOnWrite<Pool> pool_;
  std::vector<Request> requests_;  // ordered by id, which is the order of addition
};

}  // namespace fold
