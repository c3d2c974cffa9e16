// The C++ library in one page: a prompt, one decoding step, and how deeply it read. Made-up numbers stand for a
// model's.
#include <cstdio>
#include <random>
#include <vector>

#include "fold/kv_cache.h"

int main() {
  constexpr int64_t kHeads = 8, kKvHeads = 2, kDim = 64, kPrompt = 1000;
  std::mt19937 engine(0);
  std::normal_distribution<float> normal;
  const auto random = [&](int64_t n) {
    std::vector<float> values(n);
    for (float& x : values) x = normal(engine);
    return values;
  };
  auto k = random(kPrompt * kKvHeads * kDim), v = random(kPrompt * kKvHeads * kDim);  // (tokens, KV heads, D)
  auto q = random(kHeads * kDim);
  std::vector<float> out(kHeads * kDim), dropped_mass(kHeads);

  try {
    fold::KVCache cache({.layout = {.n_kv_heads = kKvHeads, .head_dim = kDim},
                         .n_heads = kHeads,
                         .batch = 1,
                         .max_len = 4096,
                         .depth = 12});
    // Views do not own; a contiguous one is a pointer, a dtype and a shape.
    const auto tokens = [](std::vector<float>& rows, int64_t count) {
      return fold::TensorView(rows.data(), fold::DType::f32, {count, kKvHeads, kDim});
    };
    cache.append(tokens(k, kPrompt), tokens(v, kPrompt));

    fold::DecodeArgs call;
    call.q = fold::TensorView(q.data(), fold::DType::f32, {1, 1, kHeads, kDim});  // (requests, tokens, heads, D)
    fold::DecodeResults results;
    results.out = fold::TensorView(out.data(), fold::DType::f32, {1, 1, kHeads, kDim});
    results.dropped_mass = fold::TensorView(dropped_mass.data(), fold::DType::f32, {1, 1, kHeads});
    cache.decode(call, tokens(k, 1), tokens(v, 1), results);  // appends one token, and attends

    std::printf("%lld keys; head 0: out[0] = %.4f, mass whose V was not read %.4f\n",
                static_cast<long long>(cache.table().length(cache.table().requests()[0])), double{out[0]},
                double{dropped_mass[0]});
  } catch (const fold::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());  // what=got; allowed
    return 1;
  }
  return 0;
}
