#pragma once
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fold/cache_ops.h"
#include "fold/page_table.h"

namespace fold {

namespace api {
class CacheMemory;
}

/// What a cache is made of. Calls may override depth, sinks, softmax_scale and window_left.
struct KVCacheOptions {
  CacheLayout layout;
  int64_t n_heads = 0;    ///< query heads, 1 to 64 per KV head
  int64_t batch = 0;      ///< requests made with the cache
  int64_t max_len = 0;    ///< most keys a request may hold
  int64_t num_pages = 0;  ///< pages of the pool; 0: max_len keys for each of `batch` requests
  float depth = std::numeric_limits<float>::infinity();  ///< log2 of the row's mass; +inf reads every V
  double softmax_scale = 0;                              ///< 0 stands for 1/sqrt(head_dim)
  int64_t window_left = -1;                              ///< keys before its own that a row sees; -1: all
  std::vector<float> sinks{};                            ///< (n_heads,) natural log, or empty
  Device device = Device::cpu;                           ///< where the pages lie
  int device_index = 0;
};

/// A pool of pages and the requests that live in it. On the CPU memory is committed as pages are first written, in
/// a large pool up to 2 MB at a time.
///
/// `ids` names the requests of a call, in order; without it a call takes all of them, in the order of their addition.
/// B = number of requests of the call, T = query tokens each, H = n_heads, HK = n_kv_heads, D = head_dim. In `call`,
/// block_table and seqlens are filled in by the cache, and depth, sinks, softmax_scale and window_left are the cache's
/// where they are not given. Every call throws fold::Error before it changes anything. Not safe for concurrent use.
///
/// Tensors lie where the cache does, but for cu_seqlens and q_lens, which the page table has to know: they are always
/// the host's. On a CUDA device calls run on one stream and wait for nothing but in save(); the tables travel with the
/// launches, so a captured graph would keep those of its capture: capture fold::decode_step on tables of your own.
class FOLD_API KVCache {
 public:
  using Ids = std::span<const int64_t>;

  explicit KVCache(const KVCacheOptions& options);
  KVCache(KVCache&&) noexcept;
  KVCache& operator=(KVCache&&) noexcept;
  ~KVCache();

  static KVCache load(const std::string& path, Device device = Device::cpu, int device_index = 0);

  /// Writes the requests' pages (once where shared), lengths and options as safetensors.
  void save(const std::string& path) const;

  /// The stream (cudaStream_t) of all later calls, at first the device's default stream. It outlives the cache, or the
  /// next set_stream(); who changes streams has the new one wait for the old one.
  void set_stream(void* stream);

  int64_t add_request() { return table_.add_request(); }
  void free_request(int64_t id) { table_.free_request(id); }
  void truncate(int64_t id, int64_t length) { table_.truncate({&id, 1}, {&length, 1}); }

  /// A request that shares the first `length` keys of another (-1: all); shared pages are copied when written.
  int64_t fork(int64_t id, int64_t length = -1) { return table_.fork(id, length); }

  /// Appends packed tokens: k, v (T_total, HK, D); request i of the call brings cu_seqlens[i] .. cu_seqlens[i + 1].
  void write_prompt(const TensorView& k, const TensorView& v, const TensorView& cu_seqlens, Ids ids = {});

  /// The same, and the causal attention of the tokens over what is cached and themselves: q, out (T_total, H, D); lse
  /// (H, T_total) f32 or undefined. On a CUDA device: head dim 64 or 128, bf16 or fp16.
  void prefill(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& cu_seqlens,
               const TensorView& out, const TensorView& lse = {}, Ids ids = {});

  /// Appends the same number of tokens to every request: k, v (B T, HK, D).
  void append(const TensorView& k, const TensorView& v, Ids ids = {});

  /// Attention of each request's newest T tokens: call.q (B, T, H, D).
  void attend(const DecodeArgs& call, const DecodeResults& results, Ids ids = {}) const;

  /// append, then attend: k, v (B T, HK, D). With call.q_lens a request appends its first q_lens[i] tokens alone.
  void decode(const DecodeArgs& call, const TensorView& k, const TensorView& v, const DecodeResults& results,
              Ids ids = {});

  /// A partial sum of attend over the keys [begin, end); see fold::partial.
  void partial(const DecodeArgs& call, int64_t begin, int64_t end, const Partial& result, Ids ids = {}) const;

  const KVCacheOptions& options() const { return options_; }
  const PageTable& table() const { return table_; }
  CacheStorage storage() const;

 private:
  struct Tables;
  std::vector<int64_t> chosen(Ids ids) const;
  Tables tables(const std::vector<int64_t>& ids, const PageTable& pages, std::span<const int32_t> counts = {}) const;
  /// The call as the operations take it, all but its tables; checked as far as the cache alone can.
  DecodeArgs checked(const DecodeArgs& call, size_t requests) const;
  DecodeArgs complete(DecodeArgs call, const Tables& tables) const;
  /// A copy of the table that has room for the tokens; shared pages that they touch have been copied in the storage.
  PageTable extended(const std::vector<int64_t>& ids, const std::vector<int64_t>& tokens) const;

  KVCacheOptions options_;
  PageTable table_;
  std::unique_ptr<api::CacheMemory> memory_;
};

}  // namespace fold
