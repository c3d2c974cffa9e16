#include "fold/safetensors.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "api/checks.h"
#include "api/tensor_header.h"

namespace fold {
namespace {

using api::fail_value;

constexpr int64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr int64_t kLengthBytes = 8;          // little-endian, as every supported machine is

/// Bytes of a tensor, or -1 if they do not fit into 63 bits.
int64_t tensor_bytes(const TensorEntry& entry) {
  int64_t bytes = dtype_size(entry.dtype);
  for (const int64_t size : entry.shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return -1;
  }
  return bytes;
}

void check_places(const std::string& path, std::vector<TensorEntry> entries, int64_t data_bytes) {
  const auto order = [](const TensorEntry& e) { return std::pair(e.begin, e.end); };
  std::sort(entries.begin(), entries.end(), [&](const auto& a, const auto& b) { return order(a) < order(b); });
  int64_t end = 0;
  for (const TensorEntry& e : entries) {
    const std::string what = path + ": data_offsets of " + e.name;
    const std::string got = "[" + std::to_string(e.begin) + ", " + std::to_string(e.end) + "]";
    if (e.begin != end) fail_value(what, got, "tensors lie end to end, so it begins at " + std::to_string(end));
    if (e.end < e.begin || e.end > data_bytes) fail_value(what, got, "the file has " + std::to_string(data_bytes));
    if (e.end - e.begin != tensor_bytes(e)) fail_value(what, got, "the bytes of its shape and dtype");
    end = e.end;
  }
  if (end != data_bytes) {
    fail_value(path + ": bytes of data", std::to_string(data_bytes), "its tensors have " + std::to_string(end));
  }
}

}  // namespace

TensorFile::TensorFile(const std::string& path) : path_(path), stream_(path, std::ios::binary) {
  std::error_code error;
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path, error));
  if (error || !stream_) fail_value("path", path, "a file that can be read");
  uint64_t length = 0;
  if (bytes < kLengthBytes || !stream_.read(reinterpret_cast<char*>(&length), kLengthBytes)) {
    fail_value(path, std::to_string(bytes) + " bytes", "a safetensors file has at least 8");
  }
  const int64_t most = std::min(kMaxHeader, bytes - kLengthBytes);
  if (length > static_cast<uint64_t>(most)) {
    fail_value(path + ": header length", std::to_string(length), "at most " + std::to_string(most));
  }
  std::string text(length, '\0');
  if (!stream_.read(text.data(), static_cast<std::streamsize>(length))) fail_value("path", path, "a readable header");
  api::TensorHeader header = api::parse_tensor_header(text, path);
  data_start_ = kLengthBytes + static_cast<int64_t>(length);
  check_places(path, header.entries, bytes - data_start_);
  metadata_ = std::move(header.metadata);
  for (TensorEntry& e : header.entries) entries_[e.name] = e;
}

const TensorEntry& TensorFile::entry(const std::string& name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end()) fail_value(path_ + ": tensor", "\"" + name + "\"", "one that the file holds");
  return it->second;
}

const TensorEntry& TensorFile::entry(const std::string& name, DType dtype, size_t ndim) const {
  const TensorEntry& found = entry(name);
  if (found.dtype != dtype || found.shape.size() != ndim) {
    fail_value(path_ + ": " + name,
               std::string(api::dtype_name(found.dtype)) + " of rank " + std::to_string(found.shape.size()),
               std::string(api::dtype_name(dtype)) + " of rank " + std::to_string(ndim));
  }
  return found;
}

void TensorFile::read(const TensorEntry& entry, int64_t offset, int64_t bytes, void* destination) {
  if (offset < 0 || bytes < 0 || offset > entry.end - entry.begin || bytes > entry.end - entry.begin - offset) {
    fail_value("bytes of " + entry.name, std::to_string(offset) + " + " + std::to_string(bytes),
               "it has " + std::to_string(entry.end - entry.begin));
  }
  stream_.clear();
  stream_.seekg(data_start_ + entry.begin + offset);
  if (bytes > 0 && !stream_.read(static_cast<char*>(destination), bytes)) {
    fail_value(path_, "a read error in " + entry.name, "a file that stays as it was opened");
  }
}

TensorFileWriter::TensorFileWriter(const std::string& path, std::vector<TensorEntry> entries,
                                   const TensorMetadata& metadata)
    : path_(path), temporary_(path + ".partial") {
  for (TensorEntry& e : entries) {
    e.begin = expected_;
    e.end = expected_ += tensor_bytes(e);
  }
  std::string text = api::format_tensor_header({std::move(entries), metadata});
  text.resize((text.size() + 7) / 8 * 8, ' ');  // tensors start at a multiple of 8
  const uint64_t length = text.size();
  stream_.open(temporary_, std::ios::binary | std::ios::trunc);
  stream_.write(reinterpret_cast<const char*>(&length), kLengthBytes);
  stream_.write(text.data(), static_cast<std::streamsize>(length));
  if (!stream_) {
    discard();
    fail_value("path", path, "a place that can be written");
  }
}

TensorFileWriter::~TensorFileWriter() { discard(); }

void TensorFileWriter::discard() {
  if (!stream_.is_open()) return;
  stream_.close();
  std::error_code ignored;
  std::filesystem::remove(temporary_, ignored);
}

void TensorFileWriter::append(const void* bytes, int64_t count) {
  written_ += count;
  stream_.write(static_cast<const char*>(bytes), count);
  if (!stream_) fail_value("path", path_, "a place with room for " + std::to_string(expected_) + " bytes");
}

void TensorFileWriter::commit() {
  if (written_ != expected_) {
    fail_value("bytes written", std::to_string(written_), "the tensors have " + std::to_string(expected_));
  }
  stream_.flush();
  if (!stream_) fail_value("path", path_, "a place with room for " + std::to_string(expected_) + " bytes");
  std::error_code error;
  std::filesystem::rename(temporary_, path_, error);
  if (error) fail_value("path", path_, "a place that can be written: " + error.message());
  stream_.close();
}

}  // namespace fold
