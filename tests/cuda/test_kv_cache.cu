// A C++ cache that owns its pages: on a device it has the CPU's bytes and, in decode, its bits.
#include <filesystem>
#include <functional>

#include "kv_cache_testing.h"

namespace {

using namespace fold;
using namespace fold::testing;

class DeviceKVCache : public DeviceTest {};

/// The same calls to both caches. Ids are places in the order of addition.
class Caches {
 public:
  explicit Caches(
      int64_t head_dim, const std::function<void(KVCacheOptions&)>& change = [](auto&) {})
      : d_(head_dim), here_(make(head_dim, Device::cpu, change)), there_(make(head_dim, Device::cuda, change)) {}

  KVCache& here() { return here_; }
  KVCache& there() { return there_; }

  std::vector<int64_t> ids(const KVCache& cache, const std::vector<size_t>& places) const {
    std::vector<int64_t> chosen;
    const std::vector<int64_t> all = cache.table().requests();
    for (const size_t place : places) chosen.push_back(all[place]);
    return chosen;
  }

  void both(const std::function<void(KVCache&, Device)>& call) {
    call(here_, Device::cpu);
    call(there_, Device::cuda);
  }

  void write(const std::vector<int32_t>& starts, const std::vector<size_t>& places = {}) {
    SharedRows k(++seed_, starts.back(), kKvHeads, d_), v(++seed_, starts.back(), kKvHeads, d_);
    both([&](KVCache& cache, Device device) {
      cache.write_prompt(k.view(device, 0, starts.back()), v.view(device, 0, starts.back()), numbers(starts),
                         ids(cache, places));
    });
    expect_same_pages("a prompt");
  }

  /// A step of so many tokens for each request, or (append false) attention alone.
  void step(int64_t tokens, bool append, const std::vector<int32_t>& q_lens = {},
            const std::vector<size_t>& places = {}, std::optional<int64_t> window_left = {}) {
    const auto batch = static_cast<int64_t>(places.empty() ? here_.table().requests().size() : places.size());
    const int64_t rows = batch * tokens;
    SharedRows q(++seed_, rows, kHeads, d_), k(++seed_, rows, kKvHeads, d_), v(++seed_, rows, kKvHeads, d_);
    std::vector<std::vector<float>> out, lse;
    both([&](KVCache& cache, Device device) {
      Result<float> its_out(device, DType::f32, {batch, tokens, kHeads, d_});
      Result<float> its_lse(device, DType::f32, {batch, kHeads, tokens});
      DecodeArgs call;
      call.q = q.tokens(device, 0, rows, batch);
      if (!q_lens.empty()) call.q_lens = numbers(q_lens);
      call.window_left = window_left;
      DecodeResults results;
      results.out = its_out.view();
      results.lse = its_lse.view();
      if (append) {
        cache.decode(call, k.view(device, 0, rows), v.view(device, 0, rows), results, ids(cache, places));
      } else {
        cache.attend(call, results, ids(cache, places));
      }
      check(cudaDeviceSynchronize());
      out.push_back(its_out.values());
      lse.push_back(its_lse.values());
    });
    expect_same(out[1], out[0], "out");
    expect_same(lse[1], lse[0], "lse");
    expect_same_pages("a step");
  }

  void expect_same_pages(const char* what) const { EXPECT_TRUE(contents(there_) == contents(here_)) << what; }

 private:
  static KVCache make(int64_t head_dim, Device device, const std::function<void(KVCacheOptions&)>& change) {
    KVCacheOptions options = cache_options(head_dim, device);
    change(options);
    return KVCache(options);
  }

  int64_t d_;
  unsigned seed_ = 0;
  KVCache here_, there_;
};

TEST_F(DeviceKVCache, StepsForksAndTruncationsHaveTheCpusBits) {
  for (const int64_t dim : {64, 128, 256}) {
    SCOPED_TRACE("head dim " + std::to_string(dim));
    Caches c(dim);
    c.write({0, 700, 700, 1823});
    c.write({0, 3, 64}, {1, 0});
    c.step(1, false);
    c.step(1, true);
    c.step(4, true, {4, 0, 2});
    c.step(4, false, {4, 0, 2});
    c.step(1, true, {}, {2, 0});
    c.both([](KVCache& cache, Device) {
      const int64_t parent = cache.table().requests()[2];
      cache.fork(parent, 650);
      cache.fork(parent);
    });
    c.step(2, true, {}, {3, 4});  // into pages that requests share
    c.step(1, false, {}, {4, 3, 2, 1, 0});
    c.both([](KVCache& cache, Device) {
      cache.truncate(cache.table().requests()[2], 640);
      cache.free_request(cache.table().requests()[0]);
      cache.add_request();
    });
    c.step(1, true);
    c.step(1, false, {}, {}, 100);
  }
}

TEST_F(DeviceKVCache, PartialSumsHaveTheCpusBits) {
  Caches c(128, [](KVCacheOptions& options) { options.window_left = 900; });
  c.write({0, 700, 1000, 2100});
  SharedRows q(50, 3, kHeads, 128);
  for (const auto& [begin, end] : {std::pair{0, 640}, {640, 1500}}) {
    std::vector<std::vector<int64_t>> sums;
    std::vector<std::vector<float>> grids;
    c.both([&, begin = begin, end = end](KVCache& cache, Device device) {
      Result<int64_t> numerator(device, DType::i64, {3, 1, kHeads, 128}),
          denominator(device, DType::i64, {3, 1, kHeads, 3});
      Result<float> grid(device, DType::f32, {3, 1, kHeads, 3});
      DecodeArgs call;
      call.q = q.tokens(device, 0, 3, 3);
      cache.partial(call, begin, end, {numerator.view(), denominator.view(), grid.view()});
      check(cudaDeviceSynchronize());
      sums.push_back(numerator.values());
      sums.push_back(denominator.values());
      grids.push_back(grid.values());
    });
    expect_same(sums[2], sums[0], "numerator");
    expect_same(sums[3], sums[1], "denominator");
    expect_same(grids[1], grids[0], "grid");
  }
}

/// Calls on a stream of the caller's, without a wait between them.
TEST_F(DeviceKVCache, CallsRunOnTheCallersStream) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  {
    KVCache here(cache_options(64, Device::cpu)), there(cache_options(64, Device::cuda));
    there.set_stream(stream);
    constexpr int64_t kSteps = 20, kRows = 3 * (300 + kSteps);
    SharedRows q(1, kRows, kHeads, 64), k(2, kRows, kKvHeads, 64), v(3, kRows, kKvHeads, 64);
    std::vector<std::vector<float>> got;
    for (const auto& [cache, device] : {std::pair(&here, Device::cpu), {&there, Device::cuda}}) {
      Result<float> out(device, DType::f32, {kSteps, 3, 1, kHeads, 64});
      check(cudaDeviceSynchronize());  // the stream does not wait for what was copied outside of it
      cache->append(k.view(device, 0, 900), v.view(device, 0, 900));
      for (int64_t i = 0; i < kSteps; ++i) {
        DecodeArgs call;
        call.q = q.tokens(device, 900 + 3 * i, 3, 3);
        DecodeResults results;
        results.out = TensorView(out.view().as<float>() + i * 3 * kHeads * 64, DType::f32, {3, 1, kHeads, 64});
        results.out.device = device;
        cache->decode(call, k.view(device, 900 + 3 * i, 3), v.view(device, 900 + 3 * i, 3), results);
      }
      check(cudaStreamSynchronize(stream));
      got.push_back(out.values());
    }
    expect_same(got[1], got[0], "20 steps");
    EXPECT_TRUE(contents(there) == contents(here));
  }
  check(cudaStreamDestroy(stream));
}

TEST_F(DeviceKVCache, FilesHoldTheSameOnBothSides) {
  const auto file = [](const char* name) { return (std::filesystem::temp_directory_path() / name).string(); };
  const std::string from_host = file("fold_cuda_kv_cache_host"), from_device = file("fold_cuda_kv_cache_device");
  Caches c(64, [](KVCacheOptions& options) { options.layout.v_bits = 8; });
  c.write({0, 300, 300, 1400});
  c.both([](KVCache& cache, Device) { cache.fork(cache.table().requests()[2], 1000); });
  c.here().save(from_host);
  c.there().save(from_device);
  const KVCache here = KVCache::load(from_device), there = KVCache::load(from_host, Device::cuda);
  EXPECT_EQ(there.options().device, Device::cuda);
  EXPECT_TRUE(contents(here) == contents(there));
  EXPECT_TRUE(contents(KVCache::load(from_device, Device::cuda)) == contents(KVCache::load(from_host)));
  std::filesystem::remove(from_host);
  std::filesystem::remove(from_device);
}

TEST_F(DeviceKVCache, ARefusedCallChangesNothing) {
  Caches c(256);
  c.write({0, 100, 200, 300});
  KVCache& cache = c.there();
  const std::vector<uint8_t> before = contents(cache);
  SharedRows q(1, 3, kHeads, 256), k(2, 3, kKvHeads, 256), narrow(3, 3, kKvHeads, 128);
  Result<uint16_t> out(Device::cuda, DType::bf16, {3, 1, kHeads, 256});
  const TensorView row = k.view(Device::cuda, 0, 3), prompt = q.view(Device::cuda, 0, 3);
  TensorView prompt_out = TensorView(out.view().data, DType::bf16, {3, kHeads, 256});
  prompt_out.device = Device::cuda;
  DecodeArgs call;
  call.q = q.tokens(Device::cuda, 0, 3, 3);
  DecodeResults results;
  results.out = out.view();
  const auto refuse = [&](const std::string& message, const std::function<void()>& f) {
    try {
      f();
      ADD_FAILURE() << message << ": accepted";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(message), std::string::npos) << e.what();
    }
    EXPECT_TRUE(contents(cache) == before) << message;
  };
  const std::vector<int32_t> starts{0, 1, 2, 3}, falling{0, 2, 1, 3}, many{0, 2, 2, 4};
  OnDevice<int32_t> there(starts);
  refuse("k.device=cpu; supported: cuda:0", [&] { cache.append(k.view(Device::cpu, 0, 3), row); });
  refuse("q.device=cpu; supported: cuda:0", [&] {
    DecodeArgs host = call;
    host.q = q.tokens(Device::cpu, 0, 3, 3);
    cache.attend(host, results);
  });
  refuse("cu_seqlens.device=cuda; supported: cpu",
         [&] { cache.write_prompt(row, row, on_device(numbers(starts), there.data())); });
  refuse("cu_seqlens[2]=1; must not be below", [&] { cache.write_prompt(row, row, numbers(falling)); });
  refuse("cu_seqlens[3]=4; at most the tokens of k, 3", [&] { cache.write_prompt(row, row, numbers(many)); });
  refuse("v.shape", [&] { cache.decode(call, row, narrow.view(Device::cuda, 0, 3), results); });
  refuse("q_lens[1]=2; 0..1", [&] {
    const std::vector<int32_t> q_lens{1, 2, 0};
    DecodeArgs long_call = call;
    long_call.q_lens = numbers(q_lens);
    cache.decode(long_call, row, row, results);
  });
  refuse("window_left=-2", [&] {
    DecodeArgs bad = call;
    bad.window_left = -2;
    cache.decode(bad, row, row, results);
  });
  refuse("q.dtype=float32; supported: bfloat16, float16", [&] {
    TensorView wide = prompt, wide_row = row;
    wide.dtype = wide_row.dtype = DType::f32;
    cache.prefill(wide, wide_row, wide_row, numbers(starts), prompt_out);
  });
}

TEST_F(DeviceKVCache, PoolsThatDoNotFitAreRefused) {
  KVCacheOptions options = cache_options(256, Device::cuda);
  options.num_pages = 1 << 23;  // more than a terabyte
  try {
    KVCache cache(options);
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.argument(), "num_pages") << e.what();
  }
}

}  // namespace
