#include <omp.h>
#include <sys/mman.h>

#include <memory>

#include "attention_testing.h"

// P2: results are the same bits over repeats, thread counts, batches and packings.
namespace fold::testing {
namespace {

class Threads {
 public:
  explicit Threads(int n) : before_(omp_get_max_threads()) { omp_set_num_threads(n); }
  ~Threads() { omp_set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

Tensor rows_of(const Tensor& x, int64_t first, int64_t count, std::vector<int64_t> shape) {
  Tensor part(x.dtype, std::move(shape));
  const int64_t row = x.numel() / x.shape[0] * dtype_size(x.dtype);
  std::memcpy(part.bytes.data(), x.bytes.data() + first * row, static_cast<size_t>(count * row));
  return part;
}

/// One sequence cut out of a dense batch.
Problem alone(const Problem& all, int64_t b) {
  Shape shape = all.shape;
  shape.batch = 1;
  Problem one(all.q.dtype, shape);
  one.options = all.options;
  const auto cut = [&](const Tensor& x) {
    std::vector<int64_t> dims = x.shape;
    dims[0] = 1;
    return rows_of(x, b, 1, dims);
  };
  one.q = cut(all.q);
  one.k = cut(all.k);
  one.v = cut(all.v);
  one.dout = cut(all.dout);
  if (all.options.sinks.defined()) {
    one.sinks = all.sinks;
    one.use_sinks();
  }
  return one;
}

Problem example(DType dtype, Shape shape) {
  Problem p(dtype, shape, 3);
  p.options.causal = true;
  p.options.window_left = 250;
  return p;
}

class Bits : public ::testing::TestWithParam<DType> {};

TEST_P(Bits, RepeatsAndThreadCounts) {
  Problem p = example(GetParam(), {2, 300, 420, 6, 2, 64});
  p.use_sinks();
  EachIsa().run([&] {
    {
      const Threads one(1);
      p.run();
    }
    const Problem first = p;
    for (const int threads : {1, 2, 3, 8, 8, 8}) {
      const Threads some(threads);
      for (Tensor* x : {&p.out, &p.lse, &p.dq, &p.dk, &p.dv, &p.dsinks}) x->fill(-5.0);
      p.run();
      for (size_t i = 0; i < p.results().size(); ++i) {
        EXPECT_TRUE(same_bytes(*p.results()[i].second, *first.results()[i].second))
            << p.results()[i].first << ", " << threads << " threads";
      }
    }
  });
}

TEST_P(Bits, AloneOrInABatch) {
  Problem all = example(GetParam(), {5, 170, 230, 4, 2, 48});
  EachIsa().run([&] {
    all.run();
    for (int64_t b = 0; b < all.shape.batch; ++b) {
      Problem one = alone(all, b);
      one.run();
      for (size_t i = 0; i < 5; ++i) {  // dsinks is a sum over the batch
        const Tensor& x = *all.results()[i].second;
        const Tensor& y = *one.results()[i].second;
        EXPECT_TRUE(same_bytes(rows_of(x, b, 1, y.shape), y)) << all.results()[i].first << ", sequence " << b;
      }
    }
  });
}

// One sequence packed between neighbours of every kind, against itself alone in the dense layout.
TEST_P(Bits, PackedAtAnyPosition) {
  constexpr int64_t kHeads = 6, kKvHeads = 3, kDim = 40, kQueries = 133, kKeys = 201;
  Problem one = example(GetParam(), {1, kQueries, kKeys, kHeads, kKvHeads, kDim});
  one.use_sinks();
  one.run();
  const std::vector<std::vector<std::pair<int64_t, int64_t>>> neighbours = {
      {}, {{0, 0}}, {{1, 1}}, {{0, 7}, {7, 0}}, {{97, 97}, {400, 13}}, {{5, 600}}};
  for (size_t before = 0; before < neighbours.size(); ++before) {
    const auto& after = neighbours[neighbours.size() - 1 - before];
    std::vector<std::pair<int64_t, int64_t>> lengths = neighbours[before];
    lengths.emplace_back(kQueries, kKeys);
    lengths.insert(lengths.end(), after.begin(), after.end());

    Tensor cu_q(DType::i32, {static_cast<int64_t>(lengths.size()) + 1}), cu_k = cu_q;
    auto *ends_q = reinterpret_cast<int32_t*>(cu_q.bytes.data()),
         *ends_k = reinterpret_cast<int32_t*>(cu_k.bytes.data());
    for (size_t i = 0; i < lengths.size(); ++i) {
      ends_q[i + 1] = ends_q[i] + static_cast<int32_t>(lengths[i].first);
      ends_k[i + 1] = ends_k[i] + static_cast<int32_t>(lengths[i].second);
    }
    const int64_t rows = ends_q[lengths.size()], keys = ends_k[lengths.size()];
    const int64_t q_at = ends_q[neighbours[before].size()], k_at = ends_k[neighbours[before].size()];
    Problem packed(GetParam(), {1, rows, keys, kHeads, kKvHeads, kDim}, 9);
    for (Tensor* x : {&packed.q, &packed.k, &packed.v, &packed.dout, &packed.out, &packed.dq, &packed.dk, &packed.dv,
                      &packed.lse}) {
      x->shape.erase(x->shape.begin());
    }
    const auto place = [](const Tensor& from, Tensor& to, int64_t at) {
      std::memcpy(to.bytes.data() + at * (to.numel() / to.shape[0]) * dtype_size(to.dtype), from.bytes.data(),
                  from.bytes.size());
    };
    place(one.q, packed.q, q_at);
    place(one.dout, packed.dout, q_at);
    place(one.k, packed.k, k_at);
    place(one.v, packed.v, k_at);
    packed.options = one.options;
    packed.options.cu_seqlens_q = cu_q.view();
    packed.options.cu_seqlens_k = cu_k.view();
    packed.run();

    const std::string where = "neighbours " + std::to_string(before);
    EXPECT_TRUE(same_bytes(rows_of(packed.out, q_at, kQueries, one.out.shape), one.out)) << where;
    EXPECT_TRUE(same_bytes(rows_of(packed.dq, q_at, kQueries, one.dq.shape), one.dq)) << where;
    EXPECT_TRUE(same_bytes(rows_of(packed.dk, k_at, kKeys, one.dk.shape), one.dk)) << where;
    EXPECT_TRUE(same_bytes(rows_of(packed.dv, k_at, kKeys, one.dv.shape), one.dv)) << where;
    Tensor lse = one.lse;
    lse.shape = {kHeads, kQueries};
    for (int64_t h = 0; h < kHeads; ++h) {
      const Tensor head = rows_of(packed.lse, h, 1, {rows});
      EXPECT_TRUE(same_bytes(rows_of(head, q_at, kQueries, {kQueries}), rows_of(lse, h, 1, {kQueries}))) << where;
    }
  }
}

// Memory that is mapped but not backed until it is touched.
class Sparse {
 public:
  explicit Sparse(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Sparse() {
    if (ok()) munmap(data_, bytes_);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  void* data_;
  size_t bytes_;
};

/// Copies rows between a contiguous tensor (B, S, H, D) and a strided view of the same shape.
void copy_rows(const TensorView& from, const TensorView& to) {
  const auto size = static_cast<size_t>(dtype_size(from.dtype));
  for (int64_t b = 0; b < from.shape[0]; ++b) {
    for (int64_t i = 0; i < from.shape[1]; ++i) {
      for (int64_t h = 0; h < from.shape[2]; ++h) {
        const auto at = [&](const TensorView& x) {
          return x.as<char>() + (b * x.strides[0] + i * x.strides[1] + h * x.strides[2]) * static_cast<int64_t>(size);
        };
        std::memcpy(at(to), at(from), static_cast<size_t>(from.shape[3]) * size);
      }
    }
  }
}

TensorView with_strides(const Tensor& x, void* data, std::array<int64_t, kMaxDims> strides) {
  TensorView v = x.view();
  v.data = data;
  v.strides = strides;
  return v;
}

TEST_P(Bits, AnyStrides) {
  Problem p = example(GetParam(), {2, 90, 130, 4, 2, 24});
  p.run();
  const Problem want = p;
  // Heads before rows, a longer channel stride than the head dim, and a batch stride beyond 2^32 elements.
  const int64_t far = (int64_t{1} << 32) + 4096;
  const auto strides = [&](const Tensor& x) {
    return std::array<int64_t, kMaxDims>{far, 32, 32 * x.shape[1] + 7, 1, 0};
  };
  const size_t bytes = static_cast<size_t>(far + (1 << 20)) * 4;
  std::vector<Tensor*> tensors = {&p.q, &p.k, &p.v, &p.dout, &p.out, &p.dq, &p.dk, &p.dv};
  std::vector<std::unique_ptr<Sparse>> memory;
  std::vector<TensorView> views;
  for (const Tensor* x : tensors) {
    memory.push_back(std::make_unique<Sparse>(bytes));
    if (!memory.back()->ok()) GTEST_SKIP() << "no address space for " << bytes << " bytes";
    views.push_back(with_strides(*x, memory.back()->data(), strides(*x)));
  }
  for (size_t i = 0; i < 4; ++i) copy_rows(tensors[i]->view(), views[i]);
  attention_forward(views[0], views[1], views[2], views[4], p.lse.view(), p.options);
  attention_backward({.q = views[0],
                      .k = views[1],
                      .v = views[2],
                      .out = views[4],
                      .lse = p.lse.view(),
                      .dout = views[3],
                      .dq = views[5],
                      .dk = views[6],
                      .dv = views[7],
                      .dsinks = {}},
                     p.options);
  for (size_t i = 4; i < tensors.size(); ++i) copy_rows(views[i], tensors[i]->view());
  for (size_t i = 0; i < p.results().size(); ++i) {
    EXPECT_TRUE(same_bytes(*p.results()[i].second, *want.results()[i].second)) << p.results()[i].first;
  }
}

TEST_P(Bits, HeadsExpandedWithStrideZero) {
  Problem p = example(GetParam(), {1, 60, 60, 4, 1, 32});
  p.run();
  Problem wide = example(GetParam(), {1, 60, 60, 4, 4, 32});
  wide.q = p.q;
  TensorView k = wide.k.view(), v = wide.v.view();
  k.data = p.k.view().data;
  v.data = p.v.view().data;
  k.strides = v.strides = {60 * 32, 32, 0, 1, 0};
  attention_forward(wide.q.view(), k, v, wide.out.view(), wide.lse.view(), wide.options);
  EXPECT_TRUE(same_bytes(wide.out, p.out));
  EXPECT_TRUE(same_bytes(wide.lse, p.lse));
}

INSTANTIATE_TEST_SUITE_P(Types, Bits, ::testing::Values(DType::bf16, DType::f16, DType::f32));

}  // namespace
}  // namespace fold::testing
