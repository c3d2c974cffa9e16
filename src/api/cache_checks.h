#pragma once
#include "fold/cache_layout.h"
#include "plan/decode_params.h"

namespace fold::api {

/// Checks a page pool and describes it to the backends.
plan::CacheView cache_view(const CacheStorage& cache);

/// Every page of a request's first `keys` keys must exist in the pool. table: the request's row of the block table.
void require_pages(const plan::CacheView& cache, int64_t request, const int32_t* table, int64_t max_pages,
                   int64_t keys);

}  // namespace fold::api
