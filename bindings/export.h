#pragma once
#include <omp.h>
#include <tvm/ffi/tvm_ffi.h>

#include <new>

#include "fold/error.h"

namespace fold::binding {

/// Threads of every later call, whichever Python thread makes it.
int num_threads();
void set_num_threads(int n);

/// OpenMP keeps the number of threads per calling thread, and torch may share the runtime: what it had comes back.
class ThreadsOfCall {
 public:
  ThreadsOfCall() : before_(omp_get_max_threads()) { omp_set_num_threads(num_threads()); }
  ~ThreadsOfCall() { omp_set_num_threads(before_); }
  ThreadsOfCall(const ThreadsOfCall&) = delete;
  ThreadsOfCall& operator=(const ThreadsOfCall&) = delete;

 private:
  int before_;
};

/// Calls `F` with the threads asked for; a fold::Error reaches Python as a ValueError or a TypeError with its message.
template <auto F>
struct Exported;

template <typename R, typename... Args, R (*F)(Args...)>
struct Exported<F> {
  static R call(Args... args) {
    const ThreadsOfCall threads;
    try {
      return F(std::forward<Args>(args)...);
    } catch (const Error& e) {
      throw tvm::ffi::Error(e.kind() == Error::Kind::type ? "TypeError" : "ValueError", e.what(), "");
    } catch (const std::bad_alloc&) {
      throw tvm::ffi::Error("MemoryError", "out of memory", "");
    }
  }
};

}  // namespace fold::binding

/// Makes `function` callable from Python as `_lib.lib.<name>`.
#define FOLD_EXPORT(name, function) TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, ::fold::binding::Exported<&function>::call)
