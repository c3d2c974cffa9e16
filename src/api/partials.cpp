#include <cmath>

#include "api/backend.h"
#include "api/checks.h"
#include "api/decode_checks.h"
#include "cpu/decode.h"
#include "fold/launch.h"
#include "numerics/partial_row.h"

namespace fold {

using api::fail_value;
using api::PartialView;
using api::require_contiguous;
using api::require_size;
using api::require_tensor;

namespace {

void check_grid(const plan::FinishParams& p) {
  for (int64_t i = 0; i < p.batch * p.tokens * p.heads; ++i) {
    const float z = p.grid[3 * i], e = p.grid[3 * i + 1];
    const bool empty = std::isinf(z) && z < 0 && e == 0;
    if (empty || std::isnan(e) || numerics::is_grid(e)) continue;
    fail_value("grid of row " + std::to_string(i), std::to_string(e), "a power of two, from 2^-100");
  }
}

void add_on_host(const plan::AddPartialsParams& p) {
  for (int64_t i = 0; i < 3 * p.rows; ++i) {
    if (p.grid[i] != p.other_grid[i] && !(std::isnan(p.grid[i]) && std::isnan(p.other_grid[i]))) {
      fail_value("grid of row " + std::to_string(i / 3), std::to_string(p.other_grid[i]),
                 "partials add on one grid: " + std::to_string(p.grid[i]));
    }
  }
  const auto add = [](int64_t& x, int64_t y) {
    x = static_cast<int64_t>(static_cast<uint64_t>(x) + static_cast<uint64_t>(y));
  };
  for (int64_t i = 0; i < 3 * p.rows; ++i) add(p.denominator[i], p.other_denominator[i]);
  for (int64_t i = 0; i < p.rows * p.head_dim; ++i) add(p.numerator[i], p.other_numerator[i]);
}

}  // namespace

void add_partials(const Partial& into, const Partial& other, const Launch& launch) {
  Partial sum = into, term = other;
  const api::Place place = api::take_place({{"numerator", &sum.numerator},
                                            {"denominator", &sum.denominator},
                                            {"grid", &sum.grid},
                                            {"numerator", &term.numerator},
                                            {"denominator", &term.denominator},
                                            {"grid", &term.grid}});
  const PartialView a = api::checked_partial(sum), b = api::checked_partial(term);
  for (int i = 0; i < 4; ++i)
    require_size("numerator", term.numerator, i, sum.numerator.shape[i], "the other partial's shape");
  const int64_t d = sum.numerator.shape[3];
  const plan::AddPartialsParams params{.numerator = a.numerator,
                                       .denominator = a.denominator,
                                       .grid = a.grid,
                                       .other_numerator = b.numerator,
                                       .other_denominator = b.denominator,
                                       .other_grid = b.grid,
                                       .rows = sum.numerator.numel() / d,
                                       .head_dim = d};
  if (place.device == Device::cpu) return add_on_host(params);
  const plan::Backend& backend = api::cuda_backend(place);
  api::require_launched("add_partials, numerator " + api::shape_text(sum.numerator), place,
                        backend.add_partials(params, api::checked_launch(launch, place, 0)));
}

void add_partials(const Partial& into, const Partial& other) { add_partials(into, other, {}); }

void finish(const Partial& partial_given, const TensorView& sinks_given, const TensorView& out_given,
            const TensorView& lse_given, const TensorView& valid_given, const Launch& launch) {
  Partial partial = partial_given;
  TensorView sinks = sinks_given, out = out_given, lse = lse_given, valid = valid_given;
  const api::Place place = api::take_place({{"numerator", &partial.numerator},
                                            {"denominator", &partial.denominator},
                                            {"grid", &partial.grid},
                                            {"sinks", &sinks},
                                            {"out", &out},
                                            {"lse", &lse},
                                            {"valid", &valid}});
  const PartialView view = api::checked_partial(partial);
  const int64_t batch = partial.numerator.shape[0], tokens = partial.numerator.shape[1],
                heads = partial.numerator.shape[2];
  const int64_t d = partial.numerator.shape[3];
  api::check_output(out, batch, tokens, heads, d);
  if (sinks.defined()) {
    require_tensor("sinks", sinks, 1, {DType::f32});
    require_size("sinks", sinks, 0, heads, "query heads");
    require_contiguous("sinks", sinks);
  }
  const plan::FinishParams p{.numerator = view.numerator,
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
  if (place.device == Device::cpu) {
    check_grid(p);
    return cpu::finish(p);
  }
  const plan::Backend& backend = api::cuda_backend(place);
  api::require_launched("finish, numerator " + api::shape_text(partial.numerator), place,
                        backend.finish(p, api::checked_launch(launch, place, 0)));
}

void finish(const Partial& partial, const TensorView& sinks, const TensorView& out, const TensorView& lse,
            const TensorView& valid) {
  finish(partial, sinks, out, lse, valid, {});
}

}  // namespace fold
