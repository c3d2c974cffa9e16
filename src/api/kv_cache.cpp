#include "fold/kv_cache.h"

#include <cstdlib>
#include <cstring>

#include "api/cache_file.h"
#include "api/checks.h"

namespace fold {
namespace {

constexpr size_t kAlignment = 128;  // where the sections of a page start

/// Zeroed memory that the system commits when it is first touched.
void* lazy_memory(int64_t pages, int64_t page_bytes) {
  int64_t bytes = 0;
  void* memory = nullptr;
  if (!__builtin_mul_overflow(pages, page_bytes, &bytes) && bytes < INT64_MAX - int64_t{kAlignment}) {
    memory = std::calloc(static_cast<size_t>(bytes) + kAlignment, 1);
  }
  if (memory == nullptr) {
    api::fail_value("num_pages", std::to_string(pages),
                    "memory for that many pages of " + std::to_string(page_bytes) + " bytes");
  }
  return memory;
}

/// Tokens that each request brings. cu_seqlens: (requests + 1,) i32
std::vector<int64_t> token_counts(const TensorView& cu_seqlens, size_t requests) {
  api::require_tensor("cu_seqlens", cu_seqlens, 1, {DType::i32});
  api::require_size("cu_seqlens", cu_seqlens, 0, static_cast<int64_t>(requests) + 1, "requests + 1");
  api::require_contiguous("cu_seqlens", cu_seqlens);
  const auto* starts = cu_seqlens.as<const int32_t>();
  std::vector<int64_t> tokens;
  for (size_t i = 0; i < requests; ++i) tokens.push_back(int64_t{starts[i + 1]} - starts[i]);
  return tokens;
}

template <typename T>
TensorView view_of(std::vector<T>& values, DType dtype, std::initializer_list<int64_t> shape) {
  return {values.data(), dtype, shape};
}

}  // namespace

/// The rows of the page table that a call is about.
struct KVCache::Tables {
  std::vector<int64_t> ids;
  std::vector<int32_t> block_table;  // (ids, width)
  std::vector<int32_t> lengths;      // (ids,)
  TensorView block_table_view, lengths_view;
};

void KVCache::Free::operator()(void* p) const { std::free(p); }

KVCache::KVCache(const KVCacheOptions& options)
    : options_(api::checked_options(options)),
      sections_(page_sections(options_.layout)),
      table_(options_.num_pages, options_.layout.page_size, options_.max_len),
      memory_(lazy_memory(options_.num_pages, sections_.bytes)) {
  const auto address = reinterpret_cast<uintptr_t>(memory_.get());
  pages_ = static_cast<uint8_t*>(memory_.get()) + (kAlignment - address % kAlignment) % kAlignment;
  for (int64_t i = 0; i < options_.batch; ++i) table_.add_request();
}

KVCache KVCache::load(const std::string& path) {
  api::CacheFile file(path);
  KVCache cache(file.options());
  file.read_pages(cache.storage());
  cache.table_ = file.table();
  return cache;
}

void KVCache::save(const std::string& path) const { api::save_cache(path, options_, storage(), table_); }

CacheStorage KVCache::storage() const {
  return {options_.layout, TensorView(pages_, DType::u8, {options_.num_pages, sections_.bytes})};
}

KVCache::Tables KVCache::tables(const PageTable& table, Ids ids) const {
  Tables t;
  t.ids = ids.empty() ? table.requests() : std::vector<int64_t>(ids.begin(), ids.end());
  const auto rows = static_cast<int64_t>(t.ids.size());
  int64_t width = 0;
  for (const int64_t id : t.ids) width = std::max(width, static_cast<int64_t>(table.pages(id).size()));
  t.block_table.resize(rows * width);
  t.lengths.resize(rows);
  table.write_tables(t.ids, width, t.block_table.data(), t.lengths.data());
  t.block_table_view = view_of(t.block_table, DType::i32, {rows, width});
  t.lengths_view = view_of(t.lengths, DType::i32, {rows});
  return t;
}

DecodeArgs KVCache::complete(const DecodeArgs& call, const Tables& tables) const {
  DecodeArgs args = call;
  api::require_tensor("q", args.q, 4, api::kFloatTypes);
  api::require_size("q", args.q, 2, options_.n_heads, "the cache's n_heads");
  args.block_table = tables.block_table_view;
  args.seqlens = tables.lengths_view;
  if (!args.depth.defined()) args.depth = TensorView(const_cast<float*>(&options_.depth), DType::f32, {1});
  if (!args.sinks.defined() && !options_.sinks.empty()) {
    args.sinks = TensorView(const_cast<float*>(options_.sinks.data()), DType::f32, {options_.n_heads});
  }
  if (args.softmax_scale == 0) args.softmax_scale = options_.softmax_scale;
  if (args.window_left == -1) args.window_left = options_.window_left;
  return args;
}

PageTable KVCache::extended(const std::vector<int64_t>& ids, const std::vector<int64_t>& tokens) const {
  PageTable next = table_;
  for (const PageTable::Copy& copy : next.extend(ids, tokens)) {
    std::memcpy(pages_ + copy.destination * sections_.bytes, pages_ + copy.source * sections_.bytes, sections_.bytes);
  }
  return next;
}

void KVCache::write_prompt(const TensorView& k, const TensorView& v, const TensorView& cu_seqlens, Ids ids) {
  const Tables before = tables(table_, ids);
  PageTable next = extended(before.ids, token_counts(cu_seqlens, before.ids.size()));
  const Tables after = tables(next, before.ids);
  cache_write(storage(), {.k = k,
                          .v = v,
                          .block_table = after.block_table_view,
                          .seqlens = before.lengths_view,
                          .cu_seqlens = cu_seqlens,
                          .slot_mapping = {}});
  table_ = std::move(next);
}

void KVCache::prefill(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& cu_seqlens,
                      const TensorView& out, const TensorView& lse, Ids ids) {
  const Tables before = tables(table_, ids);
  api::require_tensor("q", q, 3, api::kFloatTypes);
  api::require_size("q", q, 1, options_.n_heads, "the cache's n_heads");
  PageTable(table_).extend(before.ids, token_counts(cu_seqlens, before.ids.size()));  // throws if there is no room
  const TensorView sinks =
      options_.sinks.empty() ? TensorView() : TensorView(options_.sinks.data(), DType::f32, {options_.n_heads});
  prefill_attention(storage(),
                    {.q = q,
                     .k = k,
                     .v = v,
                     .cu_seqlens = cu_seqlens,
                     .block_table = before.block_table_view,
                     .seqlens = before.lengths_view,
                     .sinks = sinks,
                     .softmax_scale = options_.softmax_scale,
                     .window_left = options_.window_left},
                    out, lse);
  write_prompt(k, v, cu_seqlens, before.ids);
}

void KVCache::append(const TensorView& k, const TensorView& v, Ids ids) {
  api::require_tensor("k", k, 3, api::kFloatTypes);
  const auto requests = static_cast<int64_t>(ids.empty() ? table_.requests().size() : ids.size());
  if (requests == 0 || k.shape[0] % requests != 0) {
    api::fail_value("k.shape", api::shape_text(k), "as many tokens for each of " + std::to_string(requests));
  }
  if (k.shape[0] > INT32_MAX) api::fail_value("k.shape", api::shape_text(k), "fewer than 2^31 tokens");
  std::vector<int32_t> cu_seqlens;
  for (int64_t i = 0; i <= requests; ++i) cu_seqlens.push_back(static_cast<int32_t>(i * (k.shape[0] / requests)));
  write_prompt(k, v, view_of(cu_seqlens, DType::i32, {requests + 1}), ids);
}

void KVCache::attend(const DecodeArgs& call, const DecodeResults& results, Ids ids) const {
  const Tables t = tables(table_, ids);
  fold::decode(storage(), complete(call, t), results);
}

void KVCache::decode(const DecodeArgs& call, const TensorView& k, const TensorView& v, const DecodeResults& results,
                     Ids ids) {
  const Tables before = tables(table_, ids);
  DecodeArgs args = complete(call, before);
  std::vector<int64_t> tokens(before.ids.size(), call.q.shape[1]);
  if (call.q_lens.defined()) {
    api::require_tensor("q_lens", call.q_lens, 1, {DType::i32});
    api::require_size("q_lens", call.q_lens, 0, static_cast<int64_t>(tokens.size()), "requests");
    api::require_contiguous("q_lens", call.q_lens);
    tokens.assign(call.q_lens.as<const int32_t>(), call.q_lens.as<const int32_t>() + tokens.size());
  }
  PageTable next = extended(before.ids, tokens);
  const Tables after = tables(next, before.ids);
  args.block_table = after.block_table_view;
  decode_step(storage(), {.k = k, .v = v, .slot_mapping = {}, .decode = args}, results);
  table_ = std::move(next);
}

void KVCache::partial(const DecodeArgs& call, int64_t begin, int64_t end, const Partial& result, Ids ids) const {
  const Tables t = tables(table_, ids);
  fold::partial(storage(), complete(call, t), begin, end, result);
}

}  // namespace fold
