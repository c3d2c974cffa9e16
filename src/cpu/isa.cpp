#include "cpu/isa.h"

#include <atomic>

#include "fold/error.h"

namespace fold::cpu {
namespace {

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  if (avx512) return Isa::avx512;
  if (avx2) return Isa::avx2;
#endif
  return Isa::portable;
}

Isa best() {
  static const Isa value = detect();
  return value;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> value{best()};
  return value;
}

}  // namespace

Isa isa() { return current().load(std::memory_order_relaxed); }

void set_isa(Isa wanted) {
  if (wanted > best()) {
    throw Error(Error::Kind::value, "isa", isa_name(wanted),
                std::string("this processor offers up to ") + isa_name(best()));
  }
  current().store(wanted, std::memory_order_relaxed);
}

const char* isa_name(Isa value) {
  switch (value) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "portable";
  }
}

}  // namespace fold::cpu
