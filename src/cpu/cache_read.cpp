#include "cpu/cache_read.h"

#include "cpu/convert.h"
#include "cpu/parallel.h"
#include "numerics/config.h"
#include "plan/cache_access.h"

namespace fold::cpu {
namespace {

void read_row(const numerics::PlaneRow& row, uint16_t scale, int64_t head_dim, const RowsOut& to, int64_t offset) {
  float x[numerics::kMaxHeadDim];
  const float unit = numerics::from_bf16(scale) * 0x1p-8f;
  for (int c = 0; c < head_dim; ++c) x[c] = static_cast<float>(numerics::reading(row, c)) * unit;  // exact
  numerics::rotate(x, static_cast<int>(head_dim));
  store_row(x, head_dim, to.data, to.dtype, offset);
}

template <typename T>
const T* at(const T* section, int64_t element) {
  return section == nullptr ? nullptr : section + element;
}

}  // namespace

void cache_read(const plan::CacheView& cache, const int32_t* table, int64_t keys, const RowsOut& k, const RowsOut& v) {
  const int64_t d = cache.layout.head_dim, page_size = cache.layout.page_size, heads = cache.layout.n_kv_heads;
  parallel_for(keys, omp_get_max_threads(), numerics::kTile, [&](int64_t j) {
    const int64_t slot = j % page_size, tile = slot / numerics::kTile * numerics::kTile;
    const int64_t scale = tile + numerics::scale_slot(static_cast<int>(slot - tile));
    for (int64_t h = 0; h < heads; ++h) {
      const plan::HeadPage page = plan::head_page(cache, table[j / page_size], h);
      read_row({at(page.k_h, slot * d / 2), at(page.k_l, slot * d / 2), at(page.k_b, slot * d)}, page.k_scale[scale], d,
               k, j * k.stride_t + h * k.stride_h);
      read_row({at(page.v_h, slot * d / 2), at(page.v_l, slot * d / 2), at(page.v_b, slot * d)}, page.v_scale[scale], d,
               v, j * v.stride_t + h * v.stride_h);
    }
  });
}

}  // namespace fold::cpu
