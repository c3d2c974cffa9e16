#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "fold/safetensors.h"

// The header of a safetensors file, without its length.
namespace fold::api {

struct TensorHeader {
  std::vector<TensorEntry> entries;  ///< in the order of the text
  TensorMetadata metadata;
};

/// Strict: one JSON object of tensors (dtype, shape, data_offsets) and an optional __metadata__ of strings; nothing
/// else, no name twice. Throws fold::Error with `path` in it. Offsets are not judged here.
TensorHeader parse_tensor_header(std::string_view text, const std::string& path);

std::string format_tensor_header(const TensorHeader& header);

}  // namespace fold::api
