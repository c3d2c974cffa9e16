// Decodes a captured layer (safetensors: k, v (HK, S, D), q, out (steps, H, D), all bf16) step by step, without Python.
// decode_capture FILE [DEPTH]: depth in log2 of a row's mass; left out, every V is read.
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "fold/kv_cache.h"
#include "fold/safetensors.h"

using fold::DType;
using fold::TensorView;

static float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

static void decode_capture(const char* path, float depth) {
  fold::TensorFile file(path);
  const fold::TensorEntry &k_entry = file.entry("k", DType::bf16, 3), &q_entry = file.entry("q", DType::bf16, 3);
  auto k = file.read<uint16_t>(k_entry), v = file.read<uint16_t>(file.entry("v", DType::bf16, 3));
  auto q = file.read<uint16_t>(q_entry), expected = file.read<uint16_t>(file.entry("out", DType::bf16, 3));
  const int64_t kv_heads = k_entry.shape[0], keys = k_entry.shape[1], dim = k_entry.shape[2];
  const int64_t steps = q_entry.shape[0], heads = q_entry.shape[1], prompt = keys - steps;

  fold::KVCache cache({.layout = {.n_kv_heads = kv_heads, .head_dim = dim},
                       .n_heads = heads,
                       .batch = 1,
                       .max_len = keys,
                       .depth = depth});
  // The file keeps each head's keys together; the library takes (tokens, heads, dim), in any strides.
  const auto tokens = [&](std::vector<uint16_t>& rows, int64_t first, int64_t count) {
    TensorView view(rows.data() + first * dim, DType::bf16, {count, kv_heads, dim});
    view.strides = {dim, keys * dim, 1};
    return view;
  };
  cache.append(tokens(k, 0, prompt), tokens(v, 0, prompt));

  double error = 0, norm = 0, dropped = 0;
  int64_t bytes = 0;
  for (int64_t t = 0; t < steps; ++t) {
    std::vector<float> out(heads * dim), dropped_mass(heads);
    std::vector<int64_t> bytes_read(kv_heads);
    fold::DecodeArgs call;
    call.q = TensorView(q.data() + t * heads * dim, DType::bf16, {1, 1, heads, dim});
    fold::DecodeResults results;
    results.out = TensorView(out.data(), DType::f32, {1, 1, heads, dim});
    results.dropped_mass = TensorView(dropped_mass.data(), DType::f32, {1, 1, heads});
    results.bytes_read = TensorView(bytes_read.data(), DType::i64, {1, 1, kv_heads});
    cache.decode(call, tokens(k, prompt + t, 1), tokens(v, prompt + t, 1), results);
    for (int64_t i = 0; i < heads * dim; ++i) {
      const double model = from_bf16(expected[t * heads * dim + i]), d = double{out[i]} - model;
      error += d * d;
      norm += model * model;
    }
    for (const float share : dropped_mass) dropped += double{share} / static_cast<double>(steps * heads);
    for (const int64_t n : bytes_read) bytes += n;
  }
  std::printf(
      "%lld steps over %lld keys: error against the model's output %.2e, mass of unread V %.4f, bytes read %.3f\n",
      static_cast<long long>(steps), static_cast<long long>(keys), std::sqrt(error / norm), dropped,
      static_cast<double>(bytes) / static_cast<double>(steps * kv_heads * (prompt + steps / 2) * dim * 4));
}

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: decode_capture FILE [DEPTH]\n"), 2;
  try {
    decode_capture(argv[1], argc > 2 ? std::strtof(argv[2], nullptr) : INFINITY);
  } catch (const fold::Error& e) {
    return std::fprintf(stderr, "%s\n", e.what()), 1;
  }
  return 0;
}
