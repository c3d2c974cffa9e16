#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "fold/attention.h"
#include "numerics/ieee.h"

// Whole-sequence attention for tests: problems with random data, the library's results, an fp64 reference, and an
// ordinary implementation at the precision of the inputs.
namespace fold::testing {

/// A tensor that owns its elements; contiguous.
struct Tensor {
  Tensor() = default;
  Tensor(DType type, std::vector<int64_t> dims) : dtype(type), shape(std::move(dims)) {
    int64_t n = 1;
    for (const int64_t d : shape) n *= d;
    bytes.assign(static_cast<size_t>(n * dtype_size(type)), 0);
  }

  int64_t numel() const { return static_cast<int64_t>(bytes.size()) / dtype_size(dtype); }

  double at(int64_t i) const {
    if (dtype == DType::f32) {
      float x;
      std::memcpy(&x, bytes.data() + i * 4, 4);
      return x;
    }
    uint16_t h;
    std::memcpy(&h, bytes.data() + i * 2, 2);
    return dtype == DType::bf16 ? numerics::from_bf16(h) : numerics::from_f16(h);
  }

  void set(int64_t i, double x) {
    const auto f = static_cast<float>(x);
    if (dtype == DType::f32) {
      std::memcpy(bytes.data() + i * 4, &f, 4);
    } else {
      const uint16_t h = dtype == DType::bf16 ? numerics::to_bf16(f) : numerics::to_f16(f);
      std::memcpy(bytes.data() + i * 2, &h, 2);
    }
  }

  TensorView view() const {
    TensorView v;
    v.data = const_cast<char*>(bytes.data());
    v.dtype = dtype;
    v.ndim = static_cast<int>(shape.size());
    int64_t stride = 1;
    for (int i = v.ndim - 1; i >= 0; --i) {
      v.shape[static_cast<size_t>(i)] = shape[static_cast<size_t>(i)];
      v.strides[static_cast<size_t>(i)] = stride;
      stride *= shape[static_cast<size_t>(i)];
    }
    return v;
  }

  void fill_normal(std::mt19937& random, double sigma = 1.0) {
    std::normal_distribution<double> normal(0.0, sigma);
    for (int64_t i = 0; i < numel(); ++i) set(i, normal(random));
  }

  void fill(double x) {
    for (int64_t i = 0; i < numel(); ++i) set(i, x);
  }

  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::vector<char> bytes;
};

struct Shape {
  int64_t batch, q_len, k_len, heads, kv_heads, dim;
};

/// One dense problem: inputs, and what the library makes of them.
struct Problem {
  Problem(DType type, Shape dims, unsigned seed = 1) : shape(dims) {
    std::mt19937 random(seed);
    q = Tensor(type, {dims.batch, dims.q_len, dims.heads, dims.dim});
    k = Tensor(type, {dims.batch, dims.k_len, dims.kv_heads, dims.dim});
    v = k;
    for (Tensor* x : {&q, &k, &v}) x->fill_normal(random);
    dout = q;
    dout.fill_normal(random);
    sinks = Tensor(DType::f32, {dims.heads});
    sinks.fill_normal(random);
    out = Tensor(type, q.shape);
    lse = Tensor(DType::f32, {dims.batch, dims.heads, dims.q_len});
    dq = Tensor(type, q.shape);
    dk = dv = Tensor(type, k.shape);
    dsinks = sinks;
  }

  void use_sinks() { options.sinks = sinks.view(); }

  void forward() { attention_forward(q.view(), k.view(), v.view(), out.view(), lse.view(), options); }

  AttentionBackwardTensors tensors() const {
    AttentionBackwardTensors t{q.view(),    k.view(),  v.view(),  out.view(), lse.view(),
                               dout.view(), dq.view(), dk.view(), dv.view(),  {}};
    if (options.sinks.defined()) t.dsinks = dsinks.view();
    return t;
  }

  void backward() { attention_backward(tensors(), options); }

  void run() {
    forward();
    backward();
  }

  /// Every result, for bitwise comparison.
  std::vector<std::pair<std::string, const Tensor*>> results() const {
    return {{"out", &out}, {"lse", &lse}, {"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"dsinks", &dsinks}};
  }

  bool sees(int64_t row, int64_t key) const {
    const int64_t diagonal = row + shape.k_len - shape.q_len;
    if (options.causal && key > diagonal) return false;
    if (options.window_left >= 0 && key < diagonal - options.window_left) return false;
    return options.window_right < 0 || key <= diagonal + options.window_right;
  }

  Shape shape;
  AttentionOptions options;
  Tensor q, k, v, dout, sinks, out, lse, dq, dk, dv, dsinks;
};

/// Results in fp64.
struct Expected {
  std::vector<double> out, lse, dq, dk, dv, dsinks;
};

/// `round` models the precision at which an ordinary implementation keeps P, dS and every result, `sum` the type in
/// which it adds. Identity and double make the reference.
template <typename Sum, typename Round>
Expected attention(const Problem& p, Round round) {
  const int64_t batch = p.shape.batch, q_len = p.shape.q_len, k_len = p.shape.k_len;
  const int64_t heads = p.shape.heads, kv_heads = p.shape.kv_heads, dim = p.shape.dim;
  const Sum scale = static_cast<Sum>(p.options.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(dim))));
  Expected e;
  e.out.assign(static_cast<size_t>(p.q.numel()), 0.0);
  e.dq = e.out;
  e.dk.assign(static_cast<size_t>(p.k.numel()), 0.0);
  e.dv = e.dk;
  e.lse.assign(static_cast<size_t>(batch * heads * q_len), -INFINITY);
  e.dsinks.assign(static_cast<size_t>(heads), 0.0);
  std::vector<Sum> dk(e.dk.size()), dv(e.dk.size());
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kv = h / (heads / kv_heads);
      for (int64_t i = 0; i < q_len; ++i) {
        const int64_t row = ((b * q_len + i) * heads + h) * dim;
        const auto key_at = [&](int64_t j) { return ((b * k_len + j) * kv_heads + kv) * dim; };
        const auto dot = [&](const Tensor& x, int64_t x_at, const Tensor& y, int64_t y_at) {
          Sum sum = 0;
          for (int64_t d = 0; d < dim; ++d) sum += static_cast<Sum>(x.at(x_at + d)) * static_cast<Sum>(y.at(y_at + d));
          return sum;
        };
        std::vector<int64_t> keys;
        for (int64_t j = 0; j < k_len; ++j) {
          if (p.sees(i, j)) keys.push_back(j);
        }
        if (keys.empty()) continue;
        const bool has_sink = p.options.sinks.defined();
        Sum max = has_sink ? static_cast<Sum>(p.sinks.at(h)) : -INFINITY;
        std::vector<Sum> logits;
        for (const int64_t j : keys) {
          logits.push_back(dot(p.q, row, p.k, key_at(j)) * scale);
          max = std::max(max, logits.back());
        }
        Sum total = has_sink ? std::exp(static_cast<Sum>(p.sinks.at(h)) - max) : 0;
        std::vector<Sum> out(static_cast<size_t>(dim), 0), dq(static_cast<size_t>(dim), 0);
        for (size_t n = 0; n < keys.size(); ++n) {
          const Sum weight = std::exp(logits[n] - max);
          total += weight;
          const Sum rounded = static_cast<Sum>(round(weight));
          for (int64_t d = 0; d < dim; ++d) {
            out[static_cast<size_t>(d)] += rounded * static_cast<Sum>(p.v.at(key_at(keys[n]) + d));
          }
        }
        Sum delta = 0;
        for (int64_t d = 0; d < dim; ++d) {
          const double o = round(out[static_cast<size_t>(d)] / total);
          e.out[static_cast<size_t>(row + d)] = o;
          delta += static_cast<Sum>(o) * static_cast<Sum>(p.dout.at(row + d));
        }
        const Sum lse = max + std::log(total);
        e.lse[static_cast<size_t>((b * heads + h) * q_len + i)] = lse;
        if (has_sink) e.dsinks[static_cast<size_t>(h)] -= std::exp(static_cast<Sum>(p.sinks.at(h)) - lse) * delta;
        for (size_t n = 0; n < keys.size(); ++n) {
          const int64_t at = key_at(keys[n]);
          const Sum probability = std::exp(logits[n] - lse);
          const Sum ds = static_cast<Sum>(round(probability * (dot(p.dout, row, p.v, at) - delta)));
          const Sum rounded = static_cast<Sum>(round(probability));
          for (int64_t d = 0; d < dim; ++d) {
            dq[static_cast<size_t>(d)] += ds * static_cast<Sum>(p.k.at(at + d));
            dk[static_cast<size_t>(at + d)] += ds * static_cast<Sum>(p.q.at(row + d));
            dv[static_cast<size_t>(at + d)] += rounded * static_cast<Sum>(p.dout.at(row + d));
          }
        }
        for (int64_t d = 0; d < dim; ++d)
          e.dq[static_cast<size_t>(row + d)] = round(dq[static_cast<size_t>(d)] * scale);
      }
    }
  }
  for (size_t i = 0; i < dk.size(); ++i) {
    e.dk[i] = round(dk[i] * scale);
    e.dv[i] = round(dv[i]);
  }
  return e;
}

inline Expected reference(const Problem& p) {
  return attention<double>(p, [](double x) { return x; });
}

/// What an implementation that keeps P, dS and its results in the inputs' type, and adds in fp32, returns.
inline Expected ordinary(const Problem& p) {
  Tensor cell(p.q.dtype, {1});
  return attention<float>(p, [&](double x) {
    cell.set(0, x);
    return cell.at(0);
  });
}

inline std::vector<double> values(const Tensor& x) {
  std::vector<double> all;
  for (int64_t i = 0; i < x.numel(); ++i) all.push_back(x.at(i));
  return all;
}

/// Norm of the difference over the norm of the reference; infinite where finiteness differs.
inline double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  EXPECT_EQ(got.size(), want.size());
  // Scaled, so that squares of values near fp32's ends stay in range.
  double largest = 0.0, error = 0.0, norm = 0.0;
  for (const double x : want) largest = std::isfinite(x) ? std::max(largest, std::fabs(x)) : largest;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(want[i]) || !std::isfinite(got[i])) {
      if (std::isnan(want[i]) ? !std::isnan(got[i]) : want[i] != got[i]) return INFINITY;
      continue;
    }
    if (largest == 0.0) {
      if (got[i] != 0.0) return INFINITY;
      continue;
    }
    error += std::pow((got[i] - want[i]) / largest, 2);
    norm += std::pow(want[i] / largest, 2);
  }
  return norm > 0.0 ? std::sqrt(error / norm) : 0.0;
}

inline double relative_error(const Tensor& got, const std::vector<double>& want) {
  return relative_error(values(got), want);
}

/// Byte equality that names the first difference.
inline ::testing::AssertionResult same_bytes(const Tensor& a, const Tensor& b) {
  if (a.bytes == b.bytes) return ::testing::AssertionSuccess();
  for (int64_t i = 0; i < a.numel(); ++i) {
    const auto at = static_cast<size_t>(i * dtype_size(a.dtype)), size = static_cast<size_t>(dtype_size(a.dtype));
    if (std::memcmp(&a.bytes[at], &b.bytes[at], size) != 0) {
      return ::testing::AssertionFailure() << "element " << i << ": " << a.at(i) << " and " << b.at(i);
    }
  }
  return ::testing::AssertionFailure() << "sizes " << a.numel() << " and " << b.numel();
}

/// Every instruction set of this processor; the best one is restored at the end.
class EachIsa {
 public:
  EachIsa() : best_(cpu::isa()) {}
  ~EachIsa() { cpu::set_isa(best_); }
  EachIsa(const EachIsa&) = delete;
  EachIsa& operator=(const EachIsa&) = delete;

  template <typename Body>
  void run(Body body) const {
    for (const cpu::Isa isa : {cpu::Isa::portable, cpu::Isa::avx2, cpu::Isa::avx512}) {
      if (isa > best_) continue;
      cpu::set_isa(isa);
      SCOPED_TRACE(cpu::isa_name(isa));
      body();
    }
  }

 private:
  cpu::Isa best_;
};

}  // namespace fold::testing
