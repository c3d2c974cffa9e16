// The numerics on a device: the golden files' bytes, and the host's bits on many more values (P4 of docs/numerics.md).
#include <cmath>
#include <cstring>
#include <random>

#include "device_memory.h"
#include "fold/safetensors.h"
#include "numerics/exp2.h"
#include "numerics/planes.h"

namespace {

using namespace fold::numerics;
using fold::testing::check;
using fold::testing::expect_same;
using fold::testing::OnDevice;
using fold::testing::same_bits;

template <typename T>
std::vector<T> zeros(size_t size) {
  return std::vector<T>(size);
}

/// x (rows, d) is rotated in place; a, b (rows, d); scale (rows,); h, l (rows, d / 2). One thread a row.
__global__ void split_rows(float* x, int rows, int d, int8_t* a, int8_t* b, int32_t* scale, uint8_t* h, uint8_t* l) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  x += row * d;
  a += row * d;
  b += row * d;
  rotate(x, d);
  scale[row] = split_row(x, d, a, b);
  for (int i = 0; i < d / 2; ++i) {
    h[row * d / 2 + i] = pack_h(a[2 * i], a[2 * i + 1]);
    l[row * d / 2 + i] = pack_l(a[2 * i], a[2 * i + 1]);
  }
}

/// Functions of x and ratio (count,).
__global__ void functions(const float* x, const float* ratio, int count, float* mantissa, int32_t* exponent,
                          int64_t* fixed, float* logarithm) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const Exp2 e = exp2_parts(x[i]);
  mantissa[i] = e.mantissa;
  exponent[i] = e.exponent;
  fixed[i] = fix(e, ratio[i]);
  logarithm[i] = fold::numerics::log2(fabsf(x[i]) + 1.0f);
}

using NumericsOnDevice = fold::testing::DeviceTest;

TEST_F(NumericsOnDevice, RowsOfTheGoldenFile) {
  fold::TensorFile file(FOLD_GOLDEN_DIR "/rows.safetensors");
  for (const int d : {64, 128, 256}) {
    const std::string at = "rows." + std::to_string(d) + ".";
    const auto x = file.read<float>(file.entry(at + "x"));
    const int rows = static_cast<int>(x.size()) / d;
    OnDevice<float> values(x);
    OnDevice<int8_t> a(zeros<int8_t>(x.size())), b(zeros<int8_t>(x.size()));
    OnDevice<int32_t> scale(zeros<int32_t>(rows));
    OnDevice<uint8_t> h(zeros<uint8_t>(x.size() / 2)), l(zeros<uint8_t>(x.size() / 2));
    split_rows<<<1, 64>>>(values.data(), rows, d, a.data(), b.data(), scale.data(), h.data(), l.data());
    check(cudaDeviceSynchronize());
    expect_same(values.back(), file.read<float>(file.entry(at + "rotated")), "rotated");
    expect_same(a.back(), file.read<int8_t>(file.entry(at + "a")), "a");
    expect_same(b.back(), file.read<int8_t>(file.entry(at + "b")), "b");
    expect_same(scale.back(), file.read<int32_t>(file.entry(at + "scale")), "scale");
    expect_same(h.back(), file.read<uint8_t>(file.entry(at + "h")), "h");
    expect_same(l.back(), file.read<uint8_t>(file.entry(at + "l")), "l");
  }
}

TEST_F(NumericsOnDevice, FunctionsAreTheHostsOnMillionsOfValues) {
  constexpr int kCount = 1 << 22;
  std::mt19937 rng(1);
  std::uniform_real_distribution<float> range(-70.0f, 45.0f), share(0.0f, 1.0f);
  std::vector<float> x(kCount), ratio(kCount);
  for (int i = 0; i < kCount; ++i) {
    x[i] = i % 4 == 0 ? float_of(static_cast<uint32_t>(rng())) : range(rng);  // every fourth: any bit pattern, NaN too
    ratio[i] = share(rng);
  }
  OnDevice<float> dx(x), dratio(ratio), mantissa(zeros<float>(kCount)), logarithm(zeros<float>(kCount));
  OnDevice<int32_t> exponent(zeros<int32_t>(kCount));
  OnDevice<int64_t> fixed(zeros<int64_t>(kCount));
  functions<<<kCount / 256, 256>>>(dx.data(), dratio.data(), kCount, mantissa.data(), exponent.data(), fixed.data(),
                                   logarithm.data());
  check(cudaDeviceSynchronize());
  const auto m = mantissa.back(), y = logarithm.back();
  const auto e = exponent.back();
  const auto w = fixed.back();
  for (int i = 0; i < kCount; ++i) {
    const Exp2 host = exp2_parts(x[i]);
    ASSERT_TRUE(same_bits(m[i], host.mantissa) && e[i] == host.exponent) << "2^" << x[i];
    ASSERT_EQ(w[i], fix(host, ratio[i])) << "fix " << x[i] << ", " << ratio[i];
    const float argument = std::fabs(x[i]) + 1.0f;
    if (is_finite(argument)) ASSERT_TRUE(same_bits(y[i], fold::numerics::log2(argument))) << "log2 " << argument;
  }
}

}  // namespace
