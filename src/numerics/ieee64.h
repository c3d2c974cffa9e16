#pragma once
#include "numerics/ieee.h"

// fp64 operations of the tail's fit (docs/numerics.md, section 9): one rounding each, never contracted.
namespace fold::numerics {

#if defined(__CUDA_ARCH__)
FOLD_HD double mul(double a, double b) { return __dmul_rn(a, b); }
FOLD_HD double add(double a, double b) { return __dadd_rn(a, b); }
FOLD_HD double sub(double a, double b) { return __dsub_rn(a, b); }
FOLD_HD double div(double a, double b) { return __ddiv_rn(a, b); }
FOLD_HD double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
FOLD_HD double sqrt_rn(double a) { return __dsqrt_rn(a); }
FOLD_HD double rne(double a) { return rint(a); }
#else
FOLD_HD double mul(double a, double b) { return a * b; }
FOLD_HD double add(double a, double b) { return a + b; }
FOLD_HD double sub(double a, double b) { return a - b; }
FOLD_HD double div(double a, double b) { return a / b; }
FOLD_HD double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
FOLD_HD double sqrt_rn(double a) { return __builtin_sqrt(a); }
FOLD_HD double rne(double a) { return __builtin_rint(a); }
#endif

}  // namespace fold::numerics
