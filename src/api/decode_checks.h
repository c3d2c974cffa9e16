#pragma once
#include "api/checks.h"
#include "fold/decode.h"
#include "plan/decode_params.h"

// What is checked of the arguments of a decode. The views behind the params must outlive them.
namespace fold::api {

/// Shapes, types and strides; what the tensors hold is not looked at.
plan::DecodeParams shaped_decode(const CacheStorage& cache, const DecodeArgs& args);

/// The same for a GPU, which copies rows in pieces of 16 bytes.
plan::DecodeParams device_decode(const CacheStorage& cache, const DecodeArgs& args);

/// Shapes, and what the tensors hold: lengths, page ids, draft masks, depths.
plan::DecodeParams checked_decode(const CacheStorage& cache, const DecodeArgs& args);

/// Where the results go.
void set_results(plan::DecodeParams& params, const DecodeResults& results);

/// Where the sums over the keys [begin, end) go. look: whether lengths may be read to check the edges.
void set_partial(plan::DecodeParams& params, int64_t begin, int64_t end, const Partial& sums, bool look);

struct PartialView {
  int64_t *numerator, *denominator;  // (B, T, H, D), (B, T, H, 3)
  float* grid;                       // (B, T, H, 3)
};

/// A partial of this size, or of its own.
PartialView checked_partial(const Partial& partial, int64_t batch, int64_t tokens, int64_t heads, int64_t head_dim);
PartialView checked_partial(const Partial& partial);

/// out (B, T, H, D).
void check_output(const TensorView& out, int64_t batch, int64_t tokens, int64_t heads, int64_t head_dim);

/// A contiguous result tensor; its data, or null where it is not asked for.
template <typename T>
T* result(const char* name, const TensorView& t, DType dtype, std::initializer_list<int64_t> shape) {
  if (!t.defined()) return nullptr;
  require_tensor(name, t, static_cast<int>(shape.size()), {dtype});
  int dim = 0;
  for (const int64_t size : shape) require_size(name, t, dim++, size, "shape of the call");
  require_contiguous(name, t);
  return t.as<T>();
}

}  // namespace fold::api
