#include <atomic>
#include <string>

#include "cpu/isa.h"
#include "export.h"

namespace fold::binding {
namespace {

std::atomic<int> threads{omp_get_max_threads()};

void set_threads(int64_t n) {
  if (n < 1 || n > 4096) throw Error(Error::Kind::value, "num_threads", std::to_string(n), "allowed: 1 to 4096");
  set_num_threads(static_cast<int>(n));
}

int64_t get_threads() { return num_threads(); }

tvm::ffi::String version() { return FOLD_VERSION; }

/// The instruction set of the CPU kernels in use.
tvm::ffi::String isa() { return cpu::isa_name(cpu::isa()); }

}  // namespace

int num_threads() { return threads.load(std::memory_order_relaxed); }
void set_num_threads(int n) { threads.store(n, std::memory_order_relaxed); }

}  // namespace fold::binding

FOLD_EXPORT(set_num_threads, fold::binding::set_threads)
FOLD_EXPORT(get_num_threads, fold::binding::get_threads)
FOLD_EXPORT(version, fold::binding::version)
FOLD_EXPORT(isa, fold::binding::isa)
