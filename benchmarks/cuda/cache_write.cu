// Times of cache writes on a device, beside a device-to-device copy that moves the same bytes.
//
//   build/cuda/bench_cuda_cache_write [part of a case's name]
//
// A time is the median of event pairs around single calls, each after a write and a read of 256 MB. `bytes` is what a
// call has to read and write: k, v, and the pages it fills; the copy reads half of that and writes half.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <vector>

#include "fold/launch.h"

namespace {

using fold::CacheLayout;
using fold::DType;
using fold::TensorView;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes) { check(cudaMalloc(&data_, std::max<int64_t>(bytes, 1))); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }

  template <typename T>
  void fill(const std::vector<T>& values) {
    check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  TensorView view(DType dtype, std::initializer_list<int64_t> shape) const {
    TensorView v(data_, dtype, shape);
    v.device = fold::Device::cuda;
    return v;
  }

 private:
  int64_t bytes_;
  void* data_ = nullptr;
};

__global__ void touch(const float4* data, int64_t count, float* sink) {
  float sum = 0;
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    sum += data[i].x;
  }
  if (sum == 1.2345f) *sink = sum;
}

/// Median microseconds of a call whose operands are not in the L2 cache.
double median_us(const std::function<void()>& call) {
  static const Memory flushed(int64_t{256} << 20), sink(4);
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int i = 0; i < 24; ++i) {
    check(cudaMemsetAsync(flushed.data(), i, flushed.bytes()));
    touch<<<1056, 256>>>(static_cast<const float4*>(flushed.data()), flushed.bytes() / 16,
                         static_cast<float*>(sink.data()));
    check(cudaEventRecord(start));
    call();
    check(cudaEventRecord(stop));
    check(cudaEventSynchronize(stop));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 3) times.push_back(ms * 1000);
  }
  check(cudaEventDestroy(start));
  check(cudaEventDestroy(stop));
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

double copy_us(int64_t bytes) {
  const Memory from(bytes / 2), to(bytes / 2);
  return median_us([&] { check(cudaMemcpyAsync(to.data(), from.data(), bytes / 2, cudaMemcpyDeviceToDevice)); });
}

struct Case {
  const char* name;
  int64_t batch, length, tokens;  // keys before the call, new ones of each request
  CacheLayout layout;
};

void run(const Case& c) {
  const int64_t heads = c.layout.n_kv_heads, d = c.layout.head_dim, total = c.batch * c.tokens;
  const int64_t page_size = c.layout.page_size, page_bytes = fold::page_sections(c.layout).bytes;
  const int64_t width = (c.length + c.tokens + page_size - 1) / page_size;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> some(1 << 20), rows(total * heads * d);  // bf16
  for (uint16_t& x : some) x = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, normal(random)) >> 16);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = some[(i * 7 + i / some.size()) % some.size()];
  std::vector<int32_t> table(c.batch * width), lengths(c.batch, static_cast<int32_t>(c.length)), cu;
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  for (int64_t b = 0; b <= c.batch; ++b) cu.push_back(static_cast<int32_t>(b * c.tokens));
  Memory k(rows.size() * 2), v(rows.size() * 2), pages(c.batch * width * page_bytes), tables(table.size() * 4),
      seqlens(lengths.size() * 4), starts(cu.size() * 4);
  k.fill(rows);
  v.fill(rows);
  tables.fill(table);
  seqlens.fill(lengths);
  starts.fill(cu);
  // Keys that a fit reads have scales of 1; what their planes hold does not matter to the time.
  check(cudaMemset(pages.data(), 0x3F, pages.bytes()));
  const fold::CacheStorage storage{c.layout, pages.view(DType::u8, {c.batch * width, page_bytes})};
  const fold::CacheWriteArgs args{.k = k.view(DType::bf16, {total, heads, d}),
                                  .v = v.view(DType::bf16, {total, heads, d}),
                                  .block_table = tables.view(DType::i32, {c.batch, width}),
                                  .seqlens = seqlens.view(DType::i32, {c.batch}),
                                  .cu_seqlens = starts.view(DType::i32, {c.batch + 1}),
                                  .slot_mapping = {}};
  const int64_t workspace_bytes = fold::cache_write_workspace(storage, args);
  const Memory workspace(workspace_bytes);
  const fold::Launch launch{.workspace = workspace.view(DType::u8, {workspace_bytes})};
  const double us = median_us([&] { fold::cache_write(storage, args, launch); });
  const int64_t bytes = total * heads * d * 4 + total * page_bytes / page_size;
  const double copy = copy_us(bytes);
  std::printf("%-44s %9.1f us  %8.1f MB  copy %8.1f us  ratio %6.2f  workspace %6.1f MB\n", c.name, us, bytes * 1e-6,
              copy, us / copy, workspace_bytes * 1e-6);
}

}  // namespace

int main(int argc, char** argv) {
  const char* wanted = argc > 1 ? argv[1] : "";
  const auto layout = [](int64_t d, int bits, bool tail) {
    return CacheLayout{.n_kv_heads = 8, .head_dim = d, .page_size = 256, .k_bits = bits, .v_bits = bits, .tail = tail};
  };
  constexpr int64_t kPrompt = 32768, kBeyond = 262144;  // the next mark after the latter is 327680
  const Case cases[] = {
      {"prompt 32768, D128, 16 bits, no tail", 1, 0, kPrompt, layout(128, 16, false)},
      {"prompt 32768, D128, 8 bits, no tail", 1, 0, kPrompt, layout(128, 8, false)},
      {"prompt 32768, D128, 4 bits, no tail", 1, 0, kPrompt, layout(128, 4, false)},
      {"prompt 32768, D64, 16 bits, no tail", 1, 0, kPrompt, layout(64, 16, false)},
      {"prompt 32768, D256, 16 bits, no tail", 1, 0, kPrompt, layout(256, 16, false)},
      {"chunk 32768 at 262144, D128, 16 bits, tail", 1, kBeyond, kPrompt, layout(128, 16, true)},
      {"chunk 32768 at 262144, D128, 8 bits, tail", 1, kBeyond, kPrompt, layout(128, 8, true)},
      {"prompt 32768, D64, 21 marks", 1, 0, kPrompt, layout(64, 16, true)},
      {"prompt 32768, D128, 21 marks", 1, 0, kPrompt, layout(128, 16, true)},
      {"prompt 32768, D256, 21 marks", 1, 0, kPrompt, layout(256, 16, true)},
      {"append 1 at 1023, D128, one mark", 1, 1023, 1, layout(128, 16, true)},
      {"append 1 at 32767, D128, one mark", 1, 32767, 1, layout(128, 16, true)},
      {"append 1 at 131071, D128, one mark", 1, 131071, 1, layout(128, 16, true)},
      {"append 1 at 32767, D64, one mark", 1, 32767, 1, layout(64, 16, true)},
      {"append 1 at 32000, D128, no mark", 1, 32000, 1, layout(128, 16, true)},
      {"append 1 of 8 at 32000, D128, no mark", 8, 32000, 1, layout(128, 16, true)},
      {"append 1 of 256 at 8000, D128, no mark", 256, 8000, 1, layout(128, 16, true)},
  };
  for (const Case& c : cases) {
    if (std::strstr(c.name, wanted) != nullptr) run(c);
  }
  return 0;
}
