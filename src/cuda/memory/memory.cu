#include <algorithm>
#include <cstring>

#include "cuda/launch.h"
#include "cuda/memory/memory.h"

namespace fold::cuda {
namespace {

/// What fits into a launch's 4 KB of parameters.
struct Words {
  static constexpr int kMost = 510;

  int32_t* words;
  int count;
  plan::WordChange changes[kMost];
};
static_assert(sizeof(Words) <= 4096);

constexpr int kThreads = 512;
static_assert(kThreads >= Words::kMost);

__global__ void __launch_bounds__(kThreads) set_words_kernel(const __grid_constant__ Words w) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < w.count) w.words[w.changes[i].at] = w.changes[i].value;
}

}  // namespace

void* allocate(int64_t bytes, cudaStream_t stream) {
  void* memory = nullptr;
  require_success(cudaMallocAsync(&memory, static_cast<size_t>(bytes), stream), "memory");
  return memory;
}

void release(void* memory, cudaStream_t stream) { require_success(cudaFreeAsync(memory, stream), "memory"); }

void clear(void* memory, int64_t bytes, cudaStream_t stream) {
  require_success(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream), "memory");
}

void copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  require_success(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream), "a copy");
}

void wait(cudaStream_t stream) { require_success(cudaStreamSynchronize(stream), "the stream's work"); }

void set_words(int32_t* words, const plan::WordChange* changes, int64_t count, cudaStream_t stream) {
  for (int64_t first = 0; first < count; first += Words::kMost) {
    Words w{.words = words, .count = static_cast<int>(std::min<int64_t>(count - first, Words::kMost)), .changes = {}};
    std::copy(changes + first, changes + first + w.count, w.changes);
    launch_kernel(set_words_kernel, {1, kThreads, 0}, stream, "words", w);
  }
}

}  // namespace fold::cuda
