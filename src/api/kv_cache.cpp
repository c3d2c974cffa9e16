#include "fold/kv_cache.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "api/cache_checks.h"
#include "api/cache_file.h"
#include "api/cache_memory.h"
#include "api/checks.h"

namespace fold {
namespace {

/// A tensor that lies where the cache does, which the operations check.
void require_rows(const char* name, TensorView t, int ndim) {
  t.device = Device::cpu;
  api::require_tensor(name, t, ndim, api::kFloatTypes);
}

/// (size,) numbers that the host reads.
std::span<const int32_t> host_numbers(const char* name, const TensorView& t, size_t size, const char* meaning) {
  api::require_tensor(name, t, 1, {DType::i32});
  api::require_size(name, t, 0, static_cast<int64_t>(size), meaning);
  api::require_contiguous(name, t);
  return {t.as<const int32_t>(), size};
}

/// cu_seqlens: (requests + 1,), of the rows of k
std::span<const int32_t> checked_starts(const TensorView& cu_seqlens, size_t requests, const TensorView& k) {
  require_rows("k", k, 3);
  const std::span<const int32_t> starts = host_numbers("cu_seqlens", cu_seqlens, requests + 1, "requests + 1");
  api::check_cu_seqlens(starts.data(), static_cast<int64_t>(requests), k.shape[0]);
  return starts;
}

/// The numbers of such a tensor, none where it is not given.
std::span<const int32_t> given_numbers(const TensorView& t) {
  if (!t.defined()) return {};
  return {t.as<const int32_t>(), static_cast<size_t>(t.shape[0])};
}

/// Tokens that each request brings.
std::vector<int64_t> token_counts(std::span<const int32_t> starts) {
  std::vector<int64_t> tokens;
  for (size_t i = 1; i < starts.size(); ++i) tokens.push_back(int64_t{starts[i]} - starts[i - 1]);
  return tokens;
}

}  // namespace

/// What the operations of a call are told beside its tensors, where they look for it. On a device it holds until the
/// next call's, on the CPU as long as this lives.
struct KVCache::Tables {
  std::vector<int32_t> words;
  TensorView depth, sinks;          // (1,) and (H,) f32: the cache's
  TensorView lengths, block_table;  // (B,) keys before the call; (B, width)
  TensorView counts;                // as given, or undefined
};

KVCache::KVCache(const KVCacheOptions& options)
    : options_(api::checked_options(options)),
      table_(options_.num_pages, options_.layout.page_size, options_.max_len),
      memory_(api::make_cache_memory({options_.device, options_.device_index}, options_.num_pages,
                                     page_sections(options_.layout).bytes)) {
  for (int64_t i = 0; i < options_.batch; ++i) table_.add_request();
}

KVCache::KVCache(KVCache&&) noexcept = default;
KVCache& KVCache::operator=(KVCache&&) noexcept = default;
KVCache::~KVCache() = default;

KVCache KVCache::load(const std::string& path, Device device, int device_index) {
  api::CacheFile file(path);
  KVCacheOptions options = file.options();
  options.device = device;
  options.device_index = device_index;
  KVCache cache(options);
  if (device == Device::cpu) {
    file.read_pages(cache.storage());
  } else {
    const TensorView pages = cache.memory_->pages();
    const int64_t used = file.table().num_pages() - file.table().free_pages();
    const auto read = api::make_cache_memory({}, used, pages.shape[1]);
    file.read_pages({options.layout, read->pages()});
    cache.memory_->copy(pages.data, read->pages().data, used * pages.shape[1]);
    cache.memory_->wait();
  }
  cache.table_ = file.table();
  return cache;
}

void KVCache::save(const std::string& path) const {
  if (options_.device == Device::cpu) return api::save_cache(path, options_, storage(), table_);
  const TensorView pages = memory_->pages();
  const int64_t bytes = pages.shape[1];
  const auto copy = api::make_cache_memory({}, pages.shape[0], bytes);
  for (const int64_t id : table_.requests()) {
    for (const int64_t page : table_.pages(id)) {
      memory_->copy(copy->pages().as<uint8_t>() + page * bytes, pages.as<uint8_t>() + page * bytes, bytes);
    }
  }
  memory_->wait();
  api::save_cache(path, options_, {options_.layout, copy->pages()}, table_);
}

void KVCache::set_stream(void* stream) { memory_->set_stream(stream); }

CacheStorage KVCache::storage() const { return {options_.layout, memory_->pages()}; }

std::vector<int64_t> KVCache::chosen(Ids ids) const {
  return ids.empty() ? table_.requests() : std::vector<int64_t>(ids.begin(), ids.end());
}

KVCache::Tables KVCache::tables(const std::vector<int64_t>& ids, const PageTable& pages,
                                std::span<const int32_t> counts) const {
  size_t most = 0;
  for (const int64_t id : ids) most = std::max(most, pages.pages(id).size());
  // A table's width doubles, so that what a device holds of it seldom moves.
  const size_t rows = ids.size(), heads = options_.sinks.size(), width = std::bit_ceil(most);
  const size_t lengths = 1 + heads, given = lengths + rows, table = given + counts.size();
  Tables t;
  t.words.resize(table + rows * width);
  t.words[0] = std::bit_cast<int32_t>(options_.depth);
  for (size_t h = 0; h < heads; ++h) t.words[1 + h] = std::bit_cast<int32_t>(options_.sinks[h]);
  pages.write_tables(ids, static_cast<int64_t>(width), t.words.data() + table, t.words.data() + lengths);
  for (size_t i = 0; i < rows; ++i) t.words[lengths + i] = static_cast<int32_t>(table_.length(ids[i]));
  std::copy(counts.begin(), counts.end(), t.words.begin() + static_cast<int64_t>(given));

  int32_t* const at = memory_->place_words(t.words);
  const auto view = [&](size_t first, DType dtype, std::initializer_list<int64_t> shape) {
    TensorView v(at + first, dtype, shape);
    v.device = options_.device;
    v.device_index = options_.device_index;
    return v;
  };
  const auto size = [](size_t n) { return static_cast<int64_t>(n); };
  if (std::isfinite(options_.depth)) t.depth = view(0, DType::f32, {1});
  if (heads > 0) t.sinks = view(1, DType::f32, {size(heads)});
  t.lengths = view(lengths, DType::i32, {size(rows)});
  t.block_table = view(table, DType::i32, {size(rows), size(width)});
  if (!counts.empty()) t.counts = view(given, DType::i32, {size(counts.size())});
  return t;
}

DecodeArgs KVCache::checked(const DecodeArgs& call, size_t requests) const {
  DecodeArgs args = call;
  require_rows("q", args.q, 4);
  api::require_size("q", args.q, 2, options_.n_heads, "the cache's n_heads");
  if (args.q_lens.defined()) {
    const std::span<const int32_t> q_lens = host_numbers("q_lens", args.q_lens, requests, "requests");
    for (size_t i = 0; i < requests; ++i) {
      if (q_lens[i] >= 0 && q_lens[i] <= args.q.shape[1]) continue;
      api::fail_value("q_lens[" + std::to_string(i) + "]", std::to_string(q_lens[i]),
                      "0.." + std::to_string(args.q.shape[1]));
    }
  }
  if (args.softmax_scale == 0) args.softmax_scale = options_.softmax_scale;
  if (!args.window_left) args.window_left = options_.window_left;
  return args;
}

DecodeArgs KVCache::complete(DecodeArgs args, const Tables& tables) const {
  args.block_table = tables.block_table;
  args.seqlens = tables.lengths;
  if (args.q_lens.defined()) args.q_lens = tables.counts;
  if (!args.depth.defined()) args.depth = tables.depth;
  if (!args.sinks.defined()) args.sinks = tables.sinks;
  return args;
}

PageTable KVCache::extended(const std::vector<int64_t>& ids, const std::vector<int64_t>& tokens) const {
  PageTable next = table_;
  const TensorView pages = memory_->pages();
  const int64_t bytes = pages.shape[1];
  for (const PageTable::Copy& copy : next.extend(ids, tokens)) {
    memory_->copy(pages.as<uint8_t>() + copy.destination * bytes, pages.as<uint8_t>() + copy.source * bytes, bytes);
  }
  return next;
}

void KVCache::write_prompt(const TensorView& k, const TensorView& v, const TensorView& cu_seqlens, Ids ids) {
  const std::vector<int64_t> requests = chosen(ids);
  const std::span<const int32_t> starts = checked_starts(cu_seqlens, requests.size(), k);
  PageTable next = extended(requests, token_counts(starts));
  const Tables t = tables(requests, next, starts);
  const CacheWriteArgs args{
      .k = k, .v = v, .block_table = t.block_table, .seqlens = t.lengths, .cu_seqlens = t.counts, .slot_mapping = {}};
  cache_write(storage(), args, memory_->launch(cache_write_workspace(storage(), args)));
  table_ = std::move(next);
}

void KVCache::prefill(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& cu_seqlens,
                      const TensorView& out, const TensorView& lse, Ids ids) {
  const std::vector<int64_t> requests = chosen(ids);
  require_rows("q", q, 3);
  api::require_size("q", q, 1, options_.n_heads, "the cache's n_heads");
  const std::span<const int32_t> starts = checked_starts(cu_seqlens, requests.size(), k);
  PageTable(table_).extend(requests, token_counts(starts));  // throws if there is no room
  const Tables t = tables(requests, table_, starts);
  int64_t cached = 0;
  for (const int64_t id : requests) cached += table_.length(id);
  const PrefillArgs args{.q = q,
                         .k = k,
                         .v = v,
                         .cu_seqlens = t.counts,
                         .block_table = t.block_table,
                         .seqlens = t.lengths,
                         .sinks = t.sinks,
                         .softmax_scale = options_.softmax_scale,
                         .window_left = options_.window_left,
                         .cached_keys = cached};
  prefill_attention(storage(), args, out, lse, memory_->launch(prefill_attention_workspace(storage(), args, out, lse)));
  memory_->drop_workspace();  // it held the keys
  write_prompt(k, v, cu_seqlens, requests);
}

void KVCache::append(const TensorView& k, const TensorView& v, Ids ids) {
  require_rows("k", k, 3);
  const auto requests = static_cast<int64_t>(chosen(ids).size());
  if (requests == 0 || k.shape[0] % requests != 0) {
    api::fail_value("k.shape", api::shape_text(k), "as many tokens for each of " + std::to_string(requests));
  }
  if (k.shape[0] > INT32_MAX) api::fail_value("k.shape", api::shape_text(k), "fewer than 2^31 tokens");
  std::vector<int32_t> starts;
  for (int64_t i = 0; i <= requests; ++i) starts.push_back(static_cast<int32_t>(i * (k.shape[0] / requests)));
  write_prompt(k, v, TensorView(starts.data(), DType::i32, {requests + 1}), ids);
}

void KVCache::attend(const DecodeArgs& call, const DecodeResults& results, Ids ids) const {
  const std::vector<int64_t> requests = chosen(ids);
  const DecodeArgs given = checked(call, requests.size());
  const Tables t = tables(requests, table_, given_numbers(given.q_lens));
  const DecodeArgs args = complete(given, t);
  fold::decode(storage(), args, results, memory_->launch(decode_workspace(storage(), args)));
}

void KVCache::decode(const DecodeArgs& call, const TensorView& k, const TensorView& v, const DecodeResults& results,
                     Ids ids) {
  const std::vector<int64_t> requests = chosen(ids);
  const DecodeArgs given = checked(call, requests.size());
  const std::span<const int32_t> q_lens = given_numbers(given.q_lens);
  std::vector<int64_t> tokens(requests.size(), given.q.shape[1]);
  if (given.q_lens.defined()) tokens.assign(q_lens.begin(), q_lens.end());
  PageTable next = extended(requests, tokens);
  const Tables t = tables(requests, next, q_lens);
  const StepArgs step{.k = k, .v = v, .slot_mapping = {}, .decode = complete(given, t)};
  decode_step(storage(), step, results, memory_->launch(decode_step_workspace(storage(), step)));
  table_ = std::move(next);
}

void KVCache::partial(const DecodeArgs& call, int64_t begin, int64_t end, const Partial& result, Ids ids) const {
  const std::vector<int64_t> requests = chosen(ids);
  const DecodeArgs given = checked(call, requests.size());
  const Tables t = tables(requests, table_, given_numbers(given.q_lens));
  const DecodeArgs args = complete(given, t);
  fold::partial(storage(), args, begin, end, result, memory_->launch(decode_workspace(storage(), args)));
}

}  // namespace fold
