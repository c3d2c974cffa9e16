#pragma once
#include <initializer_list>
#include <string>

#include "fold/tensor.h"

// Checks of public arguments. Each throws fold::Error in the form `what=got; allowed`.
namespace fold::api {

[[noreturn]] void fail_value(const std::string& what, const std::string& got, const std::string& allowed);
[[noreturn]] void fail_type(const std::string& what, const std::string& got, const std::string& allowed);

const char* dtype_name(DType dtype);
std::string shape_text(const TensorView& t);

/// A tensor of this name must be given, on the CPU, of one of the dtypes, with this many dimensions.
void require_tensor(const char* name, const TensorView& t, int ndim, std::initializer_list<DType> dtypes);

/// Dimension `dim` must have `size` elements; `meaning` says where the size comes from.
void require_size(const char* name, const TensorView& t, int dim, int64_t size, const char* meaning);

/// The last dimension must be contiguous (a size of 0 or 1 always is).
void require_last_contiguous(const char* name, const TensorView& t);

/// Every dimension must be contiguous.
void require_contiguous(const char* name, const TensorView& t);

/// A tensor that is written: no two elements share an address through a stride of 0.
void require_no_broadcast(const char* name, const TensorView& t);

constexpr std::initializer_list<DType> kFloatTypes = {DType::f32, DType::bf16, DType::f16};

}  // namespace fold::api
