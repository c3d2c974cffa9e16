#include <algorithm>
#include <limits>
#include <vector>

#include "api/backend.h"
#include "api/cache_checks.h"
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
  if (batch * tokens > std::numeric_limits<int32_t>::max()) {
    fail_value("q.shape", api::shape_text(d.q), "fewer than 2^31 tokens");
  }
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
    if (before < 0) fail_value("seqlens[" + std::to_string(b) + "]", std::to_string(before), "at least 0");
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

/// A step whose tensors lie in one place. On a device, what its decode is told follows from what they hold, so the
/// kernel that writes the cache finds it, and leaves it in the workspace.
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
    if (place_.device == Device::cpu) return;
    backend_ = &api::cuda_backend(place_);
    describe();
  }

  int64_t workspace() const {
    if (backend_ == nullptr) return 0;
    return 2 * table_bytes() + backend_->decode_step_workspace(write_, decode_);
  }

  void run(const Launch& launch) {
    if (backend_ == nullptr) return run_on_host(cache_, args_, results_);
    plan::LaunchParams at = api::checked_launch(launch, place_, workspace());
    api::set_results(decode_, results_);
    auto* const tables = static_cast<uint8_t*>(at.workspace);
    write_.lengths = reinterpret_cast<int32_t*>(tables);
    write_.token_counts = reinterpret_cast<int32_t*>(tables + table_bytes());
    decode_.seqlens = write_.lengths;
    decode_.q_lens = write_.token_counts;
    const auto text = [this] {
      return "decode_step, q " + api::shape_text(args_.decode.q) + ", block_table " +
             api::shape_text(args_.decode.block_table);
    };
    at.workspace = tables + 2 * table_bytes();
    api::require_launched(text, place_, backend_->decode_step(write_, decode_, at));
  }

 private:
  /// Lengths, or numbers of tokens, in the workspace.
  int64_t table_bytes() const { return api::whole_part(decode_.batch * int64_t{sizeof(int32_t)}); }

  void describe() {
    const DecodeArgs& d = args_.decode;
    decode_ = api::device_decode(cache_, d);
    const int64_t tokens = decode_.batch * decode_.tokens;
    plan::CacheWriteParams& w = write_.write;
    w.cache = decode_.cache;
    api::set_rows(w, args_.k, args_.v, tokens);
    w.block_table = decode_.block_table;
    w.block_table_stride = decode_.block_table_stride;
    w.seqlens = decode_.seqlens;
    w.slot_mapping = args_.slot_mapping.as<const int64_t>();
    w.batch = decode_.batch;
    write_.max_pages = d.block_table.shape[1];
    write_.q_lens = decode_.q_lens;
    write_.tokens = decode_.tokens;
  }

  CacheStorage cache_;
  StepArgs args_;
  DecodeResults results_;
  api::Place place_;
  const plan::Backend* backend_ = nullptr;  // on a device
  plan::StepParams write_{};
  plan::DecodeParams decode_{};
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
