#include "cpu/decode.h"

#include "api/backend.h"
#include "api/checks.h"
#include "api/decode_checks.h"
#include "fold/launch.h"

namespace fold {
namespace {

/// The tensors of a call, which lie in one place.
struct Call {
  CacheStorage cache;
  DecodeArgs args;
  DecodeResults results;
  Partial sums;
  api::Place place;

  Call(const CacheStorage& cache_given, const DecodeArgs& args_given, const DecodeResults& results_given,
       const Partial& sums_given)
      : cache(cache_given), args(args_given), results(results_given), sums(sums_given) {
    place = api::take_place({{"storage", &cache.storage},
                             {"q", &args.q},
                             {"block_table", &args.block_table},
                             {"seqlens", &args.seqlens},
                             {"q_lens", &args.q_lens},
                             {"tree", &args.tree},
                             {"depth", &args.depth},
                             {"sinks", &args.sinks},
                             {"out", &results.out},
                             {"lse", &results.lse},
                             {"kept_fraction", &results.kept_fraction},
                             {"dropped_mass", &results.dropped_mass},
                             {"recomputed", &results.recomputed},
                             {"bytes_read", &results.bytes_read},
                             {"numerator", &sums.numerator},
                             {"denominator", &sums.denominator},
                             {"grid", &sums.grid}});
  }

  plan::DecodeBounds bounds() const { return {.max_pages = args.block_table.shape[1]}; }
  bool on_host() const { return place.device == Device::cpu; }
  plan::DecodeParams params() const {
    return on_host() ? api::checked_decode(cache, args) : api::device_decode(cache, args);
  }

  void run(const plan::DecodeParams& p, const Launch& launch) const {
    if (on_host()) return cpu::decode(p);
    const plan::Backend& backend = api::cuda_backend(place);
    const plan::LaunchParams where = api::checked_launch(launch, place, backend.decode_workspace(p, bounds()));
    api::require_launched("decode, q " + api::shape_text(args.q) + ", block_table " + api::shape_text(args.block_table),
                          place, backend.decode(p, bounds(), where));
  }
};

}  // namespace

int64_t decode_workspace(const CacheStorage& cache, const DecodeArgs& args) {
  const Call call(cache, args, {}, {});
  if (call.on_host()) return 0;
  return api::cuda_backend(call.place).decode_workspace(call.params(), call.bounds());
}

void decode(const CacheStorage& cache, const DecodeArgs& args, const DecodeResults& results, const Launch& launch) {
  const Call call(cache, args, results, {});
  plan::DecodeParams params = call.params();
  api::set_results(params, call.results);
  call.run(params, launch);
}

void decode(const CacheStorage& cache, const DecodeArgs& args, const DecodeResults& results) {
  decode(cache, args, results, {});
}

void partial(const CacheStorage& cache, const DecodeArgs& args, int64_t begin, int64_t end, const Partial& result,
             const Launch& launch) {
  const Call call(cache, args, {}, result);
  plan::DecodeParams params = call.params();
  api::set_partial(params, begin, end, call.sums, call.on_host());
  call.run(params, launch);
}

void partial(const CacheStorage& cache, const DecodeArgs& args, int64_t begin, int64_t end, const Partial& result) {
  partial(cache, args, begin, end, result, {});
}

}  // namespace fold
