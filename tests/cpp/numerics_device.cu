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
  const Gates gates = gates_for_depth(x[1]);
  x[1] = add(gates.k_l, gates.v_b);
  integers[0] = fix(exp2_parts(x[2]), x[3]);
  integers[1] = to_bf16(x[4]) + to_f16(x[5]);
  x[2] = reference_z(x[6], integers[2], integers[3], integers[4]);
  x[3] = finish_channel(integers[5], integers[6], 3) + finish_lse(x[7], integers[6]);
  integers[7] = fold::plan::last_mark(integers[7]) + fold::plan::head_page(cache, 0, 0).k_h[0];
}
