#include <cmath>

#include "api/checks.h"
#include "api/decode_checks.h"
#include "cpu/decode.h"
#include "numerics/planes.h"

namespace fold {

using api::fail_value;
using api::PartialView;
using api::require_contiguous;
using api::require_size;
using api::require_tensor;

namespace {

/// E of every row that has a sum is a power of two, as decode makes them.
void check_grid(const PartialView& partial, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    const float z = partial.grid[3 * i], e = partial.grid[3 * i + 1];
    const bool empty = std::isinf(z) && z < 0 && e == 0;
    int exponent = 0;
    if (empty || std::isnan(e) || (std::isfinite(e) && e >= numerics::kMinScale && std::frexp(e, &exponent) == 0.5f)) {
      continue;
    }
    fail_value("grid of row " + std::to_string(i), std::to_string(e), "a power of two, from 2^-100");
  }
}

}  // namespace

void add_partials(const Partial& into, const Partial& other) {
  const PartialView a = api::checked_partial(into), b = api::checked_partial(other);
  for (int i = 0; i < 4; ++i)
    require_size("numerator", other.numerator, i, into.numerator.shape[i], "the other partial's shape");
  const int64_t d = into.numerator.shape[3], rows = into.numerator.numel() / d;
  for (int64_t i = 0; i < 3 * rows; ++i) {
    if (a.grid[i] != b.grid[i] && !(std::isnan(a.grid[i]) && std::isnan(b.grid[i]))) {
      fail_value("grid of row " + std::to_string(i / 3), std::to_string(b.grid[i]),
                 "partials add on one grid: " + std::to_string(a.grid[i]));
    }
  }
  const auto add = [](int64_t& x, int64_t y) {
    x = static_cast<int64_t>(static_cast<uint64_t>(x) + static_cast<uint64_t>(y));
  };
  for (int64_t i = 0; i < 3 * rows; ++i) add(a.denominator[i], b.denominator[i]);
  for (int64_t i = 0; i < rows * d; ++i) add(a.numerator[i], b.numerator[i]);
}

void finish(const Partial& partial, const TensorView& sinks, const TensorView& out, const TensorView& lse,
            const TensorView& valid) {
  const PartialView view = api::checked_partial(partial);
  const int64_t batch = partial.numerator.shape[0], tokens = partial.numerator.shape[1],
                heads = partial.numerator.shape[2];
  const int64_t d = partial.numerator.shape[3];
  api::check_output(out, batch, tokens, heads, d);
  check_grid(view, batch * tokens * heads);
  if (sinks.defined()) {
    require_tensor("sinks", sinks, 1, {DType::f32});
    require_size("sinks", sinks, 0, heads, "query heads");
    require_contiguous("sinks", sinks);
  }
  cpu::FinishParams p{.numerator = view.numerator,
                      .denominator = view.denominator,
                      .grid = view.grid,
                      .sinks = sinks.defined() ? sinks.as<float>() : nullptr,
                      .batch = batch,
                      .tokens = tokens,
                      .heads = heads,
                      .head_dim = d,
                      .out = out.data,
                      .out_dtype = out.dtype,
                      .out_stride_b = out.strides[0],
                      .out_stride_t = out.strides[1],
                      .out_stride_h = out.strides[2],
                      .lse = api::result<float>("lse", lse, DType::f32, {batch, heads, tokens}),
                      .valid = api::result<uint8_t>("valid", valid, DType::u8, {batch, tokens, heads})};
  cpu::finish(p);
}

}  // namespace fold
