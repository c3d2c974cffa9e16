#pragma once
#include "cpu/buffer.h"
#include "cpu/cache_kernels.h"
#include "plan/decode_params.h"

namespace fold::cpu {

/// Memory of one thread that computes fits.
class FitScratch {
 public:
  explicit FitScratch(int64_t head_dim);
  const FitBuffers& buffers() const { return buffers_; }

 private:
  Buffer<uint32_t> words_;
  Buffer<int64_t> sums_;
  Buffer<double> matrices_;
  FitBuffers buffers_;
};

/// Computes and stores the fits of one KV head for the marks above `length` and up to `new_length` (docs/numerics.md,
/// section 9). table: the request's pages; every key below new_length and every summary is already stored.
void fit_tail(const plan::CacheView& cache, const int32_t* table, int64_t head, int64_t length, int64_t new_length,
              const CacheKernels& kernels, FitScratch& scratch);

}  // namespace fold::cpu
