#include "api/cache_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "api/checks.h"

namespace fold::api {
namespace {

std::string room_for(int64_t page_bytes) {
  return "memory for that many pages of " + std::to_string(page_bytes) + " bytes";
}

/// Bytes of so many pages and `more`, below 2^63.
int64_t pool_bytes(int64_t pages, int64_t page_bytes, int64_t more) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(pages, page_bytes, &bytes) || __builtin_add_overflow(bytes, more, &bytes)) {
    fail_value("num_pages", std::to_string(pages), room_for(page_bytes));
  }
  return bytes;
}

/// Asks the system for large pages, as numpy does for the arrays that Python's caches lie in: a step reads a little
/// here and there, and where a row is takes as long to find as the row itself. Nothing depends on the answer.
void prefer_large_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096;
  constexpr int64_t kSmall = int64_t{4} << 20;
  const auto first = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  if (bytes >= kSmall) madvise(reinterpret_cast<void*>(first), static_cast<size_t>(bytes) - kPage, MADV_HUGEPAGE);
#endif
}

/// Committed by the system where it is first touched, large pools in pieces of up to 2 MB.
class HostMemory final : public CacheMemory {
 public:
  HostMemory(int64_t pages, int64_t page_bytes)
      : memory_(std::calloc(static_cast<size_t>(pool_bytes(pages, page_bytes, kAlignment)), 1)) {
    if (memory_ == nullptr) fail_value("num_pages", std::to_string(pages), room_for(page_bytes));
    prefer_large_pages(memory_.get(), pages * page_bytes);
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    auto* const first = static_cast<uint8_t*>(memory_.get()) + (kAlignment - address % kAlignment) % kAlignment;
    pages_ = TensorView(first, DType::u8, {pages, page_bytes});
  }

  TensorView pages() const override { return pages_; }
  void copy(void* to, const void* from, int64_t bytes) override { std::memcpy(to, from, static_cast<size_t>(bytes)); }
  void wait() override {}
  int32_t* place_words(std::vector<int32_t>& words) override { return words.data(); }
  Launch launch(int64_t) override { return {}; }
  void drop_workspace() override {}
  void set_stream(void*) override {}

 private:
  static constexpr int64_t kAlignment = 128;  // where the sections of a page start

  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  TensorView pages_;
};

class DeviceMemory final : public CacheMemory {
 public:
  DeviceMemory(const Place& place, int64_t pages, int64_t page_bytes)
      : place_(place), backend_(cuda_backend(place)), pool_(*this), workspace_(*this), words_(*this) {
    const int64_t bytes = pool_bytes(pages, page_bytes, 0);
    if (const char* refusal = pool_.take(bytes)) {
      fail_value("num_pages", std::to_string(pages),
                 room_for(page_bytes) + " on " + place_text(place) + " (" + refusal + ")");
    }
    if (bytes > 0) require("the pages", backend_.clear(pool_.data, bytes, params()));
    wait();  // the caller's streams know nothing of this one
    pages_ = on_device(TensorView(pool_.data, DType::u8, {pages, page_bytes}));
  }

  ~DeviceMemory() override {
    // Pages, words and workspace may be in use until here. Nobody could be told of a failure.
    backend_.wait(params());
  }

  TensorView pages() const override { return pages_; }
  void copy(void* to, const void* from, int64_t bytes) override {
    if (bytes > 0) require("a copy of pages", backend_.copy(to, from, bytes, params()));
  }
  void wait() override { require("the stream's work", backend_.wait(params())); }

  /// Only words that differ from what is there travel.
  int32_t* place_words(std::vector<int32_t>& words) override {
    const auto count = static_cast<int64_t>(words.size());
    const int64_t bytes = count * int64_t{sizeof(int32_t)};
    if (bytes > words_.bytes) there_.clear();
    require("memory for the tables", words_.take(bytes));
    changes_.clear();
    for (size_t i = 0; i < words.size(); ++i) {
      if (i >= there_.size() || there_[i] != words[i]) changes_.push_back({static_cast<int32_t>(i), words[i]});
    }
    auto* const at = static_cast<int32_t*>(words_.data);
    require("the tables", backend_.set_words(at, changes_.data(), static_cast<int64_t>(changes_.size()), params()));
    if (there_.size() < words.size()) there_.resize(words.size());
    std::copy(words.begin(), words.end(), there_.begin());
    return at;
  }

  Launch launch(int64_t workspace_bytes) override {
    require("a workspace of " + std::to_string(workspace_bytes) + " bytes", workspace_.take(workspace_bytes));
    return {.stream = stream_, .workspace = on_device(TensorView(workspace_.data, DType::u8, {workspace_.bytes}))};
  }
  void drop_workspace() override { workspace_.release(); }

  void set_stream(void* stream) override { stream_ = stream; }

 private:
  /// A piece of the device's memory.
  struct Piece {
    explicit Piece(DeviceMemory& owner_given) : owner(owner_given) {}
    Piece(const Piece&) = delete;
    Piece& operator=(const Piece&) = delete;
    ~Piece() { release(); }

    /// At least so many bytes: null, or why not.
    const char* take(int64_t wanted) {
      if (wanted <= bytes) return nullptr;
      release();
      const char* refusal = owner.backend_.allocate(wanted, &data, owner.params());
      if (refusal == nullptr) bytes = wanted;
      return refusal;
    }
    void release() noexcept {
      if (data != nullptr) owner.backend_.release(data, owner.params());
      data = nullptr;
      bytes = 0;
    }

    DeviceMemory& owner;
    void* data = nullptr;
    int64_t bytes = 0;
  };

  plan::LaunchParams params() const { return {.device = place_.index, .stream = stream_, .workspace = nullptr}; }

  void require(const std::string& what, const char* refusal) const {
    require_launched("KVCache, " + what, place_, refusal);
  }

  TensorView on_device(TensorView view) const {
    view.device = place_.device;
    view.device_index = place_.index;
    return view;
  }

  const Place place_;
  const plan::Backend& backend_;
  void* stream_ = nullptr;
  Piece pool_, workspace_, words_;
  TensorView pages_;
  std::vector<int32_t> there_;             // what words_ holds
  std::vector<plan::WordChange> changes_;  // of one call
};

}  // namespace

std::unique_ptr<CacheMemory> make_cache_memory(const Place& place, int64_t pages, int64_t page_bytes) {
  if (place.device == Device::cpu) return std::make_unique<HostMemory>(pages, page_bytes);
  return std::make_unique<DeviceMemory>(place, pages, page_bytes);
}

}  // namespace fold::api
