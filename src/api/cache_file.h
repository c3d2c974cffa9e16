#pragma once
#include <string>

#include "fold/kv_cache.h"
#include "fold/safetensors.h"

// A saved cache: a safetensors file whose metadata are the options, with the tensors `pages` (n, bytes) u8, each page
// that a request holds once; `block_table` (requests, max) i32 into them, -1 past a request's pages; `lengths`
// (requests,) i64; and `sinks` (n_heads,) f32 if there are any.
namespace fold::api {

void save_cache(const std::string& path, const KVCacheOptions& options, const CacheStorage& cache,
                const PageTable& table);

/// Opens and checks such a file, all but the bytes of its pages.
class CacheFile {
 public:
  explicit CacheFile(const std::string& path);

  const KVCacheOptions& options() const { return options_; }

  /// The requests, in the saved order, in the first pages of a pool of options().num_pages.
  const PageTable& table() const { return table_; }

  /// Reads the pages into the first pages of the storage.
  void read_pages(const CacheStorage& cache);

 private:
  TensorFile file_;
  KVCacheOptions options_;
  PageTable table_;
};

/// The options with num_pages filled in, checked.
KVCacheOptions checked_options(const KVCacheOptions& options);

}  // namespace fold::api
