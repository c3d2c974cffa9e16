#pragma once

namespace fold::cpu {

/// Instruction sets the CPU kernels are compiled for. `portable` runs everywhere.
enum class Isa { portable, avx2, avx512 };

/// The best set this processor offers (AVX-512 means F, BW, VL, DQ, VBMI, VBMI2, VNNI and BF16), or the one forced by
/// `set_isa`.
Isa isa();

/// Forces a set (tests, benchmarks). Asking for one the processor lacks throws fold::Error.
void set_isa(Isa wanted);

const char* isa_name(Isa value);

}  // namespace fold::cpu
