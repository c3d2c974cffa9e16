// Times the backward of whole-sequence attention on a device: a call by all its kernels, in TFLOP/s of 2.5 times the
// forward's operations. L2 is cold for large shapes only. attention_backward [NAME]: the shapes whose name contains
// NAME.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cuda/attention/backward.h"

namespace {

using fold::DType;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

struct Shape {
  const char* name;
  int64_t batch, rows, heads, kv_heads, dim;
  bool causal;
};
constexpr Shape kShapes[] = {{"B1 S8192 H32/32 D128", 1, 8192, 32, 32, 128, true},
                             {"B1 S8192 H32/8 D128", 1, 8192, 32, 8, 128, true},
                             {"B2 S8192 H32/8 D128", 2, 8192, 32, 8, 128, true},
                             {"B1 S16384 H32/8 D128", 1, 16384, 32, 8, 128, true},
                             {"B4 S4096 H32/32 D64", 4, 4096, 32, 32, 64, true},
                             {"B4 S4096 H64/8 D64", 4, 4096, 64, 8, 64, true},
                             {"B1 S2048 H8/2 D128", 1, 2048, 8, 2, 128, true},
                             {"B8 S2048 H32/32 D128", 8, 2048, 32, 32, 128, true},
                             {"B1 S8192 H16/16 D128", 1, 8192, 16, 16, 128, true},
                             {"B1 S8192 H32/32 D96", 1, 8192, 32, 32, 96, true},
                             {"B1 S8192 H32/32 D128 full", 1, 8192, 32, 32, 128, false},
                             {"B4 S4096 H32/32 D64 full", 4, 4096, 32, 32, 64, false}};

/// bf16 numbers of about standard deviation 1: a sum of 4 uniform ones.
__global__ void fill(uint16_t* x, int64_t size, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size; i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 0x9e3779b9u + seed;
    float sum = 0.0f;
    for (int n = 0; n < 4; ++n) {
      h ^= h >> 16, h *= 0x7feb352du, h ^= h >> 15, h *= 0x846ca68bu, h ^= h >> 16;
      sum += static_cast<float>(h) * 0x1p-32f - 0.5f;
    }
    x[i] = static_cast<uint16_t>(__float_as_uint(sum * 1.732f) >> 16);
  }
}

__global__ void fill_lse(float* x, int64_t rows, int64_t size, bool causal) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size; i += int64_t{gridDim.x} * blockDim.x) {
    x[i] = 0.5f + logf(static_cast<float>(causal ? i % rows + 1 : rows));  // of logits of standard deviation 1
  }
}

class Problem {
 public:
  explicit Problem(const Shape& s) {
    const int64_t q_size = s.batch * s.rows * s.heads * s.dim, k_size = s.batch * s.rows * s.kv_heads * s.dim;
    const auto rows = [&](int64_t size, int64_t heads, uint32_t seed) {
      void* data = allocate(size * 2);
      fill<<<1024, 256>>>(static_cast<uint16_t*>(data), size, seed);
      return fold::plan::RowsView{data, s.rows * heads * s.dim, heads * s.dim, s.dim};
    };
    auto& f = params_.forward;
    f.q = rows(q_size, s.heads, 1);
    f.k = rows(k_size, s.kv_heads, 2);
    f.v = rows(k_size, s.kv_heads, 3);
    f.out = rows(q_size, s.heads, 4);
    params_.dout = rows(q_size, s.heads, 5);
    params_.dq = rows(q_size, s.heads, 6);
    params_.dk = rows(k_size, s.kv_heads, 7);
    params_.dv = rows(k_size, s.kv_heads, 8);
    const int64_t lse_size = s.batch * s.heads * s.rows;
    f.lse = {allocate(lse_size * 4), s.heads * s.rows, 1, s.rows};
    fill_lse<<<1024, 256>>>(static_cast<float*>(f.lse.data), s.rows, lse_size, s.causal);
    f.dtype = params_.grad_dtype = DType::bf16;
    f.batch = s.batch;
    f.heads = s.heads;
    f.kv_heads = s.kv_heads;
    f.head_dim = s.dim;
    f.seqlen_q = f.seqlen_k = s.rows;
    f.total_q = f.total_k = s.batch * s.rows;
    f.window_left = fold::plan::kUnlimitedWindow;
    f.window_right = s.causal ? 0 : fold::plan::kUnlimitedWindow;
    f.softmax_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.dim)));
    workspace_ = allocate(fold::cuda::attention_backward_workspace(params_));
    check(cudaDeviceSynchronize());
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;
  ~Problem() {
    for (void* data : memory_) cudaFree(data);
  }

  void run(cudaStream_t stream) { fold::cuda::attention_backward(params_, workspace_, stream); }

 private:
  void* allocate(int64_t bytes) {
    memory_.push_back(nullptr);
    check(cudaMalloc(&memory_.back(), static_cast<size_t>(bytes)));
    return memory_.back();
  }

  fold::plan::BackwardParams params_{};
  void* workspace_ = nullptr;
  std::vector<void*> memory_;
};

/// Median of the milliseconds of a call.
double time_of(Problem& problem) {
  cudaStream_t stream;
  cudaEvent_t start, stop;
  check(cudaStreamCreate(&stream));
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  for (int i = 0; i < 3; ++i) problem.run(stream);
  std::vector<float> times(15);
  for (float& ms : times) {
    check(cudaEventRecord(start, stream));
    problem.run(stream);
    check(cudaEventRecord(stop, stream));
    check(cudaEventSynchronize(stop));
    check(cudaEventElapsedTime(&ms, start, stop));
  }
  std::sort(times.begin(), times.end());
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  cudaStreamDestroy(stream);
  return times[times.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  try {
    for (const Shape& s : kShapes) {
      if (argc > 1 && !std::strstr(s.name, argv[1])) continue;
      Problem problem(s);
      const double ms = time_of(problem);
      const double pairs = static_cast<double>(s.rows) * (s.causal ? s.rows / 2.0 : s.rows);
      const double operations = 2.5 * 4 * pairs * static_cast<double>(s.batch * s.heads * s.dim);
      std::printf("%-26s %8.3f ms %6.0f TFLOP/s\n", s.name, ms, operations / ms * 1e-9);
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  return 0;
}
