#include "api/cache_file.h"

#include <charconv>
#include <cmath>
#include <map>

#include "api/cache_checks.h"
#include "api/checks.h"

namespace fold::api {
namespace {

constexpr const char* kFormat = "fold-kv-cache 1";

template <typename T>
std::string text_of(T value) {
  char buffer[64];
  return {buffer, std::to_chars(buffer, buffer + sizeof(buffer), value).ptr};
}

/// The options that are numbers, as metadata keys: written and read in one place.
template <typename Options, typename F>
void visit_numbers(Options& options, F visit) {
  visit("n_heads", options.n_heads);
  visit("n_kv_heads", options.layout.n_kv_heads);
  visit("head_dim", options.layout.head_dim);
  visit("page_size", options.layout.page_size);
  visit("k_bits", options.layout.k_bits);
  visit("v_bits", options.layout.v_bits);
  visit("max_len", options.max_len);
  visit("num_pages", options.num_pages);
  visit("depth", options.depth);
  visit("softmax_scale", options.softmax_scale);
  visit("window_left", options.window_left);
}

const std::string& value_of(const TensorFile& file, const std::string& path, const std::string& key) {
  const auto it = file.metadata().find(key);
  if (it == file.metadata().end()) fail_value(path + ": metadata", "no \"" + key + "\"", "a saved FoldAttention cache");
  return it->second;
}

KVCacheOptions read_options(TensorFile& file, const std::string& path) {
  const std::string& format = value_of(file, path, "format");
  if (format != kFormat) fail_value(path + ": format", format, std::string("supported: ") + kFormat);
  KVCacheOptions options;
  visit_numbers(options, [&](const char* key, auto& number) {
    const std::string& text = value_of(file, path, key);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size()) fail_value(path + ": " + key, text, "a number");
  });
  const std::string& tail = value_of(file, path, "tail");
  if (tail != "true" && tail != "false") fail_value(path + ": tail", tail, "true or false");
  options.layout.tail = tail == "true";
  if (file.contains("sinks")) options.sinks = file.read<float>(file.entry("sinks", DType::f32, 1));
  return checked_options(options);
}

PageTable read_table(TensorFile& file, const std::string& path, const KVCacheOptions& options) {
  const TensorEntry& pages = file.entry("pages", DType::u8, 2);
  const TensorEntry& table = file.entry("block_table", DType::i32, 2);
  const TensorEntry& lengths = file.entry("lengths", DType::i64, 1);
  const int64_t used = pages.shape[0], requests = lengths.shape[0], width = table.shape[1];
  const auto wrong = [&](const char* name, const TensorEntry& entry, const std::string& allowed) {
    fail_value(path + ": " + name + ".shape[0]", std::to_string(entry.shape[0]), allowed);
  };
  if (used > options.num_pages) wrong("pages", pages, "at most num_pages=" + std::to_string(options.num_pages));
  if (table.shape[0] != requests) wrong("block_table", table, "one row per length, " + std::to_string(requests));
  if (const int64_t bytes = page_sections(options.layout).bytes; pages.shape[1] != bytes) {
    fail_value(path + ": pages.shape[1]", std::to_string(pages.shape[1]), std::to_string(bytes) + ", bytes of a page");
  }
  const std::vector<int32_t> ids = file.read<int32_t>(table);
  const std::vector<int64_t> keys = file.read<int64_t>(lengths);
  PageTable result(options.num_pages, options.layout.page_size, options.max_len);
  for (int64_t i = 0; i < requests; ++i) {
    if (keys[i] < 0 || keys[i] > options.max_len) {
      fail_value(path + ": lengths[" + std::to_string(i) + "]", std::to_string(keys[i]),
                 "0 to max_len=" + std::to_string(options.max_len));
    }
    const int64_t held = (keys[i] + options.layout.page_size - 1) / options.layout.page_size;
    if (held > width) fail_value(path + ": block_table.shape[1]", std::to_string(width), "enough for every length");
    const std::span<const int32_t> row(ids.data() + i * width, static_cast<size_t>(held));
    for (const int32_t page : row) {
      if (page < 0 || page >= used)
        fail_value(path + ": page", std::to_string(page), "0 to " + std::to_string(used - 1));
    }
    result.add_request(row, keys[i]);
  }
  if (result.num_pages() - result.free_pages() != used) wrong("pages", pages, "pages that a request holds");
  return result;
}

}  // namespace

KVCacheOptions checked_options(const KVCacheOptions& options) {
  KVCacheOptions o = options;
  check_layout(o.layout);
  require_heads(o.n_heads, o.layout.n_kv_heads);
  const auto require = [](bool ok, const char* what, auto got, const char* allowed) {
    if (!ok) fail_value(what, std::to_string(got), allowed);
  };
  require(o.max_len >= 1 && o.max_len <= INT32_MAX, "max_len", o.max_len, "allowed: 1 to 2147483647");
  require(o.batch >= 0 && o.batch <= INT32_MAX, "batch", o.batch, "allowed: 0 to 2147483647");
  if (o.num_pages == 0) o.num_pages = o.batch * ((o.max_len + o.layout.page_size - 1) / o.layout.page_size);
  require(o.num_pages >= 0 && o.num_pages <= INT32_MAX, "num_pages", o.num_pages, "allowed: 0 to 2147483647");
  require(!std::isnan(o.depth) && o.depth != -INFINITY, "depth", o.depth, "a finite number, or +inf to read every V");
  log2_scale(o.softmax_scale, o.layout.head_dim);
  require(o.window_left >= -1, "window_left", o.window_left, "-1 (all keys) or more");
  if (!o.sinks.empty() && static_cast<int64_t>(o.sinks.size()) != o.n_heads) {
    fail_value("sinks", std::to_string(o.sinks.size()) + " numbers", std::to_string(o.n_heads) + ", one per head");
  }
  return o;
}

void save_cache(const std::string& path, const KVCacheOptions& options, const CacheStorage& cache,
                const PageTable& table) {
  TensorMetadata metadata{{"format", kFormat}, {"tail", options.layout.tail ? "true" : "false"}};
  visit_numbers(options, [&](const char* key, auto number) { metadata[key] = text_of(number); });

  const std::vector<int64_t> requests = table.requests();
  std::vector<int64_t> lengths;
  std::vector<int32_t> saved;  // pages in the order of the file
  std::map<int32_t, int32_t> places;
  size_t width = 0;
  for (const int64_t id : requests) {
    lengths.push_back(table.length(id));
    width = std::max(width, table.pages(id).size());
    for (const int32_t page : table.pages(id)) {
      if (places.emplace(page, static_cast<int32_t>(saved.size())).second) saved.push_back(page);
    }
  }
  std::vector<int32_t> block_table(requests.size() * width, -1);
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto pages = table.pages(requests[i]);
    for (size_t j = 0; j < pages.size(); ++j) block_table[i * width + j] = places[pages[j]];
  }

  const plan::CacheView view = cache_view(cache);
  const auto n = static_cast<int64_t>(requests.size()), columns = static_cast<int64_t>(width);
  std::vector<TensorEntry> entries{{"pages", DType::u8, {static_cast<int64_t>(saved.size()), view.sections.bytes}},
                                   {"block_table", DType::i32, {n, columns}},
                                   {"lengths", DType::i64, {n}}};
  if (!options.sinks.empty()) entries.push_back({"sinks", DType::f32, {options.n_heads}});
  TensorFileWriter writer(path, std::move(entries), metadata);
  const auto append = [&](const auto& values) {
    writer.append(values.data(), static_cast<int64_t>(values.size() * sizeof(values[0])));
  };
  for (const int32_t page : saved) writer.append(view.pages + page * view.page_stride, view.sections.bytes);
  append(block_table);
  append(lengths);
  append(options.sinks);
  writer.commit();
}

CacheFile::CacheFile(const std::string& path)
    : file_(path), options_(read_options(file_, path)), table_(read_table(file_, path, options_)) {}

void CacheFile::read_pages(const CacheStorage& cache) {
  const plan::CacheView view = cache_view(cache);
  const TensorEntry& pages = file_.entry("pages");
  if (view.num_pages < pages.shape[0]) {
    fail_value("storage pages", std::to_string(view.num_pages), "at least " + std::to_string(pages.shape[0]));
  }
  for (int64_t i = 0; i < pages.shape[0]; ++i) {
    file_.read(pages, i * view.sections.bytes, view.sections.bytes, view.pages + i * view.page_stride);
  }
}

}  // namespace fold::api
