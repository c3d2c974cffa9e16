#pragma once
#include <omp.h>

#include <cfenv>
#include <cstdint>
#include <exception>

namespace fold::cpu {

/// While it lives, a thread computes as IEEE 754 has it. A caller may have asked its own thread for something else
/// (torch.set_flush_denormal), which the other threads of a loop would not know of.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&before_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  std::fenv_t before_;
};

/// f(i) for i in [0, count) on `threads` threads, `chunk` neighbours at a time to whoever comes. What f throws is
/// thrown here once all are done, the first where there are several: an exception must not leave a parallel region.
template <class F>
void parallel_for(int64_t count, int threads, int64_t chunk, F f) {
  std::exception_ptr first;
#pragma omp parallel num_threads(threads)
  {
    const DefaultArithmetic arithmetic;
#pragma omp for schedule(dynamic, chunk)
    for (int64_t i = 0; i < count; ++i) {
      try {
        f(i);
      } catch (...) {
#pragma omp critical(fold_parallel_for)
        if (!first) first = std::current_exception();
      }
    }
  }
  if (first) std::rethrow_exception(first);
}

template <class F>
void parallel_for(int64_t count, int threads, F f) {
  parallel_for(count, threads, 1, f);
}

template <class F>
void parallel_for(int64_t count, F f) {
  parallel_for(count, omp_get_max_threads(), 1, f);
}

}  // namespace fold::cpu
