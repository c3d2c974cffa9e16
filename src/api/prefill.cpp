#include <algorithm>
#include <vector>

#include "api/attention_checks.h"
#include "api/backend.h"
#include "api/cache_checks.h"
#include "api/checks.h"
#include "cpu/cache_read.h"
#include "cpu/forward.h"
#include "fold/launch.h"

// Attention of a chunk: all its keys are laid out as whole sequences, and attention over whole sequences does the rest.
namespace fold {
namespace {

using api::fail_value;
using api::require_size;
using api::require_tensor;

/// Copies rows first .. last-1 of `from` (strides free) to rows (n, heads, D), contiguous.
void copy_rows(const TensorView& from, int64_t first, int64_t last, char* to) {
  const int64_t size = dtype_size(from.dtype), heads = from.shape[1], row_bytes = from.shape[2] * size;
  for (int64_t t = first; t < last; ++t) {
    for (int64_t h = 0; h < heads; ++h, to += row_bytes) {
      const char* source = from.as<char>() + (t * from.strides[0] + h * from.strides[1]) * size;
      std::copy(source, source + row_bytes, to);
    }
  }
}

class Call {
 public:
  Call(const CacheStorage& cache, const PrefillArgs& args, const TensorView& out, const TensorView& lse)
      : cache_(cache), args_(args), out_(out), lse_(lse) {
    place_ = api::take_place({{"storage", &cache_.storage},
                              {"q", &args_.q},
                              {"k", &args_.k},
                              {"v", &args_.v},
                              {"cu_seqlens", &args_.cu_seqlens},
                              {"block_table", &args_.block_table},
                              {"seqlens", &args_.seqlens},
                              {"sinks", &args_.sinks},
                              {"out", &out_},
                              {"lse", &lse_}});
    view_ = api::cache_view(cache_);
    check_chunk();
    AttentionOptions options;
    options.causal = true;
    options.window_left = args_.window_left;
    options.sinks = args_.sinks;
    options.cu_seqlens_q = options.cu_seqlens_k = args_.cu_seqlens;
    if (args_.softmax_scale != 0) options.softmax_scale = args_.softmax_scale;
    chunk_ = api::forward_params(args_.q, args_.k, args_.v, out_, lse_, options, place_);
  }

  int64_t workspace() const {
    if (place_.device == Device::cpu) return 0;
    return sections().attention + backend().attention_forward_workspace(chunk_);
  }

  void run(const Launch& launch) const {
    if (place_.device == Device::cpu) return run_on_host();
    plan::LaunchParams where = api::checked_launch(launch, place_, workspace());
    const Sections at = sections();
    auto* const base = static_cast<uint8_t*>(where.workspace);
    where.workspace = base + at.attention;
    const auto text = [this] {
      return "prefill_attention, q " + api::shape_text(args_.q) + ", block_table " + api::shape_text(args_.block_table);
    };
    plan::ForwardParams attention = chunk_;
    if (cached_keys() > 0) {
      auto* const starts = reinterpret_cast<int32_t*>(base);
      api::require_launched(text, place_, backend().prefill_keys(keys(starts, base + at.k, base + at.v), where));
      attention = over(base + at.k, base + at.v, starts, rows());
    }
    api::require_launched(text, place_, backend().attention_forward(attention, where));
  }

 private:
  /// Where the workspace's parts start, in bytes; the first is key_starts.
  struct Sections {
    int64_t k, v, attention;
  };

  int64_t batch() const { return args_.seqlens.shape[0]; }
  int64_t tokens() const { return args_.q.shape[0]; }
  int64_t row() const { return cache_.layout.n_kv_heads * cache_.layout.head_dim; }
  const plan::Backend& backend() const { return api::cuda_backend(place_); }

  void check_chunk() const {
    require_tensor("q", args_.q, 3, api::kFloatTypes);
    for (const auto& [name, rows] : {std::pair("k", args_.k), std::pair("v", args_.v)}) {
      require_tensor(name, rows, 3, {args_.q.dtype});
      require_size(name, rows, 0, tokens(), "tokens of q");
      require_size(name, rows, 1, cache_.layout.n_kv_heads, "the cache's n_kv_heads");
      require_size(name, rows, 2, cache_.layout.head_dim, "the cache's head_dim");
      api::require_last_contiguous(name, rows);
    }
    require_tensor("seqlens", args_.seqlens, 1, {DType::i32});
    api::require_contiguous("seqlens", args_.seqlens);
    require_tensor("block_table", args_.block_table, 2, {DType::i32});
    require_size("block_table", args_.block_table, 0, batch(), "requests of seqlens");
    api::require_last_contiguous("block_table", args_.block_table);
    require_tensor("cu_seqlens", args_.cu_seqlens, 1, {DType::i32});
    require_size("cu_seqlens", args_.cu_seqlens, 0, batch() + 1, "requests + 1");
    api::require_contiguous("cu_seqlens", args_.cu_seqlens);
    if (args_.cached_keys < -1) fail_value("cached_keys", std::to_string(args_.cached_keys), "-1 (not known) or more");
    if (place_.device == Device::cpu) {
      return api::check_cu_seqlens(args_.cu_seqlens.as<const int32_t>(), batch(), tokens());
    }
    if (const int64_t keys = rows(); keys >= plan::kMostDeviceRows) {
      fail_value("keys of the chunk's requests", std::to_string(keys),
                 "on " + api::place_text(place_) + " below " + std::to_string(plan::kMostDeviceRows) +
                     "; cached_keys says how many are cached");
    }
  }

  /// The most that the requests hold between them, as far as is known without a look.
  int64_t cached_keys() const {
    const int64_t room = batch() * args_.block_table.shape[1] * cache_.layout.page_size;
    return args_.cached_keys < 0 ? room : std::min(room, args_.cached_keys);
  }

  /// Of all keys, on a device.
  int64_t rows() const { return cached_keys() + tokens(); }

  Sections sections() const {
    if (cached_keys() == 0) return {};
    const int64_t starts = api::whole_part((batch() + 1) * int64_t{sizeof(int32_t)});
    const int64_t all = api::whole_part(rows() * row() * dtype_size(args_.q.dtype));
    return {.k = starts, .v = starts + all, .attention = starts + 2 * all};
  }

  plan::PrefillKeysParams keys(int32_t* starts, void* k, void* v) const {
    return {.cache = view_,
            .block_table = args_.block_table.as<const int32_t>(),
            .block_table_stride = args_.block_table.strides[0],
            .max_pages = args_.block_table.shape[1],
            .batch = batch(),
            .seqlens = args_.seqlens.as<const int32_t>(),
            .cu_seqlens = args_.cu_seqlens.as<const int32_t>(),
            .k = args_.k.data,
            .v = args_.v.data,
            .dtype = args_.q.dtype,
            .k_stride_t = args_.k.strides[0],
            .k_stride_h = args_.k.strides[1],
            .v_stride_t = args_.v.strides[0],
            .v_stride_h = args_.v.strides[1],
            .tokens = tokens(),
            .key_starts = starts,
            .keys = k,
            .values = v,
            .rows = rows()};
  }

  /// The chunk's attention over these keys. k, v: (rows, HK, D), contiguous
  plan::ForwardParams over(void* k, void* v, const int32_t* starts, int64_t rows) const {
    plan::ForwardParams p = chunk_;
    p.k = {k, 0, row(), cache_.layout.head_dim};
    p.v = {v, 0, row(), cache_.layout.head_dim};
    p.cu_seqlens_k = starts;
    p.total_k = p.seqlen_k = rows;
    return p;
  }

  void run_on_host() const {
    const auto* lengths = args_.seqlens.as<const int32_t>();
    const auto* tokens = args_.cu_seqlens.as<const int32_t>();
    const auto table = [&](int64_t b) {
      return args_.block_table.as<const int32_t>() + b * args_.block_table.strides[0];
    };
    std::vector<int32_t> starts{0};
    int64_t keys = 0;
    for (int64_t b = 0; b < batch(); ++b) {
      if (lengths[b] < 0) fail_value("seqlens[" + std::to_string(b) + "]", std::to_string(lengths[b]), "at least 0");
      api::require_pages(view_, b, table(b), args_.block_table.shape[1], lengths[b]);
      keys += lengths[b] + (tokens[b + 1] - tokens[b]);
      if (keys > INT32_MAX) fail_value("keys of the chunk's requests", std::to_string(keys), "below 2^31");
      starts.push_back(static_cast<int32_t>(keys));
    }
    const int64_t cached = keys - tokens[batch()];
    if (args_.cached_keys >= 0 && cached > args_.cached_keys) {
      fail_value("cached_keys", std::to_string(args_.cached_keys),
                 "at least what the requests hold, " + std::to_string(cached));
    }
    if (cached == 0) return cpu::attention_forward(chunk_);

    const DType type = args_.q.dtype;
    const int64_t row_bytes = row() * dtype_size(type);
    std::vector<char> k(keys * row_bytes), v(keys * row_bytes);
    for (int64_t b = 0; b < batch(); ++b) {
      const int64_t first = starts[b] * row_bytes, own = first + lengths[b] * row_bytes;
      const auto rows = [&](std::vector<char>& to) {
        return cpu::RowsOut{to.data() + first, type, row(), cache_.layout.head_dim};
      };
      cpu::cache_read(view_, table(b), lengths[b], rows(k), rows(v));
      copy_rows(args_.k, tokens[b], tokens[b + 1], k.data() + own);
      copy_rows(args_.v, tokens[b], tokens[b + 1], v.data() + own);
    }
    cpu::attention_forward(over(k.data(), v.data(), starts.data(), keys));
  }

  CacheStorage cache_;
  PrefillArgs args_;
  TensorView out_, lse_;
  api::Place place_;
  plan::CacheView view_{};
  plan::ForwardParams chunk_{};  // attention over the chunk's own keys, as given
};

}  // namespace

int64_t prefill_attention_workspace(const CacheStorage& cache, const PrefillArgs& args, const TensorView& out,
                                    const TensorView& lse) {
  return Call(cache, args, out, lse).workspace();
}

void prefill_attention(const CacheStorage& cache, const PrefillArgs& args, const TensorView& out, const TensorView& lse,
                       const Launch& launch) {
  Call(cache, args, out, lse).run(launch);
}

void prefill_attention(const CacheStorage& cache, const PrefillArgs& args, const TensorView& out,
                       const TensorView& lse) {
  prefill_attention(cache, args, out, lse, {});
}

}  // namespace fold
