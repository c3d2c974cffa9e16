#include "cpu/cache_write.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "api/backend.h"
#include "api/cache_checks.h"
#include "api/checks.h"
#include "fold/launch.h"
#include "plan/cache_access.h"

namespace fold {
namespace {

using api::fail_value;
using std::to_string;

std::string at(const char* name, int64_t i) { return std::string(name) + "[" + to_string(i) + "]"; }

/// Slots of one page that belong to a request's unfinished or new blocks: no other request may have a part in them.
struct PageUse {
  int32_t page;
  int64_t begin, end, request;
};

/// A contiguous vector of `size` elements; its data.
template <typename T>
const T* vector_of(const char* name, const TensorView& x, DType dtype, int64_t size, const char* meaning) {
  api::require_tensor(name, x, 1, {dtype});
  api::require_size(name, x, 0, size, meaning);
  api::require_contiguous(name, x);
  return x.as<const T>();
}

/// Tokens of a request that are not padding.
int64_t real_tokens(const plan::CacheWriteParams& p, int64_t b) {
  if (p.slot_mapping == nullptr) return p.cu_seqlens[b + 1] - p.cu_seqlens[b];
  int64_t count = 0;
  for (int64_t t = p.cu_seqlens[b]; t < p.cu_seqlens[b + 1]; ++t) {
    if (p.slot_mapping[t] < -1) fail_value(at("slot_mapping", t), to_string(p.slot_mapping[t]), "-1 (padding) or more");
    count += p.slot_mapping[t] >= 0;
  }
  return count;
}

/// Every slot must be where block_table puts the token's position.
void check_slots(const plan::CacheWriteParams& p, int64_t b, const int32_t* table) {
  if (p.slot_mapping == nullptr) return;
  const int64_t page_size = p.cache.layout.page_size;
  int64_t position = p.seqlens[b];
  for (int64_t t = p.cu_seqlens[b]; t < p.cu_seqlens[b + 1]; ++t) {
    if (p.slot_mapping[t] < 0) continue;
    const int64_t slot = table[position / page_size] * page_size + position % page_size;
    if (p.slot_mapping[t] != slot) {
      fail_value(at("slot_mapping", t), to_string(p.slot_mapping[t]),
                 "block_table puts position " + to_string(position) + " of request " + to_string(b) + " at " +
                     to_string(slot));
    }
    ++position;
  }
}

void check_requests(const plan::CacheWriteParams& p, int64_t max_pages) {
  const int64_t page_size = p.cache.layout.page_size;
  std::vector<PageUse> uses;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t length = p.seqlens[b];
    if (length < 0) fail_value(at("seqlens", b), to_string(length), "at least 0");
    const int64_t count = real_tokens(p, b), end = length + count;
    if (count == 0) continue;
    if (end > std::numeric_limits<int32_t>::max()) {
      fail_value("keys of request " + to_string(b), to_string(end), "at most 2147483647");
    }
    // A fit reads everything up to its mark; otherwise only pages that receive keys are touched.
    const bool fits = p.cache.layout.tail && plan::next_mark(length) <= end;
    const int32_t* table = p.block_table + b * p.block_table_stride;
    api::require_pages(p.cache, b, table, max_pages, end, fits ? 0 : length);
    check_slots(p, b, table);
    for (int64_t key = length / numerics::kTile * numerics::kTile; key < end; key = (key / page_size + 1) * page_size) {
      const int64_t page_begin = key / page_size * page_size;
      uses.push_back({table[key / page_size], key - page_begin, std::min(page_size, end - page_begin), b});
    }
  }
  std::sort(uses.begin(), uses.end(),
            [](const PageUse& x, const PageUse& y) { return x.page != y.page ? x.page < y.page : x.begin < y.begin; });
  for (size_t i = 1; i < uses.size(); ++i) {
    const PageUse &x = uses[i - 1], &y = uses[i];
    if (x.page == y.page && y.begin < x.end) {
      fail_value("page of request " + to_string(y.request), to_string(y.page),
                 "request " + to_string(x.request) + " writes the same slots of it");
    }
  }
}

/// A call whose shapes, types and strides are right. What its tensors hold has not been looked at.
struct Call {
  Call(const CacheStorage& cache_given, const CacheWriteArgs& args_given) : cache(cache_given), args(args_given) {
    place = api::take_place({{"storage", &cache.storage},
                             {"k", &args.k},
                             {"v", &args.v},
                             {"block_table", &args.block_table},
                             {"seqlens", &args.seqlens},
                             {"cu_seqlens", &args.cu_seqlens},
                             {"slot_mapping", &args.slot_mapping}});
    plan::CacheWriteParams& p = params;
    p.cache = api::cache_view(cache);
    if (place.device == Device::cuda) api::require_device_pages(p.cache);
    api::require_tensor("k", args.k, 3, api::kFloatTypes);
    const int64_t tokens = args.k.shape[0];
    api::set_rows(p, args.k, args.v, tokens);

    api::require_tensor("block_table", args.block_table, 2, {DType::i32});
    api::require_last_contiguous("block_table", args.block_table);
    p.batch = args.block_table.shape[0];
    p.block_table = args.block_table.as<const int32_t>();
    p.block_table_stride = args.block_table.strides[0];
    p.seqlens = vector_of<int32_t>("seqlens", args.seqlens, DType::i32, p.batch, "batch of block_table");
    p.cu_seqlens = vector_of<int32_t>("cu_seqlens", args.cu_seqlens, DType::i32, p.batch + 1, "batch + 1");
    if (args.slot_mapping.defined()) {
      p.slot_mapping = vector_of<int64_t>("slot_mapping", args.slot_mapping, DType::i64, tokens, "tokens of k");
    }
    bounds = {.tokens = tokens, .max_pages = args.block_table.shape[1]};
  }

  /// For an error of the driver.
  std::string text() const {
    return "cache_write, k " + api::shape_text(args.k) + ", block_table " + api::shape_text(args.block_table);
  }

  CacheStorage cache;
  CacheWriteArgs args;
  api::Place place;
  plan::CacheWriteParams params{};
  plan::CacheWriteBounds bounds{};
};

}  // namespace

int64_t cache_write_workspace(const CacheStorage& cache, const CacheWriteArgs& args) {
  const Call call(cache, args);
  if (call.place.device == Device::cpu) return 0;
  return api::cuda_backend(call.place).cache_write_workspace(call.params, call.bounds);
}

void cache_write(const CacheStorage& cache, const CacheWriteArgs& args) { cache_write(cache, args, {}); }

void cache_write(const CacheStorage& cache, const CacheWriteArgs& args, const Launch& launch) {
  const Call call(cache, args);
  if (call.place.device == Device::cpu) {
    api::check_cu_seqlens(call.params.cu_seqlens, call.params.batch, call.bounds.tokens);
    check_requests(call.params, call.bounds.max_pages);
    return cpu::cache_write(call.params);
  }
  if (call.bounds.tokens > std::numeric_limits<int32_t>::max()) {
    fail_value("k.shape", api::shape_text(call.args.k), "fewer than 2^31 tokens");
  }
  const plan::Backend& backend = api::cuda_backend(call.place);
  const plan::LaunchParams where =
      api::checked_launch(launch, call.place, backend.cache_write_workspace(call.params, call.bounds));
  api::require_launched([&] { return call.text(); }, call.place, backend.cache_write(call.params, call.bounds, where));
}

}  // namespace fold
