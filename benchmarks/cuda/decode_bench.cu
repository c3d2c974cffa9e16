// Times whole decode steps on a device over synthetic caches: median and spread in microseconds, the bytes that the
// rows needed and their rate, request 0's error against fp64. L2 is evicted before every step by writing 256 MB and
// then reading other 256 MB. decode_bench [NAME [tail|no-tail|append|shared [DEPTH ...]]]: the shapes whose name
// contains NAME, with or without the tail model, at these depths (inf: every V is read); append: without it, and each
// step also brings every request a key, of zeros; shared: without it, and all requests have the pages of the first.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/cache/cache_write.h"
#include "cuda/decode/decode.h"
#include "fold/cache_layout.h"

namespace {

using fold::DType;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

template <typename T>
T* device_array(const std::vector<T>& values) {
  T* data = nullptr;
  check(cudaMalloc(&data, values.size() * sizeof(T)));
  check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}
template <typename T>
std::vector<T> host_copy(const T* data, size_t size) {
  std::vector<T> values(size);
  check(cudaMemcpy(values.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

struct Shape {
  const char* name;
  int64_t batch, keys, heads, kv_heads, head_dim;
  int64_t others = keys;  // keys of all requests but the first
};
constexpr Shape kShapes[] = {{"B8 S32768 H32/8 D128", 8, 32768, 32, 8, 128},
                             {"B32 S8192 H32/8 D128", 32, 8192, 32, 8, 128},
                             {"B1 S32768 H32/8 D128", 1, 32768, 32, 8, 128},
                             {"B1 S131072 H32/8 D128", 1, 131072, 32, 8, 128},
                             {"B8 S32768 H64/8 D128", 8, 32768, 64, 8, 128},
                             {"B8 S32768 H64/8 D64", 8, 32768, 64, 8, 64},
                             {"B4 S32768 H96/8 D128", 4, 32768, 96, 8, 128},
                             {"B4 S32768 H128/8 D64", 4, 32768, 128, 8, 64},
                             {"B8 S32768 H64/4 D128", 8, 32768, 64, 4, 128},
                             {"B8 S32768 H16/8 D256", 8, 32768, 16, 8, 256},
                             {"B8 S32768 H16/2 D256", 8, 32768, 16, 2, 256},
                             {"B64 S2048 H32/8 D128", 64, 2048, 32, 8, 128},
                             {"B256 S1024 H32/8 D128", 256, 1024, 32, 8, 128},
                             {"one S65536, 31 S1024 H32/8 D128", 32, 65536, 32, 8, 128, 1024},
                             {"one S65536, 255 S1024 H32/8 D128", 256, 65536, 32, 8, 128, 1024}};

__global__ void read_all(const uint4* data, int64_t size, unsigned* sink) {
  unsigned sum = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size; i += int64_t{gridDim.x} * blockDim.x) {
    const uint4 v = data[i];
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345678) *sink = sum;
}

class Evictor {
 public:
  Evictor() {
    check(cudaMalloc(&written_, kBytes));
    check(cudaMalloc(&read_, kBytes));
    check(cudaMalloc(&sink_, sizeof(unsigned)));
    check(cudaMemset(read_, 1, kBytes));
  }
  void operator()(cudaStream_t stream) {
    check(cudaMemsetAsync(written_, 2, kBytes, stream));
    read_all<<<1056, 256, 0, stream>>>(static_cast<const uint4*>(read_), kBytes / 16, sink_);
  }

 private:
  static constexpr int64_t kBytes = 256 << 20;
  void *written_ = nullptr, *read_ = nullptr;
  unsigned* sink_ = nullptr;
};

struct Times {
  float median, low, high;  // 10th and 90th percentile
};

Times time_of(const std::function<void()>& step, Evictor& evict, cudaStream_t stream) {
  constexpr int kRuns = 41;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kRuns + 3; ++i) {
    evict(stream);
    check(cudaEventRecord(begin, stream));
    step();
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(1000 * ms);
  }
  std::sort(times.begin(), times.end());
  return {times[kRuns / 2], times[kRuns / 10], times[kRuns - 1 - kRuns / 10]};
}

/// (HK, D): what the queries of a group share.
std::vector<float> shared_queries(const Shape& s) {
  std::mt19937 rng(2);
  std::normal_distribution<float> normal;
  std::vector<float> shared(static_cast<size_t>(s.kv_heads * s.head_dim));
  for (float& x : shared) x = normal(rng);
  return shared;
}

/// Queries (B, H, D): 0.8 of their group's, 0.6 their own; logits of standard deviation 3 nats.
std::vector<float> queries(const Shape& s) {
  const std::vector<float> shared = shared_queries(s);
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  std::vector<float> q;
  for (int64_t row = 0; row < s.batch * s.heads; ++row) {
    const float* of_group = &shared[static_cast<size_t>(row % s.heads / (s.heads / s.kv_heads) * s.head_dim)];
    for (int64_t i = 0; i < s.head_dim; ++i) q.push_back(3 * (0.8f * of_group[i] + 0.6f * normal(rng)));
  }
  return q;
}

/// Standard normal numbers, by Box and Muller from a hash of (seed, index).
__global__ void fill_normal(float* x, int64_t size, uint32_t seed) {
  const auto uniform = [](uint32_t h) {  // in (0, 1)
    h ^= h >> 16, h *= 0x7feb352du, h ^= h >> 15, h *= 0x846ca68bu, h ^= h >> 16;
    return (static_cast<float>(h >> 8) + 0.5f) * 0x1p-24f;
  };
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size; i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t h = static_cast<uint32_t>(2 * i) * 0x9e3779b9u + seed * 0x85ebca6bu;
    x[i] = sqrtf(-2.0f * logf(uniform(h))) * cospif(2.0f * uniform(h + 0x9e3779b9u));
  }
}

/// Key 0 is a sink: along the queries of its group, it holds about half of the mass. (HK, D)
std::vector<float> sink_keys(const Shape& s) {
  std::vector<float> keys = shared_queries(s);
  const auto d = static_cast<size_t>(s.head_dim);
  const double logit = std::log(static_cast<double>(s.keys)) + 4.5;  // nats; the others' mean is 9 / 2
  for (auto along = keys.begin(); along != keys.end(); along += d) {
    const double square = std::inner_product(along, along + d, along, 0.0);
    const auto factor = static_cast<float>(logit * std::sqrt(static_cast<double>(d)) / (2.4 * square));
    std::transform(along, along + d, along, [&](float x) { return factor * x; });
  }
  return keys;
}

/// Requests each with keys and values of its own.
struct Cache {
  Cache(const Shape& s, bool tail) : layout{.n_kv_heads = s.kv_heads, .head_dim = s.head_dim, .tail = tail} {
    sections = fold::page_sections(layout);
    const auto pages_for = [&](int64_t keys) { return keys / layout.page_size + 1; };
    const int64_t pages = pages_for(s.keys), row = s.kv_heads * s.head_dim, size = s.keys * row;
    pages_of_request = pages;
    std::vector<int32_t> table(static_cast<size_t>(s.batch * pages), -1);
    for (int64_t b = 0; b < s.batch; ++b) {
      const int64_t held = b == 0 ? pages : pages_for(s.others);
      std::iota(table.begin() + b * pages, table.begin() + b * pages + held, static_cast<int32_t>(num_pages));
      num_pages += held;
    }
    block_table = device_array(table);
    check(cudaMalloc(&data, sections.bytes * num_pages));
    const std::vector<float> sinks = sink_keys(s);
    float *k_rows = device_array(std::vector<float>(static_cast<size_t>(size))),
          *v_rows = device_array(std::vector<float>(static_cast<size_t>(size)));
    int32_t *before = device_array(std::vector<int32_t>{0}),
            *ends = device_array(std::vector<int32_t>{0, static_cast<int32_t>(s.keys)}),
            *other_ends = device_array(std::vector<int32_t>{0, static_cast<int32_t>(s.others)});
    fold::plan::CacheWriteParams p{};
    p.cache = {data, sections.bytes, num_pages, layout, sections};
    p.k = k_rows;
    p.v = v_rows;
    p.k_dtype = p.v_dtype = DType::f32;
    p.k_stride_t = p.v_stride_t = row;
    p.k_stride_h = p.v_stride_h = s.head_dim;
    p.block_table_stride = pages;
    p.seqlens = before;
    p.batch = 1;
    fold::plan::CacheWriteBounds bounds{.tokens = s.keys, .max_pages = pages};
    void* workspace = nullptr;
    check(cudaMalloc(&workspace, fold::cuda::cache_write_workspace(p, bounds)));
    for (int64_t b = 0; b < s.batch; ++b) {
      fill_normal<<<1056, 256>>>(k_rows, size, static_cast<uint32_t>(2 * b));
      fill_normal<<<1056, 256>>>(v_rows, size, static_cast<uint32_t>(2 * b + 1));
      check(cudaMemcpy(k_rows, sinks.data(), sinks.size() * sizeof(float), cudaMemcpyHostToDevice));
      p.block_table = block_table + b * pages;
      p.cu_seqlens = b == 0 ? ends : other_ends;
      bounds.tokens = b == 0 ? s.keys : s.others;
      fold::cuda::cache_write(p, bounds, workspace, nullptr);
      if (b > 0) continue;
      k = host_copy(k_rows, static_cast<size_t>(size));
      v = host_copy(v_rows, static_cast<size_t>(size));
    }
    check(cudaDeviceSynchronize());
    for (void* used : {static_cast<void*>(k_rows), static_cast<void*>(v_rows), static_cast<void*>(before),
                       static_cast<void*>(ends), static_cast<void*>(other_ends), workspace})
      cudaFree(used);
  }
  ~Cache() {
    cudaFree(data);
    cudaFree(block_table);
  }

  fold::CacheLayout layout;
  fold::PageSections sections;
  std::vector<float> k, v;  // of request 0: (keys, HK, D)
  uint8_t* data = nullptr;
  int32_t* block_table = nullptr;
  int64_t pages_of_request = 0, num_pages = 0;
};

/// Attention of request 0 in fp64: (H, D). zeros: keys and values of zeros beside the others.
std::vector<double> reference(const Shape& s, const std::vector<float>& k, const std::vector<float>& v,
                              const std::vector<float>& q, int zeros) {
  std::vector<double> out(static_cast<size_t>(s.heads * s.head_dim), 0.0);
#pragma omp parallel for
  for (int64_t h = 0; h < s.heads; ++h) {
    const int64_t kv_head = h / (s.heads / s.kv_heads), d = s.head_dim;
    const auto row = [&](const std::vector<float>& of, int64_t key) {
      return &of[static_cast<size_t>((key * s.kv_heads + kv_head) * d)];
    };
    std::vector<double> logit(static_cast<size_t>(s.keys));
    for (int64_t j = 0; j < s.keys; ++j) {
      logit[j] = std::inner_product(row(k, j), row(k, j) + d, &q[static_cast<size_t>(h * d)], 0.0) /
                 std::sqrt(static_cast<double>(d));
    }
    const double most = *std::max_element(logit.begin(), logit.end());
    double total = zeros * std::exp(-most);
    for (int64_t j = 0; j < s.keys; ++j) {
      const double w = std::exp(logit[j] - most);
      total += w;
      for (int64_t i = 0; i < d; ++i) out[h * d + i] += w * row(v, j)[i];
    }
    for (int64_t i = 0; i < d; ++i) out[h * d + i] /= total;
  }
  return out;
}

double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
  double square = 0, whole = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    square += (got[i] - want[i]) * (got[i] - want[i]);
    whole += want[i] * want[i];
  }
  return std::sqrt(square / whole);
}

/// A step's write: a key and a value of zeros for each request, behind the keys that it holds.
struct Append {
  Append(const Cache& cache, const Shape& s, const int32_t* before) {
    const auto rows = static_cast<size_t>(s.batch * s.kv_heads * s.head_dim);
    zeros = device_array(std::vector<float>(rows));
    int32_t* counts = device_array(std::vector<int32_t>(static_cast<size_t>(2 * s.batch)));
    params.write.cache = {cache.data, cache.sections.bytes, cache.num_pages, cache.layout, cache.sections};
    params.write.k = params.write.v = zeros;
    params.write.k_dtype = params.write.v_dtype = DType::f32;
    params.write.k_stride_t = params.write.v_stride_t = s.kv_heads * s.head_dim;
    params.write.k_stride_h = params.write.v_stride_h = s.head_dim;
    params.write.block_table = cache.block_table;
    params.write.block_table_stride = params.max_pages = cache.pages_of_request;
    params.write.seqlens = before;
    params.write.batch = s.batch;
    params.tokens = 1;
    params.lengths = counts;
    params.token_counts = counts + s.batch;
    check(cudaMalloc(&workspace, fold::cuda::step_write_workspace(params)));
  }
  ~Append() {
    cudaFree(zeros);
    cudaFree(params.lengths);
    cudaFree(workspace);
  }
  Append(const Append&) = delete;
  Append& operator=(const Append&) = delete;

  float* zeros = nullptr;
  fold::plan::StepParams params{};
  void* workspace = nullptr;
};

struct Kind {
  const char* name;
  bool tail, append = false, shared = false;
};
constexpr Kind kKinds[] = {{"tail", true}, {"no-tail", false}, {"append", false, true}, {"shared", false, false, true}};

void run(const Shape& s, Kind kind, const std::vector<float>& depths_wanted, Evictor& evict, cudaStream_t stream) {
  const Cache cache(s, kind.tail);
  const std::vector<float> all_queries = queries(s);
  const std::vector<double> want = reference(s, cache.k, cache.v, all_queries, kind.append ? 1 : 0);
  const size_t rows = static_cast<size_t>(s.batch * s.heads);
  float* q = device_array(all_queries);
  float* out = device_array(std::vector<float>(rows * s.head_dim));
  float* kept = device_array(std::vector<float>(rows));
  uint8_t* again = device_array(std::vector<uint8_t>(rows));
  int64_t* bytes = device_array(std::vector<int64_t>(static_cast<size_t>(s.batch * s.kv_heads)));
  std::vector<int32_t> keys(static_cast<size_t>(s.batch), static_cast<int32_t>(s.others));
  keys[0] = static_cast<int32_t>(s.keys);
  int32_t* lengths = device_array(keys);
  const Append append(cache, s, lengths);
  for (const float depth : depths_wanted) {
    float* depths = device_array(std::vector<float>{depth});
    fold::plan::DecodeParams p{};
    p.cache = {cache.data, cache.sections.bytes, cache.num_pages, cache.layout, cache.sections};
    p.q = q;
    p.q_stride_h = p.out_stride_h = s.head_dim;
    p.q_stride_b = p.out_stride_b = p.q_stride_t = p.out_stride_t = s.heads * s.head_dim;
    p.block_table = cache.block_table;
    p.block_table_stride = kind.shared ? 0 : cache.pages_of_request;
    p.seqlens = kind.append ? append.params.lengths : lengths;
    p.q_lens = kind.append ? append.params.token_counts : nullptr;
    p.depth = std::isinf(depth) ? nullptr : depths;
    p.qk_scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(s.head_dim)));
    p.window_left = -1;
    p.key_end = std::numeric_limits<int64_t>::max();
    p.batch = s.batch;
    p.tokens = 1;
    p.heads = s.heads;
    p.out = out;
    p.kept_fraction = kept;
    p.recomputed = again;
    p.bytes_read = bytes;
    void* workspace = nullptr;
    check(cudaMalloc(&workspace, fold::cuda::decode_workspace(p)));
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    if (kind.append) fold::cuda::step_write(append.params, append.workspace, stream);
    fold::cuda::decode(p, {.max_pages = cache.pages_of_request}, kind.append ? &append.params : nullptr, workspace,
                       stream);
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    const Times t = time_of([&] { check(cudaGraphLaunch(executable, stream)); }, evict, stream);
    const auto needed = host_copy(bytes, static_cast<size_t>(s.batch * s.kv_heads));
    const double total = static_cast<double>(std::accumulate(needed.begin(), needed.end(), int64_t{0}));
    const auto shares = host_copy(kept, rows);
    const auto reruns = host_copy(again, rows);
    std::printf(
        "%-22s %s depth %4.1f: %7.1f us (%.1f..%.1f), %6.1f MB, %5.0f GB/s, error %.1e, %4.1f %% kept, %ld of %zu rows "
        "again\n",
        s.name, kind.name, depth, t.median, t.low, t.high, 1e-6 * total, 1e-3 * total / t.median,
        relative_error(host_copy(out, want.size()), want),
        100 * std::accumulate(shares.begin(), shares.end(), 0.0) / static_cast<double>(rows),
        std::accumulate(reruns.begin(), reruns.end(), 0L), rows);
    std::fflush(stdout);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaFree(workspace);
    cudaFree(depths);
  }
  for (void* data : {static_cast<void*>(q), static_cast<void*>(out), static_cast<void*>(kept),
                     static_cast<void*>(again), static_cast<void*>(bytes), static_cast<void*>(lengths)})
    cudaFree(data);
}

}  // namespace

int main(int argc, char** argv) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  Evictor evict;
  const Kind* const kind = std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind& k) {
    return std::strcmp(k.name, argc < 3 ? "tail" : argv[2]) == 0;
  });
  if (kind == std::end(kKinds))
    throw std::runtime_error(std::string(argv[2]) + "; allowed: tail, no-tail, append, shared");
  std::vector<float> depths;
  for (int i = 3; i < argc; ++i) depths.push_back(std::strtof(argv[i], nullptr));
  if (depths.empty()) depths = {12.0f, 16.0f, std::numeric_limits<float>::infinity()};
  for (const Shape& shape : kShapes) {
    if (argc < 2 || std::strstr(shape.name, argv[1]) != nullptr) run(shape, *kind, depths, evict, stream);
  }
}
