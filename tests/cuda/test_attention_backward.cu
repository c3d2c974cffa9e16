#include "backward_testing.h"

// The backward on the device: accuracy against fp64, P2 (bits), P5 (poison) and P6 (graphs).
namespace fold::testing {
namespace {

constexpr double kFactor = 1.05;

struct Case {
  const char* name;
  Shape shape;
  bool causal = false, sinks = false;
  int64_t left = -1, right = -1;
};

std::vector<Case> cases() {
  std::vector<Case> all = {
      {"causal", {1, 300, 300, 2, 2, 128}, true},
      {"full", {2, 200, 200, 2, 2, 64}},
      {"gqa", {1, 257, 257, 6, 2, 96}, true},
      {"mqa_cross", {2, 97, 393, 4, 1, 64}},
      {"fewer_queries", {1, 37, 411, 2, 1, 128}, true},
      {"more_queries", {1, 350, 170, 2, 2, 96}, true},
      {"window", {1, 390, 410, 2, 1, 128}, true, false, 50},
      {"window_whole_tiles", {1, 500, 500, 1, 1, 64}, true, false, 200},
      {"window_both_sides", {1, 300, 360, 2, 2, 64}, false, false, 133, 20},
      {"sinks", {2, 250, 250, 4, 2, 64}, true, true},
      {"sinks_window", {1, 350, 350, 4, 1, 128}, true, true, 128},
      {"one_query", {4, 1, 300, 4, 2, 128}, true},
      {"kv_heads_without_parts", {1, 150, 150, 18, 9, 64}, true},
      {"parts_of_whole_heads", {2, 240, 250, 32, 4, 64}, true},
      {"parts_within_heads", {2, 330, 350, 12, 3, 128}, true},
  };
  for (const int64_t length : {2, 3, 31, 63, 64, 65, 127, 128, 129, 191, 193, 251}) {
    // Few rows in many sequences: errors are compared, and need numbers to be averages.
    const int64_t dim = length % 3 == 0 ? 96 : length % 2 == 0 ? 64 : 128;
    all.push_back({"length", {length < 32 ? 16 : 1, length, length, 4, 2, dim}, length % 4 != 1});
  }
  return all;
}

std::string name_of(const Case& c) {
  return std::string(c.name) + " Sq " + std::to_string(c.shape.q_len) + " Sk " + std::to_string(c.shape.k_len) + " D " +
         std::to_string(c.shape.dim);
}

Problem problem_of(const Case& c, DType type) {
  Problem p(type, c.shape);
  p.options.causal = c.causal;
  p.options.window_left = c.left;
  p.options.window_right = c.right;
  if (c.sinks) p.use_sinks();
  return p;
}

/// Error at most kFactor that of an ordinary implementation, which need not beat what rounding the result alone costs.
void expect_accurate(const Tensor& got, const std::vector<double>& want, const std::vector<double>& ordinary,
                     const char* what) {
  Tensor rounded(got.dtype, got.shape);
  for (int64_t i = 0; i < rounded.numel(); ++i) rounded.set(i, want[static_cast<size_t>(i)]);
  EXPECT_LE(relative_error(got, want),
            kFactor * std::max(relative_error(ordinary, want), relative_error(rounded, want)))
      << what;
}

/// -sum of exp(sink - lse) (dout . out) over the rows, of the out and lse that the backward was given, and the sum of
/// magnitudes: what dsinks is held to, to fp32's accuracy.
void expect_accurate_sinks(const Problem& p) {
  for (int64_t h = 0; h < p.shape.heads; ++h) {
    double sum = 0.0, magnitudes = 0.0;
    for (int64_t b = 0; b < p.shape.batch; ++b) {
      for (int64_t i = 0; i < p.shape.q_len; ++i) {
        double delta = 0.0, products = 0.0;
        for (int64_t d = 0; d < p.shape.dim; ++d) {
          const int64_t at = ((b * p.shape.q_len + i) * p.shape.heads + h) * p.shape.dim + d;
          delta += p.dout.at(at) * p.out.at(at);
          products += std::fabs(p.dout.at(at) * p.out.at(at));
        }
        const double weight = std::exp(p.sinks.at(h) - p.lse.at((b * p.shape.heads + h) * p.shape.q_len + i));
        sum -= weight * delta;
        magnitudes += weight * products;
      }
    }
    EXPECT_LE(std::fabs(p.dsinks.at(h) - sum), 0x1p-18 * magnitudes) << "dsinks of head " << h;
  }
}

void expect_accurate(const Problem& p, const Expected& want, const Expected& plain) {
  expect_accurate(p.dq, want.dq, plain.dq, "dq");
  expect_accurate(p.dk, want.dk, plain.dk, "dk");
  expect_accurate(p.dv, want.dv, plain.dv, "dv");
  if (p.options.sinks.defined()) expect_accurate_sinks(p);
}

class BackwardDevice : public DeviceTest {};

TEST_F(BackwardDevice, WithinAFactorOfAnOrdinaryImplementation) {
  for (const Case& c : cases()) {
    for (const DType type : {DType::bf16, DType::f16}) {
      SCOPED_TRACE(name_of(c) + (type == DType::bf16 ? " bf16" : " f16"));
      Problem p = problem_of(c, type);
      const Expected want = reference(p), plain = ordinary(p);
      set_forward(p, want);
      backward_on_device(p);
      expect_accurate(p, want, plain);
      use_grad_dtype(p, DType::f32);
      backward_on_device(p);
      expect_accurate(p, want, plain);
    }
  }
}

TEST_F(BackwardDevice, OneKeyHasNoGradientOfItsLogit) {
  Problem p(DType::bf16, {2, 5, 1, 2, 1, 128});
  const Expected want = reference(p);
  set_forward(p, want);
  backward_on_device(p);
  EXPECT_LE(relative_error(p.dv, want.dv), 0x1p-8);
  // Delta is dP up to the rounding of an fp32 dot product of 128 terms, |dP| < 50.
  for (const Tensor* x : {&p.dq, &p.dk}) {
    for (int64_t i = 0; i < x->numel(); ++i) EXPECT_LE(std::fabs(x->at(i)), 0x1p-14);
  }
}

TEST_F(BackwardDevice, RowsThatSeeNothingHaveNoGradient) {
  Problem p(DType::bf16, {1, 200, 70, 2, 1, 64});
  p.options.causal = true;
  set_forward(p, reference(p));
  backward_on_device(p);
  for (int64_t i = 0; i < 130 * 2 * 64; ++i) ASSERT_EQ(p.dq.at(i), 0.0) << i;
  Problem window(DType::bf16, {1, 64, 400, 1, 1, 128});
  window.options.window_left = 3;
  window.options.causal = true;
  set_forward(window, reference(window));
  backward_on_device(window);
  for (int64_t i = 0; i < (400 - 64 - 3) * 128; ++i) ASSERT_EQ(window.dk.at(i), 0.0) << i;
  for (int64_t i = 0; i < (400 - 64 - 3) * 128; ++i) ASSERT_EQ(window.dv.at(i), 0.0) << i;
}

TEST_F(BackwardDevice, EmptySides) {
  for (const Shape shape : {Shape{2, 0, 70, 2, 1, 64}, Shape{2, 70, 0, 2, 1, 128}}) {
    Problem p(DType::bf16, shape);
    p.lse.fill(-INFINITY);
    backward_on_device(p);
    for (const Tensor* x : {&p.dq, &p.dk, &p.dv}) {
      for (int64_t i = 0; i < x->numel(); ++i) ASSERT_EQ(x->at(i), 0.0);
    }
  }
}

void expect_same_gradients(const Problem& a, const Problem& b) {
  EXPECT_TRUE(same_bytes(a.dq, b.dq)) << "dq";
  EXPECT_TRUE(same_bytes(a.dk, b.dk)) << "dk";
  EXPECT_TRUE(same_bytes(a.dv, b.dv)) << "dv";
}

TEST_F(BackwardDevice, RepeatsAreTheSameBits) {
  for (const int64_t dim : {64, 128}) {
    Problem p(DType::bf16, {2, 1100, 1100, 8, 2, dim});
    p.options.causal = true;
    use_grad_dtype(p, DType::f32);
    // Any out and lse will do.
    std::mt19937 random(3);
    p.out.fill_normal(random, 0.1);
    p.lse.fill(8.0);
    Device device;
    const Backward call = backward_call(put_problem(device, p), p.options);
    const Launch launch = device.launch(call.workspace);
    cuda::attention_backward(call.params, launch.workspace.data, nullptr);
    device.fetch();
    const Problem first = p;
    for (int i = 0; i < 50; ++i) {
      cuda::attention_backward(call.params, launch.workspace.data, nullptr);
      device.fetch();
      ASSERT_TRUE(same_bytes(p.dq, first.dq) && same_bytes(p.dk, first.dk) && same_bytes(p.dv, first.dv)) << i;
    }
  }
}

/// Sequences alone, and packed between others with poison behind them.
TEST_F(BackwardDevice, PackedSequencesHaveTheirOwnBits) {
  const std::vector<int64_t> q_lengths = {65, 0, 300, 1, 128, 129, 64, 77},
                             k_lengths = {65, 5, 211, 1, 128, 0, 200, 77};
  for (const int64_t dim : {64, 96, 128}) {
    SCOPED_TRACE("D " + std::to_string(dim));
    std::vector<Problem> alone;
    int64_t total_q = 0, total_k = 0;
    for (size_t i = 0; i < q_lengths.size(); ++i) {
      alone.emplace_back(DType::bf16, Shape{1, q_lengths[i], k_lengths[i], 4, 2, dim}, static_cast<unsigned>(i));
      Problem& p = alone.back();
      p.options.causal = true;
      use_grad_dtype(p, DType::f32);
      if (p.q.numel() > 0 && p.k.numel() > 0) {
        set_forward(p, reference(p));
      } else {
        p.lse.fill(-INFINITY);
      }
      // Two sequences hold NaN: nobody else may notice.
      if (i == 3 || i == 6) {
        for (Tensor* x : {&p.q, &p.k, &p.v, &p.dout, &p.out, &p.lse}) x->fill(kNan);
      }
      backward_on_device(p);
      total_q += q_lengths[i];
      total_k += k_lengths[i];
    }
    constexpr int64_t kUnused = 40;
    Problem packed(DType::bf16, {1, total_q + kUnused, total_k + kUnused, 4, 2, dim});
    packed.options.causal = true;
    use_grad_dtype(packed, DType::f32);
    for (Tensor* x : {&packed.q, &packed.k, &packed.v, &packed.dout, &packed.out, &packed.lse}) x->fill(kNan);
    std::vector<int32_t> q_begin = {0}, k_begin = {0};
    for (const Problem& p : alone) {
      copy_rows(p.q, 0, packed.q, q_begin.back());
      copy_rows(p.dout, 0, packed.dout, q_begin.back());
      copy_rows(p.out, 0, packed.out, q_begin.back());
      copy_rows(p.k, 0, packed.k, k_begin.back());
      copy_rows(p.v, 0, packed.v, k_begin.back());
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t i = 0; i < p.shape.q_len; ++i) {
          packed.lse.set(h * (total_q + kUnused) + q_begin.back() + i, p.lse.at(h * p.shape.q_len + i));
        }
      }
      q_begin.push_back(q_begin.back() + static_cast<int32_t>(p.shape.q_len));
      k_begin.push_back(k_begin.back() + static_cast<int32_t>(p.shape.k_len));
    }
    for (Tensor* x : {&packed.q, &packed.k, &packed.v, &packed.dout, &packed.out, &packed.dq, &packed.dk, &packed.dv,
                      &packed.lse}) {
      x->shape.erase(x->shape.begin());
    }
    const auto batch = static_cast<int64_t>(q_begin.size());
    packed.options.cu_seqlens_q = TensorView(q_begin.data(), DType::i32, {batch});
    packed.options.cu_seqlens_k = TensorView(k_begin.data(), DType::i32, {batch});
    backward_on_device(packed);

    const auto expect_rows = [&](const Tensor& want, const Tensor& got, int64_t row, const char* what) {
      Tensor part(want.dtype, want.shape);
      const size_t row_bytes = static_cast<size_t>(got.shape[1] * got.shape[2] * dtype_size(got.dtype));
      std::memcpy(part.bytes.data(), got.bytes.data() + static_cast<size_t>(row) * row_bytes, part.bytes.size());
      EXPECT_TRUE(same_bytes(want, part)) << what;
    };
    for (size_t i = 0; i < alone.size(); ++i) {
      SCOPED_TRACE("sequence " + std::to_string(i));
      if (i == 3 || i == 6) continue;  // NaN, of any kind
      expect_rows(alone[i].dq, packed.dq, q_begin[i], "dq");
      expect_rows(alone[i].dk, packed.dk, k_begin[i], "dk");
      expect_rows(alone[i].dv, packed.dv, k_begin[i], "dv");
    }
    for (int64_t i = total_q * 4 * dim; i < packed.dq.numel(); ++i) ASSERT_EQ(packed.dq.at(i), 0.0);
    for (int64_t i = total_k * 2 * dim; i < packed.dk.numel(); ++i) ASSERT_EQ(packed.dk.at(i) + packed.dv.at(i), 0.0);
  }
}

TEST_F(BackwardDevice, BatchesHaveTheirSequencesBits) {
  Problem batch(DType::f16, {5, 190, 260, 4, 4, 128});
  batch.options.causal = true;
  set_forward(batch, reference(batch));
  // The last sequence overflows everything.
  const int64_t q_size = batch.q.numel() / 5;
  for (int64_t i = 4 * q_size; i < 5 * q_size; ++i) batch.q.set(i, INFINITY), batch.dout.set(i, kNan);
  backward_on_device(batch);
  for (int64_t b = 0; b < 4; ++b) {
    SCOPED_TRACE(b);
    Problem p(DType::f16, {1, 190, 260, 4, 4, 128});
    p.options.causal = true;
    const auto take = [&](const Tensor& from, Tensor& to) {
      std::memcpy(to.bytes.data(), from.bytes.data() + static_cast<size_t>(b) * to.bytes.size(), to.bytes.size());
    };
    take(batch.q, p.q), take(batch.k, p.k), take(batch.v, p.v), take(batch.dout, p.dout);
    take(batch.out, p.out), take(batch.lse, p.lse);
    backward_on_device(p);
    Problem want = p;
    take(batch.dq, want.dq), take(batch.dk, want.dk), take(batch.dv, want.dv);
    expect_same_gradients(p, want);
  }
}

/// (B, S, heads, D) whose heads lie further apart than its rows.
struct HeadMajor {
  explicit HeadMajor(const Tensor& x) : memory(x.dtype, x.shape), view(x.view()) {
    const int64_t rows = x.shape[1], heads = x.shape[2], dim = x.shape[3];
    view.data = memory.bytes.data();
    view.strides = {heads * rows * dim, dim, rows * dim, 1};
    for (int64_t i = 0; i < x.numel(); ++i) {
      const int64_t channel = i % dim, head = i / dim % heads, row = i / dim / heads % rows, b = i / dim / heads / rows;
      memory.set(((b * heads + head) * rows + row) * dim + channel, x.at(i));
    }
  }

  Tensor memory;
  TensorView view;
};

TEST_F(BackwardDevice, StridesChangeNoBit) {
  Problem p(DType::bf16, {2, 150, 170, 4, 2, 96});
  p.options.causal = true;
  set_forward(p, reference(p));
  backward_on_device(p);
  const Problem want = p;
  const HeadMajor q(p.q), k(p.k), v(p.v), out(p.out), dout(p.dout);
  Device device;
  AttentionBackwardTensors t = put_problem(device, p);
  t.q = device.put(q.view), t.k = device.put(k.view), t.v = device.put(v.view);
  t.out = device.put(out.view), t.dout = device.put(dout.view);
  const Backward call = backward_call(t, p.options);
  cuda::attention_backward(call.params, device.launch(call.workspace).workspace.data, nullptr);
  device.fetch();
  expect_same_gradients(p, want);
}

/// What a row does not see has no influence on it, whatever it is (P5).
TEST_F(BackwardDevice, MaskedKeysAndRowsHaveNoInfluence) {
  for (const int64_t dim : {64, 96, 128}) {
    for (const double poison : {kNan, static_cast<double>(INFINITY), 3e38}) {
      SCOPED_TRACE("D " + std::to_string(dim) + ", poison " + std::to_string(poison));
      constexpr int64_t kKeys = 300, kSeen = 170;
      Problem p(DType::bf16, {1, kKeys, kKeys, 2, 1, dim});
      p.options.causal = true;
      use_grad_dtype(p, DType::f32);
      set_forward(p, reference(p));
      backward_on_device(p);
      const Problem clean = p;
      for (int64_t i = kSeen * dim; i < kKeys * dim; ++i) p.k.set(i, poison), p.v.set(i, -poison);
      // The forward's results of rows that see them.
      for (int64_t i = kSeen * 2 * dim; i < kKeys * 2 * dim; ++i) p.out.set(i, kNan);
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t i = kSeen; i < kKeys; ++i) p.lse.set(h * kKeys + i, kNan);
      }
      backward_on_device(p);
      for (int64_t i = 0; i < kSeen * 2 * dim; ++i) ASSERT_EQ(p.dq.at(i), clean.dq.at(i)) << i;
      for (int64_t i = kSeen * 2 * dim; i < kKeys * 2 * dim; ++i) ASSERT_TRUE(std::isnan(p.dq.at(i))) << i;
      for (int64_t i = 0; i < kKeys * dim; ++i) ASSERT_TRUE(std::isnan(p.dk.at(i)) && std::isnan(p.dv.at(i))) << i;
    }
    // A row's own q, dout and out reach only the keys that it sees.
    constexpr int64_t kRows = 300;
    Problem p(DType::bf16, {1, kRows, kRows, 1, 1, dim});
    p.options.window_left = 20;
    p.options.causal = true;
    use_grad_dtype(p, DType::f32);
    set_forward(p, reference(p));
    backward_on_device(p);
    const Problem clean = p;
    constexpr int64_t kRow = 150;
    for (int64_t i = kRow * dim; i < (kRow + 1) * dim; ++i)
      p.q.set(i, kNan), p.dout.set(i, INFINITY), p.out.set(i, kNan);
    p.lse.set(kRow, kNan);
    backward_on_device(p);
    for (int64_t row = 0; row < kRows; ++row) {
      const bool touched = row >= kRow - 20 && row <= kRow;
      for (int64_t i = row * dim; i < (row + 1) * dim; ++i) {
        ASSERT_EQ(row == kRow, std::isnan(p.dq.at(i))) << row;
        if (row != kRow) {
          ASSERT_EQ(p.dq.at(i), clean.dq.at(i)) << row;
        }
        ASSERT_EQ(touched, std::isnan(p.dk.at(i))) << row;
        ASSERT_EQ(touched, std::isnan(p.dv.at(i))) << row;
        if (!touched) {
          ASSERT_EQ(p.dk.at(i), clean.dk.at(i)) << row;
          ASSERT_EQ(p.dv.at(i), clean.dv.at(i)) << row;
        }
      }
    }
  }
}

TEST_F(BackwardDevice, CanBeCapturedInAGraph) {
  Problem p(DType::bf16, {1, 200, 200, 2, 1, 128});
  set_forward(p, reference(p));
  backward_on_device(p);
  const Problem want = p;
  Device device;
  const Backward call = backward_call(put_problem(device, p), p.options);
  const Launch launch = device.launch(call.workspace);
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraph_t graph;
  cudaGraphExec_t run;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  cuda::attention_backward(call.params, launch.workspace.data, stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&run, graph, 0));
  for (int i = 0; i < 3; ++i) check(cudaGraphLaunch(run, stream));
  device.fetch();
  expect_same_gradients(p, want);
  cudaGraphExecDestroy(run);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

/// Scales of q against k, and of dout and v, far from 1; the gradients are still far from fp32's ends.
TEST_F(BackwardDevice, ExtremeScales) {
  for (const auto& [k_scale, dv_scale] : {std::pair{0x1p60, 0x1p20}, {0x1p-60, 0x1p-20}, {0x1p30, 0x1p-40}}) {
    SCOPED_TRACE(std::to_string(std::log2(k_scale)) + " " + std::to_string(std::log2(dv_scale)));
    Problem p(DType::bf16, {1, 150, 150, 2, 1, 128});
    p.options.causal = true;
    use_grad_dtype(p, DType::f32);
    const auto scale = [](Tensor& x, double by) {
      for (int64_t i = 0; i < x.numel(); ++i) x.set(i, x.at(i) * by);
    };
    scale(p.k, k_scale), scale(p.q, 1.0 / k_scale), scale(p.v, dv_scale), scale(p.dout, dv_scale);
    const Expected want = reference(p), plain = ordinary(p);
    set_forward(p, want);
    backward_on_device(p);
    expect_accurate(p, want, plain);
  }
}

}  // namespace
}  // namespace fold::testing
