// Compiled, never run: every function of src/numerics and src/plan's address arithmetic is usable in device code.
#include "numerics/block.h"
#include "numerics/exp2.h"
#include "numerics/gates.h"
#include "numerics/ieee.h"
#include "numerics/int_grid.h"
#include "numerics/planes.h"
#include "numerics/reference.h"
#include "plan/cache_access.h"

using namespace fold::numerics;

/// x: (256,); a, b: (256,); integers: (8,).
__global__ void use_everything(float* x, int8_t* a, int8_t* b, int64_t* integers, fold::plan::CacheView cache) {
  rotate(x, 256);
  x[0] = from_bf16(split_row(x, 256, a, b));
  const Gates gates = widened(gates_for_depth(x[1]), x[6]);
  x[1] = add(gates.k_l, gates.v_b);
  integers[0] = fix(exp2_parts(x[2]), x[3]);
  integers[1] = to_bf16(x[4]) + to_f16(x[5]);
  ScoreSums counted, sampled;
  add_score(sampled, static_cast<uint32_t>(integers[3]));
  const Reference declared = declared_reference(x[6], counted, sampled, integers[4]);
  const RowMass row{integers[5], integers[6], integers[7], x[7]};
  integers[2] = reference_holds(row.den, declared.spread) ? finer_bits(row, declared.spread, 3, 0) : 0;
  x[2] = corrected_z(declared.z, row);
  const double den = with_sink(row.den, x[8]);
  x[3] = finish_channel(integers[5], den, 3) + finish_lse(x[7], den, x[8]);
  x[4] = outlier_depth(row_scale(x[9]), typical_exponent(integers[0], 3));
  integers[7] = fold::plan::last_mark(integers[7]) + fold::plan::head_page(cache, 0, 0).k_h[0];
}
