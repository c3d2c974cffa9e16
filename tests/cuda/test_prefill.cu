// Attention of prompts over what is cached and themselves. It is attention over whole sequences whose keys the cache
// says: the bits of attention_forward on the CPU's reading of them.
#include "kv_cache_testing.h"

namespace {

using namespace fold;
using namespace fold::testing;

class DevicePrefill : public DeviceTest {};

struct Outputs {
  std::vector<uint16_t> out;  // (tokens, H, D)
  std::vector<float> lse;     // (H, tokens)
};

/// attention_forward on the device over what the CPU's cache holds of each request, then the chunk's own keys.
Outputs expected(const KVCache& here, const std::vector<int64_t>& ids, SharedRows& q, SharedRows& k, SharedRows& v,
                 DType dtype, int64_t first, const std::vector<int32_t>& starts) {
  const int64_t d = here.options().layout.head_dim, row = kKvHeads * d, tokens = starts.back();
  const auto batch = static_cast<int64_t>(ids.size());
  std::vector<int32_t> lengths(ids.size()), all_starts{0};
  std::vector<int32_t> table(ids.size() * here.table().max_pages());
  here.table().write_tables(ids, here.table().max_pages(), table.data(), lengths.data());
  std::vector<uint16_t> keys, values;
  for (size_t b = 0; b < ids.size(); ++b) {
    const int64_t length = lengths[b], own = starts[b + 1] - starts[b], at = static_cast<int64_t>(keys.size());
    for (std::vector<uint16_t>* all : {&keys, &values}) all->resize(all->size() + (length + own) * row);
    const std::vector<int32_t> both{0, lengths[b]};
    cache_read(here.storage(),
               TensorView(table.data() + b * here.table().max_pages(), DType::i32, {1, here.table().max_pages()}),
               numbers(both), TensorView(keys.data() + at, dtype, {length, kKvHeads, d}),
               TensorView(values.data() + at, dtype, {length, kKvHeads, d}));
    for (const auto& [from, to] : {std::pair(&k, &keys), {&v, &values}}) {
      const auto* own_rows = from->view(Device::cpu, first + starts[b], own).as<const uint16_t>();
      std::copy(own_rows, own_rows + own * row, to->begin() + at + length * row);
    }
    all_starts.push_back(all_starts.back() + static_cast<int32_t>(length + own));
  }
  OnDevice<uint16_t> device_keys(keys), device_values(values);
  OnDevice<int32_t> q_starts(starts), k_starts(all_starts);
  OnDevice<float> sinks(here.options().sinks);
  const auto rows = [&](uint16_t* data) { return on_device({nullptr, dtype, {all_starts.back(), kKvHeads, d}}, data); };
  AttentionOptions options;
  options.causal = true;
  options.window_left = here.options().window_left;
  options.sinks = on_device({nullptr, DType::f32, {kHeads}}, sinks.data());
  options.cu_seqlens_q = on_device({nullptr, DType::i32, {batch + 1}}, q_starts.data());
  options.cu_seqlens_k = on_device({nullptr, DType::i32, {batch + 1}}, k_starts.data());
  Result<uint16_t> out(Device::cuda, dtype, {tokens, kHeads, d});
  Result<float> lse(Device::cuda, DType::f32, {kHeads, tokens});
  const TensorView query = q.view(Device::cuda, first, tokens);
  const TensorView key = rows(device_keys.data()), value = rows(device_values.data());
  OnDevice<uint8_t> workspace(std::vector<uint8_t>(
      static_cast<size_t>(attention_forward_workspace(query, key, value, out.view(), lse.view(), options))));
  const auto bytes = static_cast<int64_t>(workspace.back().size());
  attention_forward(query, key, value, out.view(), lse.view(), options,
                    {.stream = nullptr, .workspace = on_device({nullptr, DType::u8, {bytes}}, workspace.data())});
  check(cudaDeviceSynchronize());
  return {out.values(), lse.values()};
}

TEST_F(DevicePrefill, ChunksHaveTheBitsOfAttentionOverTheirKeys) {
  for (const int64_t dim : {64, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const int64_t window : {-1, 150}) {
        SCOPED_TRACE("head dim " + std::to_string(dim) + ", window " + std::to_string(window));
        KVCacheOptions options = cache_options(dim, Device::cpu);
        options.window_left = window;
        options.layout.v_bits = dtype == DType::f16 ? 8 : 16;
        KVCache here(options);
        options.device = Device::cuda;
        KVCache there(options);
        constexpr int64_t kRows = 2400;
        SharedRows q(1, kRows, kHeads, dim, dtype), k(2, kRows, kKvHeads, dim, dtype),
            v(3, kRows, kKvHeads, dim, dtype);
        int64_t first = 0;
        for (const std::vector<int32_t>& starts :
             {std::vector<int32_t>{0, 100, 100, 433}, {0, 50, 300, 301}, {0, 1, 2, 702}, {0, 500, 900, 910}}) {
          const int64_t tokens = starts.back();
          std::vector<int64_t> ids = here.table().requests(), its_ids = there.table().requests();
          if (first > 400) {
            std::swap(ids[0], ids[2]);
            std::swap(its_ids[0], its_ids[2]);
          }
          const Outputs want = expected(here, ids, q, k, v, dtype, first, starts);
          here.write_prompt(k.view(Device::cpu, first, tokens), v.view(Device::cpu, first, tokens), numbers(starts),
                            ids);
          Result<uint16_t> out(Device::cuda, dtype, {tokens, kHeads, dim});
          Result<float> lse(Device::cuda, DType::f32, {kHeads, tokens});
          there.prefill(q.view(Device::cuda, first, tokens), k.view(Device::cuda, first, tokens),
                        v.view(Device::cuda, first, tokens), numbers(starts), out.view(), lse.view(), its_ids);
          check(cudaDeviceSynchronize());
          expect_same(out.values(), want.out, "out");
          expect_same(lse.values(), want.lse, "lse");
          EXPECT_TRUE(contents(there) == contents(here));
          first += tokens;
        }
      }
    }
  }
}

/// The operation itself, on tables that lie on the device and may hold anything.
class OnTables {
 public:
  static constexpr int64_t kDim = 64, kTokens = 96;

  OnTables() : cache_(cache_options(kDim, Device::cuda)) {
    SharedRows k(5, 1200, kKvHeads, kDim), v(6, 1200, kKvHeads, kDim);
    cache_.append(k.view(Device::cuda, 0, 1200), v.view(Device::cuda, 0, 1200));  // 400 keys each
    width_ = 8;
    table.resize(static_cast<size_t>(3 * width_));
    std::vector<int32_t> held(3);
    cache_.table().write_tables(cache_.table().requests(), width_, table.data(), held.data());
    device_table_ = std::make_unique<OnDevice<int32_t>>(table);
    device_lengths_ = std::make_unique<OnDevice<int32_t>>(lengths);
    device_starts_ = std::make_unique<OnDevice<int32_t>>(starts);
  }

  std::vector<int32_t> table, lengths{400, 100, 300}, starts{0, 32, 64, 96};

  PrefillArgs args(int64_t cached_keys) {
    return {.q = q_.view(Device::cuda, 0, kTokens),
            .k = k_.view(Device::cuda, 0, kTokens),
            .v = v_.view(Device::cuda, 0, kTokens),
            .cu_seqlens = on_device(numbers(starts), device_starts_->data()),
            .block_table = on_device({nullptr, DType::i32, {3, width_}}, device_table_->data()),
            .seqlens = on_device(numbers(lengths), device_lengths_->data()),
            .sinks = {},
            .softmax_scale = 0,
            .window_left = -1,
            .cached_keys = cached_keys};
  }

  void upload() {
    device_table_->set(table);
    device_lengths_->set(lengths);
    device_starts_->set(starts);
  }

  int64_t workspace(int64_t cached_keys) {
    return prefill_attention_workspace(cache_.storage(), args(cached_keys), out_.view(), lse_.view());
  }

  void launch(int64_t cached_keys, cudaStream_t stream, const TensorView& workspace) {
    prefill_attention(cache_.storage(), args(cached_keys), out_.view(), lse_.view(),
                      {.stream = stream, .workspace = workspace});
  }

  Outputs run(int64_t cached_keys) {
    upload();
    const int64_t bytes = workspace(cached_keys);
    OnDevice<uint8_t> memory(std::vector<uint8_t>(static_cast<size_t>(bytes), 0xFF));
    launch(cached_keys, nullptr, on_device({nullptr, DType::u8, {bytes}}, memory.data()));
    return results();
  }

  void spoil_results() {
    out_.spoil();
    lse_.spoil();
  }

  Outputs results() const {
    check(cudaDeviceSynchronize());
    return {out_.values(), lse_.values()};
  }

 private:
  KVCache cache_;
  int64_t width_ = 0;
  SharedRows q_{7, kTokens, kHeads, kDim}, k_{8, kTokens, kKvHeads, kDim}, v_{9, kTokens, kKvHeads, kDim};
  Result<uint16_t> out_{Device::cuda, DType::bf16, {kTokens, kHeads, kDim}};
  Result<float> lse_{Device::cuda, DType::f32, {kHeads, kTokens}};
  std::unique_ptr<OnDevice<int32_t>> device_table_, device_lengths_, device_starts_;
};

/// Rows 32 b .. 32 b + 31, of request b.
void expect_same_request(const Outputs& got, const Outputs& want, int64_t request, const char* what) {
  const auto part = [request](const auto& all) {
    constexpr int64_t kPart = 32 * kHeads * OnTables::kDim;
    return std::vector(all.begin() + request * kPart, all.begin() + (request + 1) * kPart);
  };
  expect_same(part(got.out), part(want.out), what);
}

TEST_F(DevicePrefill, WhatIsDeclaredChangesNoBit) {
  OnTables t;
  const Outputs want = t.run(800);
  for (const int64_t declared : {int64_t{-1}, int64_t{801}, int64_t{1300}}) {
    const Outputs got = t.run(declared);
    expect_same(got.out, want.out, "out");
    expect_same(got.lse, want.lse, "lse");
  }
  EXPECT_LT(t.workspace(0), t.workspace(800));
  EXPECT_LT(t.workspace(800), t.workspace(-1));
  EXPECT_THROW(t.workspace(-2), Error);
}

TEST_F(DevicePrefill, TablesThatMakeNoSenseAreHarmless) {
  OnTables t;
  const Outputs want = t.run(800);
  const auto lse_of = [](const Outputs& got, int64_t row) { return got.lse[static_cast<size_t>(row)]; };

  t.lengths[1] = -4;  // no cached keys
  Outputs got = t.run(800);
  expect_same_request(got, want, 0, "negative length, before");
  expect_same_request(got, want, 2, "negative length, behind");
  EXPECT_TRUE(std::isfinite(lse_of(got, 32)));

  t.lengths[1] = 1000000;  // more than declared: no key at all, from there on
  got = t.run(800);
  expect_same_request(got, want, 0, "too long");
  for (const int64_t row : {32, 63, 64, 95}) EXPECT_EQ(lse_of(got, row), -INFINITY);
  EXPECT_EQ(got.out[32 * kHeads * OnTables::kDim], 0);

  t.lengths[1] = 100;
  t.table[8] = 1 << 30;  // no such page
  got = t.run(800);
  expect_same_request(got, want, 0, "no page");
  expect_same_request(got, want, 2, "no page");
  EXPECT_TRUE(std::isnan(numerics::from_bf16(got.out[32 * kHeads * OnTables::kDim])));

  t.table[8] = -1;
  t.starts = {0, 32, 1 << 20, 96};  // cut to the rows there are
  got = t.run(800);
  expect_same_request(got, want, 0, "wild starts");
}

TEST_F(DevicePrefill, ACapturedCallReplaysAtOtherLengths) {
  OnTables t;
  const int64_t bytes = t.workspace(1200);
  OnDevice<uint8_t> memory(std::vector<uint8_t>(static_cast<size_t>(bytes), 0xFF));
  const TensorView workspace = on_device({nullptr, DType::u8, {bytes}}, memory.data());
  t.run(1200);  // loads the kernels
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  t.launch(1200, stream, workspace);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{1, 0, 399}, {400, 400, 400}, {0, 0, 0}}) {
    t.lengths = lengths;
    std::swap(t.table[2], t.table[5]);
    t.starts = {0, lengths[0] / 8, 60, 90};
    const Outputs want = t.run(1200);
    t.spoil_results();
    check(cudaDeviceSynchronize());
    check(cudaGraphLaunch(executable, stream));
    check(cudaStreamSynchronize(stream));
    const Outputs got = t.results();
    expect_same(got.out, want.out, "out");
    expect_same(got.lse, want.lse, "lse");
  }
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
}

}  // namespace
