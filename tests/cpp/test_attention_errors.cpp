#include <functional>

#include "attention_testing.h"

// Bad arguments: what, got, allowed; nothing is written.
namespace fold::testing {
namespace {

struct Call {
  Problem p{DType::bf16, {2, 5, 7, 4, 2, 16}};
  TensorView q = p.q.view(), k = p.k.view(), v = p.v.view(), out = p.out.view(), lse = p.lse.view();
  AttentionBackwardTensors grads = p.tensors();
  std::vector<int32_t> ends_q, ends_k;
};

struct Bad {
  std::function<void(Call&)> spoil;
  std::string message;
  Error::Kind kind = Error::Kind::value;
};

void expect_error(const Bad& bad, bool backward) {
  Call call;
  for (Tensor* x : {&call.p.out, &call.p.lse, &call.p.dq, &call.p.dk, &call.p.dv}) x->fill(3.0);
  const Problem before = call.p;
  bad.spoil(call);
  try {
    if (backward) {
      attention_backward(call.grads, call.p.options);
    } else {
      attention_forward(call.q, call.k, call.v, call.out, call.lse, call.p.options);
    }
    ADD_FAILURE() << "accepted; expected " << bad.message;
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()).substr(0, bad.message.size()), bad.message) << e.what();
    EXPECT_EQ(e.kind(), bad.kind) << e.what();
  }
  for (size_t i = 0; i < before.results().size(); ++i) {
    EXPECT_TRUE(same_bytes(*call.p.results()[i].second, *before.results()[i].second));
  }
}

void pack(Call& c, std::vector<int32_t> ends_q, std::vector<int32_t> ends_k) {
  c.ends_q = std::move(ends_q);
  c.ends_k = std::move(ends_k);
  const auto count = [](const std::vector<int32_t>& x) { return static_cast<int64_t>(x.size()); };
  c.q = TensorView(c.p.q.view().data, DType::bf16, {10, 4, 16});
  c.k = c.v = TensorView(c.p.k.view().data, DType::bf16, {14, 2, 16});
  c.out = TensorView(c.p.out.view().data, DType::bf16, {10, 4, 16});
  c.lse = TensorView(c.p.lse.view().data, DType::f32, {4, 10});
  c.p.options.cu_seqlens_q = TensorView(c.ends_q.data(), DType::i32, {count(c.ends_q)});
  c.p.options.cu_seqlens_k = TensorView(c.ends_k.data(), DType::i32, {count(c.ends_k)});
}

TEST(AttentionErrors, Forward) {
  const auto type = Error::Kind::type;
  const std::vector<Bad> all = {
      {[](Call& c) { c.q = {}; }, "q=nothing; "},
      {[](Call& c) { c.q.ndim = 3; }, "q.ndim=3; "},
      {[](Call& c) { c.q.dtype = DType::i32; }, "q.dtype=int32; ", type},
      {[](Call& c) { c.k.dtype = DType::f16; }, "k.dtype=float16; ", type},
      {[](Call& c) { c.v.device = Device::cuda; }, "v.device=cuda; ", type},
      {[](Call& c) { c.q.strides[3] = 2; }, "q.stride(-1)=2; "},
      {[](Call& c) { c.k.strides[3] = 0; }, "k.stride(-1)=0; "},
      {[](Call& c) { c.out.strides[2] = 0; }, "out.stride(2)=0; "},
      {[](Call& c) { c.q.shape[3] = c.k.shape[3] = 257; }, "head_dim=257; 1 to 256"},
      {[](Call& c) { c.q.shape[3] = 0; }, "head_dim=0; 1 to 256"},
      {[](Call& c) { c.q.shape[2] = 3; }, "heads=3; a multiple of kv_heads=2"},
      {[](Call& c) { c.k.shape[2] = 0; }, "kv_heads=0; "},
      {[](Call& c) { c.k.shape[3] = 8; }, "k.shape=(2, 7, 2, 8); "},
      {[](Call& c) { c.k.shape[0] = 1; }, "k.shape=(1, 7, 2, 16); "},
      {[](Call& c) { c.v.shape[1] = 6; }, "v.shape=(2, 6, 2, 16); "},
      {[](Call& c) { c.out.shape[1] = 4; }, "out.shape=(2, 4, 4, 16); "},
      {[](Call& c) { c.lse.shape[2] = 4; }, "lse.shape=(2, 4, 4); "},
      {[](Call& c) { c.lse.dtype = DType::bf16; }, "lse.dtype=bfloat16; ", type},
      {[](Call& c) { c.q.data = nullptr; }, "q=null data; "},
      {[](Call& c) { c.p.options.softmax_scale = std::nan(""); }, "softmax_scale=nan; "},
      {[](Call& c) { c.p.options.softmax_scale = 1e300; }, "softmax_scale="},
      {[](Call& c) { c.p.options.window_left = -2; }, "window_left=-2; "},
      {[](Call& c) { c.p.options.window_right = -7; }, "window_right=-7; "},
      {[](Call& c) { c.p.options.sinks = TensorView(c.p.sinks.view().data, DType::f32, {3}); }, "sinks.shape=(3); "},
      {[](Call& c) { c.p.options.sinks = TensorView(c.p.sinks.view().data, DType::bf16, {4}); },
       "sinks.dtype=bfloat16; ", type},
      {[](Call& c) {
         pack(c, {0, 4}, {0, 4});
         c.p.options.cu_seqlens_k = {};
       },
       "cu_seqlens_k=nothing; "},
      {[](Call& c) {
         pack(c, {1, 4}, {0, 4});
       },
       "cu_seqlens_q[0]=1; "},
      {[](Call& c) {
         pack(c, {0, 6, 4}, {0, 4, 8});
       },
       "cu_seqlens_q[2]=4; "},
      {[](Call& c) {
         pack(c, {0, 6, 10}, {0, 4, 15});
       },
       "cu_seqlens_k[2]=15; "},
      {[](Call& c) {
         pack(c, {0, 6, 10}, {0, 4});
       },
       "sequences of cu_seqlens_k=1; "},
      {[](Call& c) { pack(c, {}, {}); }, "cu_seqlens_q.shape=(0); "},
      {[](Call& c) {
         pack(c, {0, 4}, {0, 4});
         c.p.options.cu_seqlens_q.dtype = DType::i64;
       },
       "cu_seqlens_q.dtype=int64; ", type},
  };
  for (const Bad& bad : all) expect_error(bad, false);
}

TEST(AttentionErrors, Backward) {
  const auto type = Error::Kind::type;
  const std::vector<Bad> all = {
      {[](Call& c) { c.grads.q.strides[3] = 2; }, "q.stride(-1)=2; "},
      {[](Call& c) { c.grads.out = {}; }, "out=nothing; "},
      {[](Call& c) { c.grads.lse = {}; }, "lse=nothing; "},
      {[](Call& c) { c.grads.dout.dtype = DType::f32; }, "dout.dtype=float32; ", type},
      {[](Call& c) { c.grads.dout.shape[1] = 4; }, "dout.shape=(2, 4, 4, 16); "},
      {[](Call& c) { c.grads.dq.dtype = DType::f16; }, "dq.dtype=float16; ", type},
      {[](Call& c) { c.grads.dk.dtype = DType::f32; }, "dk.dtype=float32; ", type},
      {[](Call& c) { c.grads.dv.shape[1] = 8; }, "dv.shape=(2, 8, 2, 16); "},
      {[](Call& c) { c.grads.dk.strides[0] = 0; }, "dk.stride(0)=0; "},
      {[](Call& c) { c.grads.dsinks = c.p.dsinks.view(); }, "dsinks=a tensor; "},
      {[](Call& c) {
         c.p.use_sinks();
         c.grads.dsinks = c.p.dsinks.view();
         c.grads.dsinks.shape[0] = 3;
       },
       "dsinks.shape=(3); "},
  };
  for (const Bad& bad : all) expect_error(bad, true);
}

}  // namespace
}  // namespace fold::testing
