#include <vector>

#include "api/checks.h"
#include "api/decode_checks.h"
#include "cpu/decode.h"
#include "fold/cache_ops.h"

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

Step plan_step(const StepArgs& args) {
  const DecodeArgs& d = args.decode;
  require_tensor("q", d.q, 4, api::kFloatTypes);
  const int64_t batch = d.q.shape[0], tokens = d.q.shape[1];
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

}  // namespace

void decode_step(const CacheStorage& cache, const StepArgs& args, const DecodeResults& results) {
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

}  // namespace fold
