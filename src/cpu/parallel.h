#pragma once
#include <omp.h>

#include <cstdint>
#include <exception>

namespace fold::cpu {

/// f(i) for i in [0, count), one at a time to each thread. What f throws is thrown here once all are done, the first
/// where there are several: an exception must not leave a parallel region, so what allocates in one belongs in here.
template <class F>
void parallel_for(int64_t count, int threads, F f) {
  std::exception_ptr first;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) {
    try {
      f(i);
    } catch (...) {
#pragma omp critical(fold_parallel_for)
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

template <class F>
void parallel_for(int64_t count, F f) {
  parallel_for(count, omp_get_max_threads(), f);
}

}  // namespace fold::cpu
