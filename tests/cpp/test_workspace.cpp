// Workspaces: decode's does not depend on the number of keys, training's is never rows * keys. Both run under a limit
// on the process's private memory that the forbidden workspace would break.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fstream>
#include <random>
#include <string>

#include "fold/attention.h"
#include "fold/kv_cache.h"

namespace {

using fold::DType;
using fold::TensorView;

/// Private writable memory of the process, bytes.
int64_t data_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmData:") {
      int64_t kilobytes = 0;
      status >> kilobytes;
      return kilobytes * 1024;
    }
  }
  return 0;
}

/// Lets the process take `bytes` more memory until the end of the scope.
class MemoryLimit {
 public:
  explicit MemoryLimit(int64_t bytes) {
    getrlimit(RLIMIT_DATA, &before_);
    rlimit limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(data_bytes() + bytes);
    setrlimit(RLIMIT_DATA, &limit);
  }
  ~MemoryLimit() { setrlimit(RLIMIT_DATA, &before_); }

 private:
  rlimit before_{};
};

std::vector<float> normal(int64_t count) {
  std::mt19937 rng(1);
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = distribution(rng);
  return values;
}

class Workspace : public ::testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "a sanitizer's own memory breaks the limit";
#endif
    if (data_bytes() == 0) GTEST_SKIP() << "needs /proc/self/status";
  }
};

TEST_F(Workspace, DecodeIsIndependentOfTheNumberOfKeys) {
  constexpr int64_t kKeys = 1 << 18, kHeads = 32, kDim = 64;  // one fp32 a row and key would be 32 MiB
  const fold::CacheLayout layout{.n_kv_heads = 1, .head_dim = kDim, .tail = false};
  const fold::PageSections sections = fold::page_sections(layout);
  const int64_t pages = kKeys / layout.page_size;
  std::vector<uint8_t> storage(static_cast<size_t>(pages * sections.bytes));
  std::vector<int32_t> table(static_cast<size_t>(pages));
  for (int64_t i = 0; i < pages; ++i) table[i] = static_cast<int32_t>(i);
  auto rows = normal(kKeys * kDim), q = normal(kHeads * kDim);
  int32_t before = 0, starts[2] = {0, kKeys}, length = kKeys;
  const fold::CacheStorage cache{layout, {storage.data(), DType::u8, {pages, sections.bytes}}};
  fold::cache_write(cache, {.k = {rows.data(), DType::f32, {kKeys, 1, kDim}},
                            .v = {rows.data(), DType::f32, {kKeys, 1, kDim}},
                            .block_table = {table.data(), DType::i32, {1, pages}},
                            .seqlens = {&before, DType::i32, {1}},
                            .cu_seqlens = {starts, DType::i32, {2}},
                            .slot_mapping = {}});
  std::vector<float> out(kHeads * kDim);
  fold::DecodeArgs args;
  args.q = {q.data(), DType::f32, {1, 1, kHeads, kDim}};
  args.block_table = {table.data(), DType::i32, {1, pages}};
  args.seqlens = {&length, DType::i32, {1}};
  fold::DecodeResults results;
  results.out = {out.data(), DType::f32, {1, 1, kHeads, kDim}};
  length = 4096;
  fold::decode(cache, args, results);  // threads and their scratch come to be
  length = kKeys;
  const MemoryLimit limit(8 << 20);
  EXPECT_NO_THROW(fold::decode(cache, args, results));
}

TEST_F(Workspace, TrainingNeverHoldsRowsTimesKeys) {
  constexpr int64_t kRows = 8192, kDim = 64;  // rows * keys fp32 would be 256 MiB
  auto q = normal(kRows * kDim);
  const auto tensor = [&](std::vector<float>& values) {
    return TensorView(values.data(), DType::f32, {1, kRows, 1, kDim});
  };
  std::vector<float> out(q.size()), lse(kRows), dq(q.size()), dk(q.size()), dv(q.size());
  const TensorView lse_view(lse.data(), DType::f32, {1, 1, kRows});
  fold::AttentionOptions options;
  options.causal = true;
  const MemoryLimit limit(64 << 20);
  EXPECT_NO_THROW(fold::attention_forward(tensor(q), tensor(q), tensor(q), tensor(out), lse_view, options));
  EXPECT_NO_THROW(fold::attention_backward({.q = tensor(q),
                                            .k = tensor(q),
                                            .v = tensor(q),
                                            .out = tensor(out),
                                            .lse = lse_view,
                                            .dout = tensor(q),
                                            .dq = tensor(dq),
                                            .dk = tensor(dk),
                                            .dv = tensor(dv),
                                            .dsinks = {}},
                                           options));
}

}  // namespace
