// Calls that the host cannot check, because what their tensors hold lies on the device: nonsense in them is harmless,
// a captured graph serves other contents, and what can be checked is.
#include <limits>

#include "cache_write_testing.h"

namespace {

using namespace fold;
using namespace fold::testing;

using CacheWriteTables = DeviceTest;

TEST(CudaBackend, IsMissedInWords) {
  if (has_device()) GTEST_SKIP() << "there is a device";
  Random random(1);
  const CacheLayout layout{.n_kv_heads = 1, .head_dim = 64};
  Batch batch(random, layout, {64});
  const Call call = batch.call(random, layout, {1}, 0);
  Pool pool(layout, 1);
  CacheWriteArgs args = CallTensors(call, layout).host();
  CacheStorage storage = pool.storage();
  for (TensorView* t : {&args.k, &args.v, &args.block_table, &args.seqlens, &args.cu_seqlens, &storage.storage}) {
    t->device = Device::cuda;
  }
  try {
    cache_write(storage, args, {});
    FAIL() << "a write without a device";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), Error::Kind::type);
    EXPECT_EQ(std::string(e.what()).rfind("device=cuda:0; supported: cpu (", 0), 0u) << e.what();
  }
}

/// Four requests that begin with these many tokens, and what a call does to them of which the kernels cannot make
/// sense.
struct Nonsense {
  explicit Nonsense(unsigned seed)
      : random(seed), batch(random, layout, {1300, 256, 300, 70}), pools(layout, batch.pool_pages) {
    good = batch.call(random, layout, {1300, 200, 300, 70}, 0);
    bad = good;
  }

  int32_t& page(int64_t request, int64_t index) {
    return bad.table[static_cast<size_t>(request * batch.width + index)];
  }

  /// Slots of the first tokens of each request; the others are padding.
  std::vector<int64_t> slots(const std::vector<int64_t>& counts) const {
    std::vector<int64_t> all(static_cast<size_t>(good.tokens), -1);
    for (int64_t b = 0; b < good.batch(); ++b) {
      for (int64_t t = 0; t < counts[static_cast<size_t>(b)]; ++t) {
        all[static_cast<size_t>(good.cu[static_cast<size_t>(b)] + t)] = batch.slot(layout, b, t);
      }
    }
    return all;
  }

  /// The bad call on the device; on the CPU the good one's first tokens of each request.
  void write(const std::vector<int64_t>& counts) {
    CallTensors tensors(bad, layout);
    tensors.upload();
    write_on_device(pools.device(), tensors.device());
    Call kept = good;
    kept.slots = slots(counts);
    cache_write(pools.host(), CallTensors(kept, layout).host());
  }

  const CacheLayout layout{.n_kv_heads = 2, .head_dim = 64, .page_size = 64};
  Random random;
  Batch batch;
  BothPools pools;
  Call good, bad;
};

TEST_F(CacheWriteTables, KeysWithoutAPageInThePoolAreLeftOut) {
  for (const int64_t id : {int64_t{-1}, int64_t{1} << 20, int64_t{INT32_MIN}, int64_t{INT32_MAX}}) {
    Nonsense n(10);
    n.page(1, 3) = static_cast<int32_t>(id);
    n.page(2, 4) = id < 0 ? -2 : static_cast<int32_t>(n.batch.pool_pages);
    n.write({1300, 192, 256, 70});
    n.pools.expect_same("page " + std::to_string(id));
  }
}

TEST_F(CacheWriteTables, AFitWithoutAllItsPagesIsLeftOut) {
  Nonsense n(11);
  n.page(0, 1) = -1;
  n.write({1300, 200, 300, 70});
  n.pools.restore(n.good.table[1], 0, n.pools.sections().bytes);
  for (const size_t last_page : {1024 / 64 - 1, 1280 / 64 - 1}) {
    n.pools.restore(n.good.table[last_page], n.pools.sections().fit_in, n.pools.sections().bytes);
  }
  n.pools.expect_same("no page for keys 64..127");
}

TEST_F(CacheWriteTables, LengthsThatCannotBeAreLeftOut) {
  Nonsense n(12);
  n.bad.seqlens[1] = -1;
  n.bad.seqlens[2] = INT32_MAX - 100;
  n.write({1300, 0, 0, 70});
  n.pools.expect_same("lengths");
}

TEST_F(CacheWriteTables, TokensWhoseSlotIsAnothersAreLeftOut) {
  Nonsense n(13);
  n.bad.slots = n.slots({1300, 200, 300, 70});
  for (int64_t t = 192; t < 200; ++t) n.bad.slots[static_cast<size_t>(n.good.cu[1] + t)] += 64;
  n.write({1300, 192, 300, 70});
  n.pools.expect_same("slots");
}

/// Nobody can say what is meant, but nothing outside the pool is touched.
TEST_F(CacheWriteTables, TokenRangesThatCannotBeAreHarmless) {
  for (const bool mapped : {false, true}) {
    Nonsense n(14);
    if (mapped) n.bad.slots = n.slots({1300, 200, 300, 70});
    n.bad.cu = {0, 5000000, -7, 1800, 12};
    n.write({0, 0, 0, 0});
    n.pools.adopt_pages();
    n.pools.expect_same("guards");
  }
}

/// A captured call, replayed with other lengths, counts, pages and rows: nothing of them is in the graph.
TEST_F(CacheWriteTables, GraphsAreReplayedWithOtherContents) {
  Random random(11);
  const CacheLayout layout{.n_kv_heads = 2, .head_dim = 128, .page_size = 256};
  constexpr int64_t kTokens = 3000;
  Batch batch(random, layout, {3000, 1100, 2000});
  BothPools pools(layout, batch.pool_pages);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

  Call call;  // the graph's tensors, always of the same shapes
  CallTensors tensors(call, layout);
  cudaGraphExec_t graph = nullptr;
  std::optional<Workspace> workspace;
  for (const std::vector<int64_t>& counts : {std::vector<int64_t>{900, 64, 500},
                                             {1, 1, 1},
                                             {123, 960, 400},
                                             {0, 0, 0},
                                             {1, 1, 1},
                                             {1400, 0, 1},
                                             {255, 74, 1}}) {
    const Call plain = batch.call(random, layout, counts, 0.01, DType::bf16, DType::bf16);
    call = with_padding(random, layout, batch, plain, 0);
    ASSERT_LE(call.tokens, kTokens);
    for (Rows* rows : {&call.k, &call.v}) {
      rows->bytes.resize(static_cast<size_t>(kTokens * rows->stride_t * dtype_size(rows->dtype)), 0xFF);
    }
    call.slots.resize(kTokens, -1);
    call.tokens = kTokens;
    tensors.upload();
    if (graph == nullptr) {
      workspace.emplace(cache_write_workspace(pools.device(), tensors.device()));
      cudaGraph_t captured = nullptr;
      check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
      cache_write(pools.device(), tensors.device(), {.stream = stream, .workspace = workspace->view()});
      check(cudaStreamEndCapture(stream, &captured));
      check(cudaGraphInstantiate(&graph, captured, 0));
      check(cudaGraphDestroy(captured));
    }
    check(cudaGraphLaunch(graph, stream));
    check(cudaStreamSynchronize(stream));
    cache_write(pools.host(), tensors.host());
    pools.expect_same("replay");
    if (HasFatalFailure()) break;
  }
  check(cudaGraphExecDestroy(graph));
  check(cudaStreamDestroy(stream));
}

TEST_F(CacheWriteTables, CallsThatCannotBeHonouredSaySo) {
  Random random(12);
  const CacheLayout layout{.n_kv_heads = 2, .head_dim = 64};
  Batch batch(random, layout, {2000});
  BothPools pools(layout, batch.pool_pages);
  const Call call = batch.call(random, layout, {1100}, 0);
  CallTensors tensors(call, layout);
  tensors.upload();
  const CacheStorage storage = pools.device();
  const CacheWriteArgs args = tensors.device();
  const auto message = [&](const CacheWriteArgs& with, const Launch& launch) -> std::string {
    try {
      cache_write(storage, with, launch);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  const int64_t bytes = cache_write_workspace(storage, args);
  Workspace workspace(bytes);
  EXPECT_EQ(message(args, {}), "workspace=nothing; a tensor is required");
  Launch short_by_one{.stream = nullptr, .workspace = workspace.view()};
  short_by_one.workspace.shape[0] = bytes - 1;
  EXPECT_EQ(message(args, short_by_one),
            "workspace.shape=(" + std::to_string(bytes - 1) + "); at least " + std::to_string(bytes) + " bytes");
  CacheWriteArgs mixed = args;
  mixed.seqlens.device = Device::cpu;
  EXPECT_EQ(message(mixed, {}), "seqlens.device=cpu; supported: cuda:0");
  mixed = args;
  mixed.v.device_index = 1;
  EXPECT_EQ(message(mixed, {}), "v.device=cuda:1; supported: cuda:0");
  mixed = args;
  mixed.k.shape[2] = 32;
  EXPECT_EQ(message(mixed, {}), "k.shape=(1100, 2, 32); dimension 2 must be 64 (the cache's head_dim)");
  EXPECT_EQ(message(args, {.stream = nullptr, .workspace = workspace.view()}), "no error");
  check(cudaDeviceSynchronize());
}

}  // namespace
