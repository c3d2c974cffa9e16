#include "cpu/cache_write.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "cpu/cache_kernels.h"
#include "cpu/parallel.h"
#include "cpu/tail_fit.h"
#include "numerics/block.h"
#include "plan/cache_access.h"

namespace fold::cpu {
namespace {

using numerics::kTile;

constexpr int64_t kParallelRows = 64;  ///< rows below which waking other threads costs more than it saves

/// What a call adds to one request. Padding tokens take no position, so new keys are counted without them.
struct Request {
  const int32_t* table;  // its pages
  int64_t length, new_length;
  const int32_t* tokens;  // (new_length - length,) row of k and v of each new key
};

/// New keys of one block of a request: the unit of work. Blocks of a call never share memory.
struct BlockWork {
  const Request* request;
  int64_t block;
};

class Writer {
 public:
  explicit Writer(const plan::CacheWriteParams& params) : p_(params), kernels_(cache_kernels()) {
    tokens_.reserve(params.cu_seqlens[params.batch]);
    for (int64_t b = 0; b < params.batch; ++b) {
      const size_t first = tokens_.size();
      for (int32_t t = params.cu_seqlens[b]; t < params.cu_seqlens[b + 1]; ++t) {
        if (params.slot_mapping == nullptr || params.slot_mapping[t] >= 0) tokens_.push_back(t);
      }
      const int64_t count = static_cast<int64_t>(tokens_.size() - first), length = params.seqlens[b];
      if (count == 0) continue;
      requests_.push_back(
          {params.block_table + b * params.block_table_stride, length, length + count, tokens_.data() + first});
    }
    for (const Request& r : requests_) {
      for (int64_t block = r.length / kTile; block * kTile < r.new_length; ++block) work_.push_back({&r, block});
      if (params.cache.layout.tail && plan::next_mark(r.length) <= r.new_length) fitted_.push_back(&r);
    }
    const int64_t fits = static_cast<int64_t>(fitted_.size()) * params.cache.layout.n_kv_heads;
    for (int64_t i = std::min<int64_t>(fits, omp_get_max_threads()); i > 0; --i) {
      scratch_.emplace_back(params.cache.layout.head_dim);
    }
  }

  void write_blocks() const {
    const int64_t heads = p_.cache.layout.n_kv_heads, units = static_cast<int64_t>(work_.size()) * heads;
    const bool parallel = static_cast<int64_t>(tokens_.size()) * heads >= kParallelRows;
    parallel_for(units, parallel ? omp_get_max_threads() : 1,
                 [&](int64_t unit) { write_block(work_[unit / heads], unit % heads); });
  }

  /// After write_blocks: a fit reads everything below its mark.
  void write_fits() {
    if (fitted_.empty()) return;
    const int64_t heads = p_.cache.layout.n_kv_heads, units = static_cast<int64_t>(fitted_.size()) * heads;
    const int threads = static_cast<int>(scratch_.size());
    parallel_for(units, threads, [&](int64_t unit) {
      const Request& r = *fitted_[unit / heads];
      fit_tail(p_.cache, r.table, unit % heads, r.length, r.new_length, kernels_, scratch_[omp_get_thread_num()]);
    });
  }

 private:
  void write_block(const BlockWork& work, int64_t head) const {
    const Request& r = *work.request;
    const int64_t page_size = p_.cache.layout.page_size, start = work.block * kTile, end = start + kTile;
    const plan::HeadPage page = plan::head_page(p_.cache, r.table[start / page_size], head);
    const int64_t slot = start % page_size;  // of the block's first key
    for (int64_t key = std::max(start, r.length); key < std::min(end, r.new_length); ++key) {
      write_key(page, slot, key - start, r.tokens[key - r.length], head);
    }
    if (r.new_length >= end) summarise(page, slot);
  }

  void write_key(const plan::HeadPage& page, int64_t slot, int64_t key_in_tile, int64_t token, int64_t head) const {
    const int d = static_cast<int>(p_.cache.layout.head_dim);
    const int64_t row = slot + key_in_tile, scale = slot + numerics::scale_slot(static_cast<int>(key_in_tile));
    const auto at = [row](auto* plane, int64_t bytes) { return plane == nullptr ? nullptr : plane + row * bytes; };
    page.k_scale[scale] =
        kernels_.write_row(p_.k, p_.k_dtype, token * p_.k_stride_t + head * p_.k_stride_h, d,
                           {.h = at(page.k_h, d / 2), .l = at(page.k_l, d / 2), .b = at(page.k_b, d)});
    page.v_scale[scale] =
        kernels_.write_row(p_.v, p_.v_dtype, token * p_.v_stride_t + head * p_.v_stride_h, d,
                           {.h = at(page.v_h, d / 2), .l = at(page.v_l, d / 2), .b = at(page.v_b, d)});
  }

  void summarise(const plan::HeadPage& page, int64_t slot) const {
    const int d = static_cast<int>(p_.cache.layout.head_dim);
    const int64_t block = slot / kTile;
    page.bound[block] = numerics::block_bound(page.k_scale + slot, page.v_scale + slot);
    if (!p_.cache.layout.tail) return;
    kernels_.block_ubar(page.k_h + slot * (d / 2), d, page.ubar + block * d);
    page.mean_scale[block] = kernels_.block_mean(numerics::plane_row({page.v_h, page.v_l, page.v_b}, slot, d),
                                                 page.v_scale + slot, d, page.mean + block * d);
  }

  const plan::CacheWriteParams& p_;
  const CacheKernels kernels_;
  std::vector<int32_t> tokens_;
  std::vector<Request> requests_;
  std::vector<BlockWork> work_;
  std::vector<const Request*> fitted_;  // those that reach a mark
  std::vector<FitScratch> scratch_;     // one a thread
};

}  // namespace

void cache_write(const plan::CacheWriteParams& params) {
  Writer writer(params);  // allocates all it needs: nothing is written if that fails
  writer.write_blocks();
  writer.write_fits();
}

}  // namespace fold::cpu
