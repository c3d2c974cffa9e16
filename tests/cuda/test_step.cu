// Whole decoding steps through the API: the device has the CPU's bytes (P4 of docs/numerics.md), and what its tensors
// hold that makes no sense is harmless.
#include <functional>
#include <memory>
#include <thread>

#include "step_testing.h"

namespace {

using namespace fold;
using namespace fold::testing;

class Step : public DeviceTest, public ::testing::WithParamInterface<bool> {};  // with the tail model

/// T new tokens for each request; change() may alter what the step is told before it runs on both sides.
struct StepCase {
  int64_t tokens = 1;
  std::vector<int32_t> q_lens;
  std::function<std::vector<int64_t>(const Scene&)> slots;  // or none
  float v_spread = 1;                                       // of the new values; the cache's is 1
};

/// What a step is told and what comes of it, on both sides.
class StepOfBoth {
 public:
  StepOfBoth(Scene& scene, const StepCase& c)
      : s_(scene),
        slots_(DType::i64, {scene.requests * c.tokens}, c.slots ? c.slots(scene) : std::vector<int64_t>()),
        q_(normal(scene.random, {scene.requests, c.tokens, heads(), head_dim()}, 3)),
        k_(normal(scene.random, {scene.requests * c.tokens, kv_heads(), head_dim()})),
        v_(normal(scene.random, {scene.requests * c.tokens, kv_heads(), head_dim()}, c.v_spread)),
        sinks_(normal(scene.random, {heads()})),
        table_(scene.table()),
        before_(integers(scene.before)),
        q_lens_(integers(c.q_lens)),
        depth_(filled(DType::f32, {1}, 12.0f)),
        out_(filled(DType::f32, {scene.requests, c.tokens, heads(), head_dim()}, 7.0f)),
        lse_(filled(DType::f32, {scene.requests, heads(), c.tokens}, 7.0f)),
        bytes_(filled(DType::i64, {scene.requests, c.tokens, kv_heads()}, int64_t{-1})),
        workspace_(decode_step_workspace(scene.pools.device(), arguments(true))) {}

  void run_on_device(cudaStream_t stream) {
    decode_step(s_.pools.device(), arguments(true), results(true), {.stream = stream, .workspace = workspace_.view()});
  }

  /// Waits for the device.
  void compare() {
    check(cudaDeviceSynchronize());
    decode_step(s_.pools.host(), arguments(false), results(false));
    s_.pools.expect_same("pages");
    out_.expect_same("out");
    lse_.expect_same("lse");
    bytes_.expect_same("bytes read");
  }

 private:
  int64_t kv_heads() const { return s_.layout.n_kv_heads; }
  int64_t heads() const { return kGroup * kv_heads(); }
  int64_t head_dim() const { return s_.layout.head_dim; }

  template <typename T>
  static TensorView view(Both<T>& both, bool there) {
    return both.host.empty() ? TensorView() : there ? both.there() : both.here();
  }
  StepArgs arguments(bool there) {
    StepArgs args{.k = view(k_, there), .v = view(v_, there), .slot_mapping = view(slots_, there), .decode = {}};
    args.decode.q = view(q_, there);
    args.decode.block_table = view(table_, there);
    args.decode.seqlens = view(before_, there);
    args.decode.q_lens = view(q_lens_, there);
    args.decode.depth = view(depth_, there);
    args.decode.sinks = view(sinks_, there);
    return args;
  }
  DecodeResults results(bool there) {
    DecodeResults r;
    r.out = view(out_, there);
    r.lse = view(lse_, there);
    r.bytes_read = view(bytes_, there);
    return r;
  }

  Scene& s_;
  Both<int64_t> slots_;
  Both<float> q_, k_, v_, sinks_;
  Both<int32_t> table_, before_, q_lens_;
  Both<float> depth_, out_, lse_;
  Both<int64_t> bytes_;
  Workspace workspace_;
};

void compare_step(Scene& s, const StepCase& c) {
  StepOfBoth step(s, c);
  step.run_on_device(nullptr);
  step.compare();
}

TEST_P(Step, OneTokenEach) {
  for (const int64_t dim : {64, 128, 256}) {
    SCOPED_TRACE("head dim " + std::to_string(dim));
    const CacheLayout layout{.n_kv_heads = 2, .head_dim = dim, .page_size = 64, .tail = GetParam()};
    Scene s(layout, {1, 63, 64, 130, 1023, 1024}, 1);
    compare_step(s, {});
  }
}

TEST_P(Step, PaddingRequests) {
  Scene s({.n_kv_heads = 2, .head_dim = 128, .tail = GetParam()}, {200, 0, 0, 300}, 8);
  s.batch.table[static_cast<size_t>(s.batch.width)] = -1;  // the second holds no keys and has no page: padding
  compare_step(s, {});
  Scene drafts({.n_kv_heads = 2, .head_dim = 128, .tail = GetParam()}, {200, 0, 0, 300}, 8);
  drafts.batch.table[static_cast<size_t>(drafts.batch.width)] = -1;
  compare_step(drafts, {.tokens = 5, .q_lens = {}, .slots = {}});
}

TEST_P(Step, SomeTokensOfSomeRequests) {
  Scene s({.n_kv_heads = 2, .head_dim = 128, .page_size = 64, .tail = GetParam()}, {60, 61, 1020, 300}, 8);
  compare_step(s, {.tokens = 5, .q_lens = {5, 0, 4, 1}, .slots = {}});
}

TEST_P(Step, MoreTokensThanABlockHas) {
  Scene s({.n_kv_heads = 1, .head_dim = 64, .page_size = 64, .tail = GetParam()}, {30, 62}, 70);
  compare_step(s, {.tokens = 70, .q_lens = {70, 67}, .slots = {}});
  // Values that the step itself brings, in blocks that it completes, are the largest.
  Scene large({.n_kv_heads = 1, .head_dim = 64, .page_size = 64, .tail = GetParam()}, {63, 64}, 130);
  compare_step(large, {.tokens = 130, .q_lens = {65, 130}, .slots = {}, .v_spread = 300});
  Scene many({.n_kv_heads = 8, .head_dim = 64, .page_size = 64, .tail = GetParam()}, {0}, 130);
  compare_step(many, {.tokens = 130, .q_lens = {}, .slots = {}, .v_spread = 1e6});
}

/// Everything is written before anything is read: the second request's table has the first one's page, whose last key
/// (of a block) comes with this step.
TEST_P(Step, RequestsSeeWhatOthersBring) {
  Scene s({.n_kv_heads = 2, .head_dim = 128, .page_size = 256, .tail = GetParam()}, {63, 64}, 8);
  for (int64_t i = 0; i < s.batch.width; ++i)
    s.batch.table[static_cast<size_t>(s.batch.width + i)] = s.batch.table[static_cast<size_t>(i)];
  compare_step(s, {.tokens = 1, .q_lens = {}, .slots = {}, .v_spread = 30});
}

TEST_P(Step, SlotsOfTheCallers) {
  const std::vector<int64_t> given{5, 2, 0, 3};
  const auto slots = [&](const Scene& s) {
    std::vector<int64_t> all(static_cast<size_t>(5 * s.requests), -1);
    for (int64_t b = 0; b < s.requests; ++b) {
      for (int64_t t = 0; t < given[static_cast<size_t>(b)]; ++t) {
        all[static_cast<size_t>(5 * b + t)] = s.batch.slot(s.layout, b, s.before[static_cast<size_t>(b)] + t);
      }
    }
    return all;
  };
  Scene s({.n_kv_heads = 2, .head_dim = 64, .page_size = 64, .tail = GetParam()}, {60, 62, 1020, 300}, 8);
  compare_step(s, {.tokens = 5, .q_lens = {}, .slots = slots});
}

INSTANTIATE_TEST_SUITE_P(Tail, Step, ::testing::Values(true, false));

using Steps = DeviceTest;

/// Rows are copied from and to multiples of 16 bytes only.
TEST_F(Steps, TakeAlignedPagesOnly) {
  Scene s({.n_kv_heads = 1, .head_dim = 64, .page_size = 64}, {100}, 8);
  auto q = normal(s.random, {1, 1, kGroup, 64}), k = normal(s.random, {1, 1, 64}),
       out = filled(DType::f32, {1, 1, kGroup, 64}, 7.0f);
  auto table = s.table(), lengths = integers({100}), starts = integers({0, 1});
  DecodeArgs args;
  args.q = q.there();
  args.block_table = table.there();
  args.seqlens = lengths.there();
  const CacheWriteArgs write{.k = k.there(),
                             .v = k.there(),
                             .block_table = args.block_table,
                             .seqlens = args.seqlens,
                             .cu_seqlens = starts.there(),
                             .slot_mapping = {}};
  DecodeResults results;
  results.out = out.there();
  CacheStorage shifted = s.pools.device();
  shifted.storage.data = static_cast<uint8_t*>(shifted.storage.data) + 4;
  const auto refused = [](const auto& call) {
    try {
      call();
      ADD_FAILURE() << "pages at a multiple of 4 bytes were taken";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("must start at multiples of 16 bytes"), std::string::npos) << e.what();
    }
  };
  refused([&] { decode_workspace(shifted, args); });
  refused([&] { decode(shifted, args, results); });
  refused([&] { cache_write_workspace(shifted, write); });
  refused([&] { cache_write(shifted, write); });
}

/// The first of their kind on a stream, for which a graph is made.
TEST_F(Steps, RunBesideACaptureOfAnotherThread) {
  Scene s({.n_kv_heads = 3, .head_dim = 64, .page_size = 64}, {100, 1023}, 8);
  StepOfBoth step(s, {});
  cudaStream_t captured, stream;
  for (cudaStream_t* const each : {&captured, &stream}) {
    check(cudaStreamCreateWithFlags(each, cudaStreamNonBlocking));
  }
  check(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
  std::thread([&] { EXPECT_NO_THROW(step.run_on_device(stream)); }).join();
  cudaGraph_t graph;
  check(cudaStreamEndCapture(captured, &graph));  // fails if the step has spoilt it
  step.compare();
  check(cudaGraphDestroy(graph));
  for (const cudaStream_t each : {captured, stream}) check(cudaStreamDestroy(each));
}

/// More than graphs are kept for: some are given up while they run.
TEST_F(Steps, OnManyStreams) {
  constexpr size_t kScenes = 4, kStreams = 300;
  std::vector<std::unique_ptr<Scene>> scenes;
  std::vector<std::unique_ptr<StepOfBoth>> steps;
  for (size_t i = 0; i < kScenes; ++i) {
    const std::vector<int64_t> lengths{700, static_cast<int64_t>(60 + i)};
    scenes.push_back(
        std::make_unique<Scene>(CacheLayout{.n_kv_heads = 1, .head_dim = 64, .page_size = 64}, lengths, 8));
    steps.push_back(std::make_unique<StepOfBoth>(*scenes.back(), StepCase{}));
  }
  std::vector<cudaStream_t> streams(kStreams);
  for (size_t i = 0; i < kStreams; ++i) {
    check(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    if (i >= kScenes) check(cudaStreamSynchronize(streams[i - kScenes]));
    steps[i % kScenes]->run_on_device(streams[i]);
  }
  for (const auto& step : steps) step->compare();
  for (const cudaStream_t stream : streams) check(cudaStreamDestroy(stream));
}

/// Lengths and numbers of tokens that cannot be bring nothing; neighbours do not notice.
TEST_F(Steps, ThatMakeNoSenseAreHarmless) {
  const CacheLayout layout{.n_kv_heads = 1, .head_dim = 64, .page_size = 64};
  Scene s(layout, {100, 100, 100, 100}, 8);
  constexpr int64_t kTokens = 3;
  const int64_t h = kGroup, d = 64;
  auto q = normal(s.random, {4, kTokens, h, d}, 3), k = normal(s.random, {4 * kTokens, 1, d}),
       v = normal(s.random, {4 * kTokens, 1, d});
  auto table = s.table(), before = integers({100, -5, INT32_MAX - 1, 100}), q_lens = integers({3, 2, 3, -4});
  auto out = filled(DType::f32, {4, kTokens, h, d}, 7.0f);
  StepArgs args{.k = k.there(), .v = v.there(), .slot_mapping = {}, .decode = {}};
  args.decode.q = q.there();
  args.decode.block_table = table.there();
  args.decode.seqlens = before.there();
  args.decode.q_lens = q_lens.there();
  DecodeResults results;
  results.out = out.there();
  const Workspace workspace(decode_step_workspace(s.pools.device(), args));
  decode_step(s.pools.device(), args, results, {.stream = nullptr, .workspace = workspace.view()});
  check(cudaDeviceSynchronize());

  // The first request alone, on the CPU.
  std::vector<float> want(static_cast<size_t>(kTokens * h * d));
  int32_t length = 100;
  StepArgs alone{.k = TensorView(k.host.data(), DType::f32, {kTokens, 1, d}),
                 .v = TensorView(v.host.data(), DType::f32, {kTokens, 1, d}),
                 .slot_mapping = {},
                 .decode = {}};
  alone.decode.q = TensorView(q.host.data(), DType::f32, {1, kTokens, h, d});
  alone.decode.block_table = TensorView(table.host.data(), DType::i32, {1, s.batch.width});
  alone.decode.seqlens = TensorView(&length, DType::i32, {1});
  DecodeResults host_results;
  host_results.out = TensorView(want.data(), DType::f32, {1, kTokens, h, d});
  decode_step(s.pools.host(), alone, host_results);
  std::vector<float> got = out.device.back();
  got.resize(want.size());
  expect_same(got, want, "the request that makes sense");
  s.pools.expect_same("pages");
}

/// What a step writes is what a cache write does, whatever the rows and how they lie: three tokens a request, over the
/// end of a block.
TEST_F(Steps, WriteEveryLayoutAndType) {
  const auto compare = [](const CacheLayout& layout, DType k_dtype, DType v_dtype, int64_t first, int64_t pad) {
    constexpr int64_t kTokens = 3;
    Scene s(layout, {0, 62, 125, 191}, kTokens, 0.3);
    const int64_t b = s.requests, hk = layout.n_kv_heads, d = layout.head_dim;
    Rows k = make_rows(s.random, b * kTokens, hk, d, k_dtype, 0.5, first, pad);
    Rows v = make_rows(s.random, b * kTokens, hk, d, v_dtype, 0.5, first, pad);
    const OnDevice<uint8_t> k_there(k.bytes), v_there(v.bytes);
    auto q = normal(s.random, {b, kTokens, hk, d});
    auto table = s.table(), before = integers(s.before);
    auto out = filled(DType::f32, {b, kTokens, hk, d}, 7.0f);
    const auto rows = [&](const Rows& from, uint8_t* data) {
      TensorView view(data + from.first * dtype_size(from.dtype), from.dtype, {b * kTokens, hk, d});
      view.strides = {from.stride_t, from.stride_h, 1};
      return view;
    };
    const auto there_rows = [&](const Rows& from, const OnDevice<uint8_t>& bytes) {
      const TensorView view = rows(from, bytes.data());
      return on_device(view, view.data);
    };
    StepArgs here{.k = rows(k, k.bytes.data()), .v = rows(v, v.bytes.data()), .slot_mapping = {}, .decode = {}};
    here.decode.q = q.here();
    here.decode.block_table = table.here();
    here.decode.seqlens = before.here();
    StepArgs there{.k = there_rows(k, k_there), .v = there_rows(v, v_there), .slot_mapping = {}, .decode = {}};
    there.decode.q = q.there();
    there.decode.block_table = table.there();
    there.decode.seqlens = before.there();
    DecodeResults results_here, results_there;
    results_here.out = out.here();
    results_there.out = out.there();
    const Workspace workspace(decode_step_workspace(s.pools.device(), there));
    decode_step(s.pools.device(), there, results_there, {.stream = nullptr, .workspace = workspace.view()});
    check(cudaDeviceSynchronize());
    decode_step(s.pools.host(), here, results_here);
    s.pools.expect_same("pages");
    out.expect_same("out");
  };
  for (const int64_t dim : {64, 128, 256}) {
    for (const auto& [k_bits, v_bits] : {std::pair{16, 16}, {8, 4}, {4, 8}}) {
      for (const bool tail : {true, false}) {
        SCOPED_TRACE("head dim " + std::to_string(dim) + ", bits " + std::to_string(k_bits));
        const CacheLayout layout{2, dim, 64, k_bits, v_bits, tail};
        compare(layout, DType::bf16, DType::f16, 0, 0);
        compare(layout, DType::f16, DType::f32, 1, 3);
        compare(layout, DType::f32, DType::bf16, 3, 1);
      }
    }
  }
}

}  // namespace
