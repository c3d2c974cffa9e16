// The decode step on a device has the CPU backend's bytes (P4 of docs/numerics.md), whatever its splits, neighbours,
// pages and graphs (P1, P3, P6), and reads nothing that a row does not see (P5).
#include "decode_testing.h"

namespace {

/// What different kernels sum: steps of a depth, with the tail model or without, and those that read every V.
enum class Reads { kByDepthWithTail, kByDepth, kEvery };
void PrintTo(Reads reads, std::ostream* to) {
  *to << (reads == Reads::kEvery ? "every V" : reads == Reads::kByDepth ? "by depth" : "by depth with the tail model");
}

class DecodeDevice : public fold::testing::DeviceTest, public testing::WithParamInterface<Reads> {
 protected:
  static Case plain() {
    Case c;
    c.layout.tail = GetParam() == Reads::kByDepthWithTail;
    return with_depths(c, c.depths);
  }
  /// These depths, unless every V is read.
  static Case with_depths(Case c, const std::vector<float>& depths) {
    c.depths = GetParam() == Reads::kEvery ? std::vector<float>() : depths;
    return c;
  }
};
INSTANTIATE_TEST_SUITE_P(Reads, DecodeDevice, testing::Values(Reads::kByDepthWithTail, Reads::kByDepth, Reads::kEvery));

TEST_P(DecodeDevice, LengthsAndBits) {
  for (const int bits : {16, 8, 4}) {
    SCOPED_TRACE("bits " + std::to_string(bits));
    Case c = plain();
    c.layout.k_bits = c.layout.v_bits = bits;
    c.lengths = {0, 1, 63, 64, 65, 129, 192, 193, 255, 256, 257, 1023, 1024, 1025, 4095, 1409};
    compare(with_depths(c, {12, 10.5, kDense, 16}));
  }
}

class DecodeShapes : public fold::testing::DeviceTest,
                     public testing::WithParamInterface<std::tuple<int64_t, int64_t>> {};  // D, G

TEST_P(DecodeShapes, HaveTheCpusBytes) {
  const auto [dim, group] = GetParam();
  for (const auto& [k_bits, v_bits] : {std::pair{16, 16}, {8, 4}, {4, 16}, {16, 8}}) {
    for (const bool tail : {true, false}) {
      SCOPED_TRACE("bits " + std::to_string(k_bits) + ", " + std::to_string(v_bits) + (tail ? ", tail" : ""));
      Case c;
      c.layout = {.n_kv_heads = 2,
                  .head_dim = dim,
                  .page_size = dim == 64 ? 64 : 320,
                  .k_bits = k_bits,
                  .v_bits = v_bits,
                  .tail = tail};
      c.group = group;
      c.lengths = {131, 1031, 2309};
      c.depths = {12, 14, 9, 16, kDense};
      compare(c);
      c.depths = {11};
      compare(c);
      c.depths = {};
      compare(c);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, DecodeShapes,
                         testing::Combine(testing::Values(64, 128, 256),
                                          testing::Values(1, 2, 3, 4, 7, 8, 10, 12, 14, 16, 33)));

TEST_P(DecodeDevice, SplitsChangeNoBit) {
  Case c = plain();
  c.lengths = {4095, 70};
  Batch batch(c);
  const Results want = batch.on_cpu();
  for (const int splits : {1, 2, 3, 7, 16, 33, 64, INT_MAX}) {
    SCOPED_TRACE(std::to_string(splits) + " splits");
    batch.set_splits(splits);
    expect_same(batch.on_gpu(), want);
  }
}

TEST_P(DecodeDevice, NeighboursChangeNoBit) {
  Case c = plain();
  c.lengths = {1500};
  const Results alone = Batch(c).on_gpu();
  c.lengths.insert(c.lengths.end(), {0, 31, 3001});
  c.lengths.resize(40, 130);
  Batch batch(c);
  Results all = batch.on_gpu();
  expect_same(all, batch.on_cpu());
  all.out.resize(alone.out.size());
  all.lse.resize(alone.lse.size());
  all.bytes.resize(alone.bytes.size());
  expect_same(all.out, alone.out, "out");
  expect_same(all.lse, alone.lse, "lse");
  expect_same(all.bytes, alone.bytes, "bytes");
}

TEST_P(DecodeDevice, ALongRequestAmongManyShortOnes) {
  Case c = plain();
  c.layout.n_kv_heads = 1;
  c.layout.head_dim = 64;
  for (const size_t at : {size_t{0}, size_t{299}, size_t{601}}) {  // more of them than a CTA has threads
    SCOPED_TRACE("request " + std::to_string(at));
    c.lengths.assign(602, 0);
    for (size_t i = 0; i < c.lengths.size(); i += 3) c.lengths[i] = static_cast<int32_t>(1 + i % 70);
    c.lengths[at] = 6000;
    compare(c);
  }
}

/// So long that a CTA hands its sums over in between.
TEST_P(DecodeDevice, ALongRange) {
  Case c = plain();
  c.layout.n_kv_heads = 1;
  c.lengths = {33300};
  c.splits = 1;
  for (const auto& [dim, group] :
       {std::pair<int64_t, int64_t>{64, 2}, {64, 14}, {128, 6}, {128, 16}, {256, 3}, {256, 8}}) {
    c.layout.head_dim = dim;
    c.group = group;
    compare(c);
  }
}

TEST_P(DecodeDevice, ManyShortRequests) {
  Case c = plain();
  c.layout.n_kv_heads = 1;
  for (const int64_t group : {3, 6, 9, 16}) {
    c.group = group;
    c.lengths.clear();
    for (int32_t i = 0; i < 600; ++i) c.lengths.push_back(i % 131);
    c.lengths[7] = 1409;
    compare(c);
  }
}

/// Requests of which one is so long, and there are so many, that items are shared out by length on any device.
TEST_P(DecodeDevice, LengthsThatAreSharedOut) {
  Case many = plain();
  many.layout.head_dim = 64;
  many.group = 1;
  many.lengths.assign(150, 5);
  many.lengths[70] = 5000;
  many.lengths[149] = 1100;
  many.lengths[3] = 0;
  Case c = many;
  c.group = 33;  // rows in parts
  compare(c);
  c = many;
  c.window = 1000;
  compare(c);
  c = many;
  c.tokens = 2;
  c.tree = {0b1, 0b11};
  compare(c);
  c.tree = {};
  c.q_lens.assign(150, 2);
  c.q_lens[3] = 0;
  c.q_lens[149] = 1;
  compare(c);
  c = many;
  c.key_begin = 128;
  c.key_end = 4480;
  Batch ranges(c);
  expect_same(ranges.on_gpu(true), ranges.on_cpu(true));
  c = many;
  c.shift = 60;  // every row runs again
  compare(c);
  Batch captured(many);
  captured.through_a_graph();
  expect_same(captured.on_gpu(), captured.on_cpu());
}

TEST_P(DecodeDevice, WindowsAndSinks) {
  for (const int64_t window : {0, 1, 63, 64, 200, 1000, 5000}) {
    for (const bool sinks : {false, true}) {
      SCOPED_TRACE("window " + std::to_string(window));
      Case c = plain();
      c.lengths = {1, 64, 700, 1283, 2050};
      c.window = window;
      c.sinks = sinks;
      compare(c);
    }
  }
  Case c = plain();
  c.sinks = true;
  c.lengths = {0, 1, 1500};
  compare(c);
}

TEST_P(DecodeDevice, DraftsAndTrees) {
  Case c = plain();
  c.tokens = 5;
  c.lengths = {5, 6, 68, 1027, 1290, 0};
  compare(c);
  c.q_lens = {5, 0, 3, 1, 4, 0};
  compare(c);
  c.q_lens = {};
  c.lengths = {5, 6, 68, 1027, 1290};
  c.tree = {0b1, 0b11, 0b101, 0b1011, 0b10101};
  compare(c);
  c.window = 3;
  compare(c);
  c.window = 100;
  compare(c);
  c.window = -1;
  c.tokens = 64;
  c.lengths = {64, 100, 1100};
  c.tree.clear();
  for (uint64_t i = 0; i < 64; ++i) c.tree.push_back(i < 2 ? i * 2 + 1 : c.tree[i / 2] | uint64_t{1} << i);
  compare(c);
}

TEST_P(DecodeDevice, WrongReferencesRunAgain) {
  for (const float shift : {5.0f, 7.0f, -3.0f, 60.0f, -60.0f, 200.0f, -200.0f, 1e5f, -1e5f}) {
    for (const int splits : {1, 5}) {
      SCOPED_TRACE("shift " + std::to_string(shift));
      Case c = plain();
      c.lengths = {1, 100, 1500, 2999};
      c.shift = shift;
      c.splits = splits;
      c.sinks = splits == 5;
      compare(c);
    }
  }
}

TEST_P(DecodeDevice, ManyGroupsRunAgain) {
  Case c = plain();
  c.lengths.assign(64, 900);
  c.shift = 60;
  c.splits = 3;
  compare(c);
}

TEST_P(DecodeDevice, RangesOfKeys) {
  Case c = plain();
  c.lengths = {100, 1500, 2999};
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 64}, {64, 1024}, {1024, 3008}, {128, 128}}) {
    c.key_begin = begin;
    c.key_end = end;
    Batch batch(c);
    expect_same(batch.on_gpu(true), batch.on_cpu(true));
  }
}

TEST_P(DecodeDevice, GraphsReplayAtOtherLengths) {
  Case c = plain();
  c.lengths = {17, 2000, 0, 1025};
  Batch batch(c);
  batch.through_a_graph();
  expect_same(batch.on_gpu(), batch.on_cpu());
}

TEST_P(DecodeDevice, SixteenBitQueriesAndOutputs) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Case c = plain();
    c.dtype = dtype;
    c.lengths = {1, 300, 1100};
    compare(c);
  }
}

TEST_P(DecodeDevice, ShallowDepths) {
  for (const float depth : {6.0f, 2.0f, 0.0f, -2.0f, -20.0f}) {
    SCOPED_TRACE("depth " + std::to_string(depth));
    Case c = plain();
    c.lengths = {300, 1100, 2049};
    compare(with_depths(c, {depth, 12}));
    compare(with_depths(c, {depth}));
  }
}

TEST_P(DecodeDevice, PoisonStaysWithItsRows) {
  for (const int64_t group : {1, 4, 7, 12, 16}) {
    SCOPED_TRACE("group " + std::to_string(group));
    Case c = plain();
    c.group = group;
    c.lengths = {1, 5, 70, 1100};
    c.poisoned = true;
    compare(c);
  }
}

TEST_P(DecodeDevice, ExtremeQueries) {
  for (const float scale : {0.0f, 1e-30f, 100.0f, 1e4f, 1e30f}) {
    SCOPED_TRACE("scale " + std::to_string(scale));
    Case c = plain();
    c.lengths = {1, 300, 1100};
    c.q_scale = scale;
    compare(c);
  }
}

/// A row that reads every V does so where its logits are -inf, in groups whose other rows would not.
TEST_P(DecodeDevice, LogitsBelowTheRange) {
  for (const int64_t group : {4, 8, 12}) {
    SCOPED_TRACE("group " + std::to_string(group));
    Case c = plain();
    c.group = group;
    c.lengths = {700};
    c.opposed = true;
    std::vector<float> depths(static_cast<size_t>(group), 12.0f);
    compare(with_depths(c, depths));
    depths[0] = kDense;
    compare(with_depths(c, depths));
  }
}

}  // namespace
