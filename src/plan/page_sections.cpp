#include "fold/cache_layout.h"
#include "numerics/config.h"

namespace fold {
namespace {

bool known_bits(int bits) { return bits == 16 || bits == 8 || bits == 4; }

}  // namespace

void check_layout(const CacheLayout& layout) {
  const auto fail = [](const char* what, int64_t got, const char* allowed) {
    throw Error(Error::Kind::value, what, std::to_string(got), allowed);
  };
  if (layout.n_kv_heads < 1) fail("n_kv_heads", layout.n_kv_heads, "at least 1");
  if (layout.head_dim != 64 && layout.head_dim != 128 && layout.head_dim != 256) {
    fail("head_dim", layout.head_dim, "supported: 64, 128, 256");
  }
  if (layout.page_size < 64 || layout.page_size > 1024 || layout.page_size % 64 != 0) {
    fail("page_size", layout.page_size, "supported: multiples of 64 from 64 to 1024");
  }
  if (!known_bits(layout.k_bits)) fail("k_bits", layout.k_bits, "supported: 16, 8, 4");
  if (!known_bits(layout.v_bits)) fail("v_bits", layout.v_bits, "supported: 16, 8, 4");
}

int64_t fit_slots(const CacheLayout& layout) {
  return (layout.page_size + numerics::kFitSlotKeys - 1) / numerics::kFitSlotKeys;
}

PageSections page_sections(const CacheLayout& layout) {
  check_layout(layout);
  int64_t end = 0;
  const auto place = [&end](bool kept, int64_t bytes) {
    if (!kept) return int64_t{-1};
    const int64_t start = end;
    end = (end + bytes + 127) / 128 * 128;
    return start;
  };
  const int64_t keys = layout.n_kv_heads * layout.page_size, blocks = keys / numerics::kTile, d = layout.head_dim;
  const int64_t fits = layout.n_kv_heads * fit_slots(layout) * numerics::kRank;
  PageSections s{};
  s.k_h = place(true, keys * d / 2);
  s.k_l = place(layout.k_bits >= 8, keys * d / 2);
  s.k_b = place(layout.k_bits == 16, keys * d);
  s.k_scale = place(true, keys * 2);
  s.v_h = place(true, keys * d / 2);
  s.v_l = place(layout.v_bits >= 8, keys * d / 2);
  s.v_b = place(layout.v_bits == 16, keys * d);
  s.v_scale = place(true, keys * 2);
  s.bound = place(true, blocks * 2);
  s.mean_scale = place(layout.tail, blocks * 2);
  s.mean = place(layout.tail, blocks * d);
  s.ubar = place(layout.tail, blocks * d);
  s.fit_in = place(layout.tail, fits * d);
  s.fit_out = place(layout.tail, fits * d);
  s.fit_scale = place(layout.tail, fits * 4);
  s.bytes = end;
  return s;
}

}  // namespace fold
