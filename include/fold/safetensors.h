#pragma once
#include <cstdint>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "fold/tensor.h"

// Files in the safetensors format: 8 bytes with the header's length, the header (JSON), then the tensors' bytes.
namespace fold {

/// One tensor of a file; `begin` and `end` are bytes from the start of the file's data.
struct TensorEntry {
  std::string name;
  DType dtype = DType::u8;
  std::vector<int64_t> shape{};
  int64_t begin = 0, end = 0;
};

using TensorMetadata = std::map<std::string, std::string>;

/// Reads such a file. The header is checked whole: tensors lie in the file, end to end, none over another, each of the
/// size that its shape and dtype say. Anything else is a fold::Error.
class FOLD_API TensorFile {
 public:
  explicit TensorFile(const std::string& path);

  const TensorMetadata& metadata() const { return metadata_; }
  bool contains(const std::string& name) const { return entries_.count(name) > 0; }

  /// Throws if there is no such tensor.
  const TensorEntry& entry(const std::string& name) const;

  /// Throws also if the tensor has another dtype or rank.
  const TensorEntry& entry(const std::string& name, DType dtype, size_t ndim) const;

  /// Reads `bytes` bytes of a tensor, from its byte `offset`.
  void read(const TensorEntry& entry, int64_t offset, int64_t bytes, void* destination);

  /// The elements of a tensor whose dtype has the size of T.
  template <typename T>
  std::vector<T> read(const TensorEntry& entry) {
    std::vector<T> values((entry.end - entry.begin) / static_cast<int64_t>(sizeof(T)));
    read(entry, 0, static_cast<int64_t>(values.size() * sizeof(T)), values.data());
    return values;
  }

 private:
  std::string path_;
  std::ifstream stream_;
  int64_t data_start_ = 0;
  std::map<std::string, TensorEntry> entries_;
  TensorMetadata metadata_;
};

/// Writes such a file beside its place and moves it there when it is complete, so that a failure leaves what was there.
class FOLD_API TensorFileWriter {
 public:
  /// The tensors in the order in which their bytes will come; begin and end are filled in.
  TensorFileWriter(const std::string& path, std::vector<TensorEntry> entries, const TensorMetadata& metadata);
  ~TensorFileWriter();
  TensorFileWriter(const TensorFileWriter&) = delete;
  TensorFileWriter& operator=(const TensorFileWriter&) = delete;

  /// The next bytes of the tensors' data.
  void append(const void* bytes, int64_t count);

  /// Checks that every tensor is complete and moves the file into place.
  void commit();

 private:
  void discard();  ///< what has been written, if it is not in place

  std::string path_, temporary_;
  std::ofstream stream_;
  int64_t expected_ = 0, written_ = 0;
};

}  // namespace fold
