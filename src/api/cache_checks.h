#pragma once
#include "fold/cache_layout.h"
#include "plan/decode_params.h"

namespace fold::api {

/// Checks a page pool and describes it to the backends.
plan::CacheView cache_view(const CacheStorage& cache);

/// Checks that pages start at multiples of 16 bytes, as many as a device copies at once.
void require_device_pages(const plan::CacheView& cache);

/// Checks k and v, (tokens, HK, D), and says where they are.
void set_rows(plan::CacheWriteParams& params, const TensorView& k, const TensorView& v, int64_t tokens);

/// The query heads are a multiple of the KV heads, 1 to 64 times as many.
void require_heads(int64_t heads, int64_t kv_heads);

/// softmax_scale * log2(e) in fp32, which must be finite; a softmax_scale of 0 stands for 1 / sqrt(head_dim).
float log2_scale(double softmax_scale, int64_t head_dim);

/// A draft tree has at most 64 nodes.
void require_tree_nodes(int64_t nodes);

/// cu (batch + 1,) starts at 0, does not decrease, and ends within the tokens of k.
void check_cu_seqlens(const int32_t* cu, int64_t batch, int64_t tokens);

/// Every page of a request's keys [first_key, keys) must exist in the pool. table: the request's row of the block
/// table.
void require_pages(const plan::CacheView& cache, int64_t request, const int32_t* table, int64_t max_pages, int64_t keys,
                   int64_t first_key = 0);

}  // namespace fold::api
