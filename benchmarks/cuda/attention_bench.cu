// Times whole-sequence attention on a device, a call by all its kernels, in TFLOP/s: the median of 15 calls, and calls
// one behind the other for a quarter of a second, by when the card's power limit has lowered the clock. L2 is cold for
// large shapes only. attention_bench forward|backward [NAME [DEVIATION [MEAN]]]: the shapes whose name contains NAME,
// logits of that standard deviation (1) and mean (0) in nats; of trained heads, many have a mean so low that no logit
// of a row is positive. The backward counts 2.5 times the forward's operations.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/attention/backward.h"
#include "cuda/attention/forward.h"

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
                             {"B1 S8192 H16/8 D256", 1, 8192, 16, 8, 256, true},
                             {"B4 S2048 H16/2 D256", 4, 2048, 16, 2, 256, true},
                             {"B1 S8192 H16/8 D256 full", 1, 8192, 16, 8, 256, false},
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

/// The first channel of each row.
__global__ void set_first_channel(uint16_t* x, int64_t rows, int64_t dim, float value) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows; i += int64_t{gridDim.x} * blockDim.x) {
    x[i * dim] = static_cast<uint16_t>(__float_as_uint(value) >> 16);
  }
}

class Problem {
 public:
  /// deviation and mean: of the logits, in nats.
  Problem(const Shape& s, double deviation, double mean) {
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
    f.dtype = params_.grad_dtype = DType::bf16;
    f.batch = s.batch;
    f.heads = s.heads;
    f.kv_heads = s.kv_heads;
    f.head_dim = s.dim;
    f.seqlen_q = f.seqlen_k = s.rows;
    f.total_q = f.total_k = s.batch * s.rows;
    f.window_left = fold::plan::kUnlimitedWindow;
    f.window_right = s.causal ? 0 : fold::plan::kUnlimitedWindow;
    f.softmax_scale = static_cast<float>(deviation / std::sqrt(static_cast<double>(s.dim)));
    workspace_ = allocate(
        std::max(fold::cuda::attention_forward_workspace(f), fold::cuda::attention_backward_workspace(params_)));
    if (mean != 0.0) {
      const double of_query = 8.0, of_key = mean * std::sqrt(static_cast<double>(s.dim)) / (of_query * deviation);
      const auto set = [&](const fold::plan::RowsView& x, int64_t size, double value) {
        set_first_channel<<<1024, 256>>>(static_cast<uint16_t*>(x.data), size / s.dim, s.dim,
                                         static_cast<float>(value));
      };
      set(f.q, q_size, of_query);
      set(f.k, k_size, of_key);
    }
    forward(nullptr);  // out and lse, for the backward
    check(cudaDeviceSynchronize());
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;
  ~Problem() {
    for (void* data : memory_) cudaFree(data);
  }

  void forward(cudaStream_t stream) { fold::cuda::attention_forward(params_.forward, workspace_, stream); }
  void backward(cudaStream_t stream) { fold::cuda::attention_backward(params_, workspace_, stream); }

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

using Call = void (Problem::*)(cudaStream_t);

/// Milliseconds of a call, the mean of `calls` one behind the other.
double time_of(Problem& problem, Call call, int calls, cudaStream_t stream) {
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  check(cudaEventRecord(start, stream));
  for (int i = 0; i < calls; ++i) (problem.*call)(stream);
  check(cudaEventRecord(stop, stream));
  check(cudaEventSynchronize(stop));
  float ms = 0.0f;
  check(cudaEventElapsedTime(&ms, start, stop));
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  return static_cast<double>(ms) / calls;
}

struct Times {
  double median, sustained;  // milliseconds of a call
};
Times times_of(Problem& problem, Call call) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  for (int i = 0; i < 3; ++i) (problem.*call)(stream);
  std::vector<double> times(15);
  for (double& ms : times) ms = time_of(problem, call, 1, stream);
  std::sort(times.begin(), times.end());
  const double median = times[times.size() / 2];
  const double sustained = time_of(problem, call, static_cast<int>(250.0 / median) + 1, stream);
  cudaStreamDestroy(stream);
  return {median, sustained};
}

}  // namespace

int main(int argc, char** argv) {
  const std::string direction = argc > 1 ? argv[1] : "none";
  if (direction != "forward" && direction != "backward") {
    std::fprintf(stderr, "attention_bench: direction=%s; allowed: forward, backward\n", direction.c_str());
    return 2;
  }
  const bool backward = direction == "backward";
  try {
    const double deviation = argc > 3 ? std::stod(argv[3]) : 1.0, mean = argc > 4 ? std::stod(argv[4]) : 0.0;
    for (const Shape& s : kShapes) {
      if (argc > 2 && !std::strstr(s.name, argv[2])) continue;
      if (backward && s.dim == 256) continue;  // there is none
      Problem problem(s, deviation, mean);
      const Times ms = times_of(problem, backward ? &Problem::backward : &Problem::forward);
      const double pairs = static_cast<double>(s.rows) * (s.causal ? s.rows / 2.0 : s.rows);
      const double operations = (backward ? 2.5 : 1.0) * 4 * pairs * static_cast<double>(s.batch * s.heads * s.dim);
      std::printf("%-26s %8.3f ms %6.0f TFLOP/s, sustained %6.0f\n", s.name, ms.median, operations / ms.median * 1e-9,
                  operations / ms.sustained * 1e-9);
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  return 0;
}
