#include <cmath>

#include "cache.h"
#include "export.h"
#include "launch.h"

namespace fold::binding {
namespace {

/// Depths from Python are finite: reading every V is asked for by None.
void check_finite(const TensorView& depth) {
  if (!depth.defined() || depth.dtype != DType::f32 || depth.device != Device::cpu) return;
  std::array<int64_t, kMaxDims> at{};
  for (int64_t n = depth.numel(), i = 0; i < n; ++i) {
    int64_t offset = 0;
    for (int d = 0; d < depth.ndim; ++d) offset += at[d] * depth.strides[d];
    if (const float value = depth.as<float>()[offset]; !std::isfinite(value)) {
      throw Error(Error::Kind::value, "depth", std::to_string(value), "allowed: None or finite numbers");
    }
    for (int d = depth.ndim - 1; d >= 0 && ++at[d] == depth.shape[d]; --d) at[d] = 0;
  }
}

/// A tensor that has an axis of size 1 more, before `axis`.
TensorView with_axis(TensorView t, int axis) {
  if (!t.defined() || t.ndim == kMaxDims) return t;
  for (int d = t.ndim; d > axis; --d) {
    t.shape[d] = t.shape[d - 1];
    t.strides[d] = t.strides[d - 1];
  }
  t.strides[axis] = axis < t.ndim ? t.shape[axis + 1] * t.strides[axis + 1] : 1;
  t.shape[axis] = 1;
  ++t.ndim;
  return t;
}

DecodeArgs arguments(const Tensor& q, const Tensor& block_table, const Tensor& seqlens, const OptionalTensor& q_lens,
                     const OptionalTensor& tree, const OptionalTensor& depth, const OptionalTensor& sinks,
                     double softmax_scale, int64_t window_left, int64_t splits) {
  DecodeArgs args;
  args.q = view(q, "q");
  args.block_table = view(block_table, "block_table");
  args.seqlens = view(seqlens, "seqlens");
  args.q_lens = view(q_lens, "q_lens");
  args.tree = view(tree, "tree");
  args.depth = view(depth, "depth");
  args.sinks = view(sinks, "sinks");
  args.softmax_scale = softmax_scale;
  args.window_left = window_left;
  if (splits < 0 || splits > INT32_MAX) {
    throw Error(Error::Kind::value, "splits", std::to_string(splits), "allowed: 0 to 2147483647");
  }
  args.splits = static_cast<int>(splits);
  check_finite(args.depth);
  return args;
}

/// k and v are given for a step that writes first; seqlens are then the keys before it. A query of one token may do
/// without its axis; its results are then without it too. On a GPU a workspace may be given; returns the bytes of one
/// that would have done if it did not, else 0.
int64_t run(Tensor q, Tensor storage, Ints layout, OptionalTensor k, OptionalTensor v, OptionalTensor slot_mapping,
            Tensor block_table, Tensor seqlens, OptionalTensor q_lens, OptionalTensor tree, OptionalTensor depth,
            OptionalTensor sinks, double softmax_scale, int64_t window_left, int64_t splits, OptionalTensor gates,
            double reference_shift, Tensor out, OptionalTensor lse, OptionalTensor kept_fraction,
            OptionalTensor dropped_mass, OptionalTensor recomputed, OptionalTensor bytes_read,
            OptionalTensor workspace) {
  const CacheStorage cache = storage_of(layout, storage);
  DecodeArgs args = arguments(q, block_table, seqlens, q_lens, tree, depth, sinks, softmax_scale, window_left, splits);
  if (gates.has_value()) {
    const TensorView g = view(gates, "gates");
    if (g.dtype != DType::f32 || g.ndim != 1 || g.shape[0] != 5 || g.strides[0] != 1) {
      throw Error(Error::Kind::value, "gates", "another tensor", "five contiguous float32: K.l, K.b, V.h, V.l, V.b");
    }
    args.gates = g.as<float>();
  }
  args.reference_shift = static_cast<float>(reference_shift);
  const bool no_tokens = args.q.ndim == 3;
  const auto rows = [no_tokens](TensorView result) { return no_tokens ? with_axis(result, 1) : result; };
  const TensorView lse_rows = view(lse, "lse");
  args.q = rows(args.q);
  const DecodeResults results{.out = rows(view(out, "out")),
                              .lse = no_tokens ? with_axis(lse_rows, 2) : lse_rows,
                              .kept_fraction = rows(view(kept_fraction, "kept_fraction")),
                              .dropped_mass = rows(view(dropped_mass, "dropped_mass")),
                              .recomputed = rows(view(recomputed, "recomputed")),
                              .bytes_read = rows(view(bytes_read, "bytes_read"))};
  const TensorView given = view(workspace, "workspace");
  if (k.has_value()) {
    const StepArgs step{
        .k = view(k, "k"), .v = view(v, "v"), .slot_mapping = view(slot_mapping, "slot_mapping"), .decode = args};
    const Launching where(cache.storage, given, [&] { return decode_step_workspace(cache, step); });
    decode_step(cache, step, results, where.launch());
    return where.allocated();
  }
  const Launching where(cache.storage, given, [&] { return decode_workspace(cache, args); });
  decode(cache, args, results, where.launch());
  return where.allocated();
}

Partial partial_of(const Tensor& numerator, const Tensor& denominator, const Tensor& grid) {
  return {view(numerator, "numerator"), view(denominator, "denominator"), view(grid, "grid")};
}

void run_partial(Tensor q, Tensor storage, Ints layout, Tensor block_table, Tensor seqlens, OptionalTensor q_lens,
                 OptionalTensor tree, OptionalTensor depth, double softmax_scale, int64_t window_left, int64_t splits,
                 int64_t begin, int64_t end, Tensor numerator, Tensor denominator, Tensor grid) {
  const CacheStorage cache = storage_of(layout, storage);
  const DecodeArgs args =
      arguments(q, block_table, seqlens, q_lens, tree, depth, {}, softmax_scale, window_left, splits);
  const Launching where(cache.storage, [&] { return decode_workspace(cache, args); });
  partial(cache, args, begin, end, partial_of(numerator, denominator, grid), where.launch());
}

void add(Tensor numerator, Tensor denominator, Tensor grid, Tensor other_numerator, Tensor other_denominator,
         Tensor other_grid) {
  const Partial into = partial_of(numerator, denominator, grid);
  const Partial other = partial_of(other_numerator, other_denominator, other_grid);
  add_partials(into, other, Launching(into.numerator).launch());
}

void run_finish(Tensor numerator, Tensor denominator, Tensor grid, OptionalTensor sinks, Tensor out, Tensor lse,
                Tensor valid) {
  const Partial partial = partial_of(numerator, denominator, grid);
  finish(partial, view(sinks, "sinks"), view(out, "out"), view(lse, "lse"), view(valid, "valid"),
         Launching(partial.numerator).launch());
}

}  // namespace
}  // namespace fold::binding

FOLD_EXPORT(decode, fold::binding::run)
FOLD_EXPORT(partial, fold::binding::run_partial)
FOLD_EXPORT(add_partials, fold::binding::add)
FOLD_EXPORT(finish, fold::binding::run_finish)
