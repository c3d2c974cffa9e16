#pragma once
#include "plan/decode_params.h"

namespace fold::cpu {

/// Where the rows of one request go: row j at element offset j * stride_t + head * stride_h.
struct RowsOut {
  void* data;  // (keys, HK, D)
  DType dtype;
  int64_t stride_t, stride_h;
};

/// Keys 0 .. keys-1 of a request at their finest reading, rotated back. table: page ids of the request.
void cache_read(const plan::CacheView& cache, const int32_t* table, int64_t keys, const RowsOut& k, const RowsOut& v);

}  // namespace fold::cpu
