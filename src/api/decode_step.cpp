#include <algorithm>
#include <vector>

#include "api/backend.h"
#include "api/checks.h"
#include "api/decode_checks.h"
#include "cpu/decode.h"
#include "fold/launch.h"

namespace fold {
namespace {

using api::fail_value;
using api::require_contiguous;
using api::require_size;
using api::require_tensor;

TensorView vector_view(std::vector<int32_t>& values) {
  return {values.data(), DType::i32, {static_cast<int64_t>(values.size())}};
}

/// Who brings how many tokens, and where they go.
struct Step {
  std::vector<int32_t> tokens;      // (B,) query tokens of each request
  std::vector<int32_t> lengths;     // (B,) keys after the step
  std::vector<int32_t> cu_seqlens;  // (B + 1,) multiples of T
};

/// Of what says who brings how many tokens.
void check_shapes(const StepArgs& args) {
  const DecodeArgs& d = args.decode;
  require_tensor("q", d.q, 4, api::kFloatTypes);
  const int64_t batch = d.q.shape[0], tokens = d.q.shape[1];
  require_tensor("k", args.k, 3, api::kFloatTypes);
  require_size("k", args.k, 0, batch * tokens, "batch * tokens of q");
  require_tensor("block_table", d.block_table, 2, {DType::i32});
  require_size("block_table", d.block_table, 0, batch, "batch of q");
  api::require_last_contiguous("block_table", d.block_table);
  require_tensor("seqlens", d.seqlens, 1, {DType::i32});
  require_size("seqlens", d.seqlens, 0, batch, "batch of q");
  require_contiguous("seqlens", d.seqlens);
  if (d.q_lens.defined()) {
    require_tensor("q_lens", d.q_lens, 1, {DType::i32});
    require_size("q_lens", d.q_lens, 0, batch, "batch of q");
    require_contiguous("q_lens", d.q_lens);
  }
  if (args.slot_mapping.defined()) {
    require_tensor("slot_mapping", args.slot_mapping, 1, {DType::i64});
    require_size("slot_mapping", args.slot_mapping, 0, batch * tokens, "batch * tokens of q");
    require_contiguous("slot_mapping", args.slot_mapping);
  }
}

Step plan_step(const StepArgs& args) {
  const DecodeArgs& d = args.decode;
  const int64_t batch = d.q.shape[0], tokens = d.q.shape[1];
  Step step;
  step.cu_seqlens.push_back(0);
  for (int64_t b = 0; b < batch; ++b) {
    const int32_t before = d.seqlens.as<const int32_t>()[b];
    const int32_t* table = d.block_table.as<const int32_t>() + b * d.block_table.strides[0];
    int64_t n = d.q_lens.defined() ? d.q_lens.as<const int32_t>()[b] : tokens;
    if (n < 0 || n > tokens) {
      fail_value("q_lens[" + std::to_string(b) + "]", std::to_string(n), "0.." + std::to_string(tokens));
    }
    if (before == 0 && (d.block_table.shape[1] == 0 || table[0] < 0)) n = 0;
    if (args.slot_mapping.defined()) {
      const auto* slots = args.slot_mapping.as<const int64_t>() + b * tokens;
      int64_t written = 0;
      while (written < n && slots[written] != -1) ++written;
      for (int64_t t = written; t < tokens; ++t) {
        if (slots[t] == -1) continue;
        fail_value("slot_mapping[" + std::to_string(b * tokens + t) + "]", std::to_string(slots[t]),
                   "-1: what follows a request's tokens is padding");
      }
      n = written;
    }
    const int64_t after = int64_t{before} + n;
    if (after > INT32_MAX) fail_value("keys of request " + std::to_string(b), std::to_string(after), "below 2^31");
    step.tokens.push_back(static_cast<int32_t>(n));
    step.lengths.push_back(static_cast<int32_t>(after));
    step.cu_seqlens.push_back(static_cast<int32_t>((b + 1) * tokens));
  }
  return step;
}

/// (B T,) the slot of every token, -1 for padding. Pages have been checked.
std::vector<int64_t> slots_of(const CacheLayout& layout, const DecodeArgs& d, const Step& step) {
  const int64_t batch = d.q.shape[0], tokens = d.q.shape[1];
  std::vector<int64_t> slots(batch * tokens, -1);
  for (int64_t b = 0; b < batch; ++b) {
    const int32_t* table = d.block_table.as<const int32_t>() + b * d.block_table.strides[0];
    for (int64_t t = 0; t < step.tokens[b]; ++t) {
      const int64_t position = step.lengths[b] - step.tokens[b] + t;
      slots[b * tokens + t] = table[position / layout.page_size] * layout.page_size + position % layout.page_size;
    }
  }
  return slots;
}

void run_on_host(const CacheStorage& cache, const StepArgs& args, const DecodeResults& results) {
  Step step = plan_step(args);
  DecodeArgs after = args.decode;
  after.seqlens = vector_view(step.lengths);
  after.q_lens = vector_view(step.tokens);
  plan::DecodeParams params = api::checked_decode(cache, after);
  api::set_results(params, results);
  std::vector<int64_t> slots;
  TensorView mapping = args.slot_mapping;
  if (!mapping.defined()) {
    slots = slots_of(cache.layout, args.decode, step);
    mapping = TensorView(slots.data(), DType::i64, {static_cast<int64_t>(slots.size())});
  }
  cache_write(cache, {.k = args.k,
                      .v = args.v,
                      .block_table = args.decode.block_table,
                      .seqlens = args.decode.seqlens,
                      .cu_seqlens = vector_view(step.cu_seqlens),
                      .slot_mapping = mapping});
  cpu::decode(params);
}

/// A step whose tensors lie in one place. On a device, what its cache write and decode are told follows from what they
/// hold, so a kernel finds it, and leaves it in the workspace.
class Call {
 public:
  Call(const CacheStorage& cache, const StepArgs& args, const DecodeResults& results)
      : cache_(cache), args_(args), results_(results) {
    DecodeArgs& d = args_.decode;
    place_ = api::take_place({{"storage", &cache_.storage},
                              {"k", &args_.k},
                              {"v", &args_.v},
                              {"slot_mapping", &args_.slot_mapping},
                              {"q", &d.q},
                              {"block_table", &d.block_table},
                              {"seqlens", &d.seqlens},
                              {"q_lens", &d.q_lens},
                              {"tree", &d.tree},
                              {"depth", &d.depth},
                              {"sinks", &d.sinks},
                              {"out", &results_.out},
                              {"lse", &results_.lse},
                              {"kept_fraction", &results_.kept_fraction},
                              {"dropped_mass", &results_.dropped_mass},
                              {"recomputed", &results_.recomputed},
                              {"bytes_read", &results_.bytes_read}});
    check_shapes(args_);
    batch_ = d.q.shape[0];
    tokens_ = d.q.shape[1];
    lengths_ = place(batch_ * sizeof(int32_t));
    token_counts_ = place(batch_ * sizeof(int32_t));
    cu_seqlens_ = place((batch_ + 1) * sizeof(int32_t));
    // Without a mapping of the caller's, one is made where some tokens of a request may be padding and others not.
    made_slots_ = d.q_lens.defined() && !args_.slot_mapping.defined();
    slots_ = place(made_slots_ ? batch_ * tokens_ * sizeof(int64_t) : 0);
  }

  int64_t workspace() const {
    if (place_.device == Device::cpu) return 0;
    return end_ + std::max(cache_write_workspace(storage(), write_args(kNowhere)),
                           api::cuda_backend(place_).decode_workspace(decode_params(kNowhere), bounds()));
  }

  void run(const Launch& launch) const {
    if (place_.device == Device::cpu) return run_on_host(cache_, args_, results_);
    const plan::Backend& backend = api::cuda_backend(place_);
    plan::LaunchParams at = api::checked_launch(launch, place_, workspace());
    const auto base = reinterpret_cast<uintptr_t>(at.workspace);
    plan::DecodeParams decode = decode_params(base);
    api::set_results(decode, results_);
    const auto text = [this] {
      return "decode_step, q " + api::shape_text(args_.decode.q) + ", block_table " +
             api::shape_text(args_.decode.block_table);
    };
    // The write checks k and v before anything is launched that writes the cache.
    Launch rest{.stream = launch.stream, .workspace = launch.workspace};
    rest.workspace.data = reinterpret_cast<void*>(base + end_);
    rest.workspace.shape[0] -= end_;
    api::require_launched(text, place_, backend.step_tables(tables(base), at));
    cache_write(storage(), write_args(base), rest);
    at.workspace = rest.workspace.data;
    api::require_launched(text, place_, backend.decode(decode, bounds(), at));
  }

 private:
  static constexpr uintptr_t kNowhere = 256;  ///< a workspace whose size is being asked for

  int64_t place(int64_t bytes) {
    const int64_t start = end_;
    end_ += (bytes + 255) / 256 * 256;
    return start;
  }

  plan::DecodeBounds bounds() const { return {.max_pages = args_.decode.block_table.shape[1]}; }

  TensorView on_device(TensorView view) const {
    view.device = place_.device;
    view.device_index = place_.index;
    return view;
  }

  CacheStorage storage() const { return {cache_.layout, on_device(cache_.storage)}; }

  /// A table in the workspace at `base`.
  TensorView table(uintptr_t base, int64_t offset, DType dtype, int64_t size) const {
    return {reinterpret_cast<void*>(base + offset), dtype, {size}};
  }

  plan::StepParams tables(uintptr_t base) const {
    const DecodeArgs& d = args_.decode;
    return {.block_table = d.block_table.as<const int32_t>(),
            .block_table_stride = d.block_table.strides[0],
            .max_pages = d.block_table.shape[1],
            .page_size = cache_.layout.page_size,
            .seqlens = d.seqlens.as<const int32_t>(),
            .q_lens = d.q_lens.as<const int32_t>(),
            .slot_mapping = args_.slot_mapping.as<const int64_t>(),
            .batch = batch_,
            .tokens = tokens_,
            .lengths = reinterpret_cast<int32_t*>(base + lengths_),
            .token_counts = reinterpret_cast<int32_t*>(base + token_counts_),
            .cu_seqlens = reinterpret_cast<int32_t*>(base + cu_seqlens_),
            .slots = made_slots_ ? reinterpret_cast<int64_t*>(base + slots_) : nullptr};
  }

  CacheWriteArgs write_args(uintptr_t base) const {
    const DecodeArgs& d = args_.decode;
    TensorView mapping = args_.slot_mapping;
    if (made_slots_) mapping = table(base, slots_, DType::i64, batch_ * tokens_);
    return {.k = on_device(args_.k),
            .v = on_device(args_.v),
            .block_table = on_device(d.block_table),
            .seqlens = on_device(d.seqlens),
            .cu_seqlens = on_device(table(base, cu_seqlens_, DType::i32, batch_ + 1)),
            .slot_mapping = on_device(mapping)};
  }

  plan::DecodeParams decode_params(uintptr_t base) const {
    DecodeArgs after = args_.decode;
    after.seqlens = table(base, lengths_, DType::i32, batch_);
    after.q_lens = table(base, token_counts_, DType::i32, batch_);
    return api::shaped_decode(cache_, after);
  }

  CacheStorage cache_;
  StepArgs args_;
  DecodeResults results_;
  api::Place place_;
  int64_t batch_ = 0, tokens_ = 0;
  bool made_slots_ = false;
  int64_t end_ = 0, lengths_ = 0, token_counts_ = 0, cu_seqlens_ = 0, slots_ = 0;  // bytes in the workspace
};

}  // namespace

int64_t decode_step_workspace(const CacheStorage& cache, const StepArgs& args) {
  return Call(cache, args, {}).workspace();
}

void decode_step(const CacheStorage& cache, const StepArgs& args, const DecodeResults& results, const Launch& launch) {
  Call(cache, args, results).run(launch);
}

void decode_step(const CacheStorage& cache, const StepArgs& args, const DecodeResults& results) {
  decode_step(cache, args, results, {});
}

}  // namespace fold
