#pragma once
#include <memory>
#include <vector>

#include "api/backend.h"

namespace fold::api {

/// The pages of a cache that owns them, and what else its calls need where they lie. On a device everything happens in
/// the order of one stream.
class CacheMemory {
 public:
  virtual ~CacheMemory() = default;

  virtual TensorView pages() const = 0;  ///< (pages, page_bytes) u8, contiguous, at first zero

  /// Either side may be the host's memory, which stays as it is until wait() where the pages lie on a device.
  virtual void copy(void* to, const void* from, int64_t bytes) = 0;
  virtual void wait() = 0;

  /// Where the operations of a call find these words. The caller keeps them as they are until the call's end.
  virtual int32_t* place_words(std::vector<int32_t>& words) = 0;

  /// For an operation that needs a workspace of so many bytes. It is kept, as large as the largest that was asked for,
  /// until it is dropped.
  virtual Launch launch(int64_t workspace_bytes) = 0;
  virtual void drop_workspace() = 0;

  virtual void set_stream(void* stream) = 0;
};

/// Throws fold::Error if there is no such place, or no room.
std::unique_ptr<CacheMemory> make_cache_memory(const Place& place, int64_t pages, int64_t page_bytes);

}  // namespace fold::api
