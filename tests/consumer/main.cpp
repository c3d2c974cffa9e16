// A program that knows the library only through its installed package.
#include <cstdio>

#include "fold/error.h"
#include "fold/tensor.h"

int main() {
  float data[6] = {};
  const fold::TensorView view(data, fold::DType::f32, {2, 3});
  try {
    throw fold::Error(fold::Error::Kind::value, "numel", std::to_string(view.numel()), "6");
  } catch (const fold::Error& e) {
    std::printf("%s\n", e.what());
  }
  return view.numel() == 6 ? 0 : 1;
}
