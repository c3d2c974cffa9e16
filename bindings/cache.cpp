#include "cache.h"

#include <cmath>
#include <utility>

#include "api/cache_file.h"
#include "export.h"
#include "launch.h"
#include "page_table.h"

namespace fold::binding {
namespace {

int64_t page_bytes(Ints layout) { return page_sections(layout_of(layout)).bytes; }

void write(Tensor storage, Ints layout, Tensor k, Tensor v, Tensor block_table, Tensor seqlens, Tensor cu_seqlens,
           OptionalTensor slot_mapping) {
  const CacheStorage cache = storage_of(layout, storage);
  const CacheWriteArgs args{.k = view(k, "k"),
                            .v = view(v, "v"),
                            .block_table = view(block_table, "block_table"),
                            .seqlens = view(seqlens, "seqlens"),
                            .cu_seqlens = view(cu_seqlens, "cu_seqlens"),
                            .slot_mapping = view(slot_mapping, "slot_mapping")};
  const Launching where(cache.storage, [&] { return cache_write_workspace(cache, args); });
  cache_write(cache, args, where.launch());
}

void read(Tensor storage, Ints layout, Tensor block_table, Tensor cu_seqlens, Tensor k, Tensor v) {
  const CacheStorage cache = storage_of(layout, storage);
  cache_read(cache, view(block_table, "block_table"), view(cu_seqlens, "cu_seqlens"), view(k, "k"), view(v, "v"),
             Launching(cache.storage).launch());
}

void prefill(Tensor storage, Ints layout, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor block_table,
             Tensor seqlens, OptionalTensor sinks, double softmax_scale, int64_t window_left, int64_t cached_keys,
             Tensor out, Tensor lse) {
  const CacheStorage cache = storage_of(layout, storage);
  const PrefillArgs args{.q = view(q, "q"),
                         .k = view(k, "k"),
                         .v = view(v, "v"),
                         .cu_seqlens = view(cu_seqlens, "cu_seqlens"),
                         .block_table = view(block_table, "block_table"),
                         .seqlens = view(seqlens, "seqlens"),
                         .sinks = view(sinks, "sinks"),
                         .softmax_scale = softmax_scale,
                         .window_left = window_left,
                         .cached_keys = cached_keys};
  const TensorView result = view(out, "out"), log_sums = view(lse, "lse");
  const Launching where(cache.storage, [&] { return prefill_attention_workspace(cache, args, result, log_sums); });
  prefill_attention(cache, args, result, log_sums, where.launch());
}

/// numbers: n_heads, batch, max_len, num_pages, window_left. depth is +inf where every V is read.
KVCacheOptions options(const Ints& layout, const Ints& numbers, double depth, double softmax_scale,
                       const OptionalTensor& sinks) {
  KVCacheOptions o;
  o.layout = layout_of(layout);
  o.n_heads = numbers[0];
  o.batch = numbers[1];
  o.max_len = numbers[2];
  o.num_pages = numbers[3];
  o.window_left = numbers[4];
  o.depth = static_cast<float>(depth);
  o.softmax_scale = softmax_scale;
  if (sinks.has_value()) {
    const TensorView s = view(sinks, "sinks");
    o.sinks.assign(s.as<float>(), s.as<float>() + s.numel());
  }
  return o;
}

/// Checks the options of a cache and returns its number of pages.
int64_t check_options(Ints layout, Ints numbers, double depth, double softmax_scale, OptionalTensor sinks) {
  return api::checked_options(options(layout, numbers, depth, softmax_scale, sinks)).num_pages;
}

void save(tvm::ffi::String path, Tensor storage, Table table, Ints layout, Ints numbers, double depth,
          double softmax_scale, OptionalTensor sinks) {
  api::save_cache(path, options(layout, numbers, depth, softmax_scale, sinks), storage_of(layout, storage),
                  table->table);
}

class FileObject : public tvm::ffi::Object {
 public:
  explicit FileObject(const std::string& path) : file(path) {}
  api::CacheFile file;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fold_attention.CacheFile", FileObject, tvm::ffi::Object);
};

class File : public tvm::ffi::ObjectRef {
 public:
  explicit File(tvm::ffi::ObjectPtr<FileObject> p) : ObjectRef(std::move(p)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(File, tvm::ffi::ObjectRef, FileObject);
};

File open(tvm::ffi::String path) { return File(tvm::ffi::make_object<FileObject>(std::string(path))); }

/// layout, numbers (as for `options`), depth, softmax_scale, sinks.
using FileOptions = tvm::ffi::Tuple<Ints, Ints, double, double, tvm::ffi::Array<double>>;

FileOptions file_options(File file) {
  const KVCacheOptions& o = file->file.options();
  const CacheLayout& l = o.layout;
  tvm::ffi::Array<double> sinks;
  for (const float sink : o.sinks) sinks.push_back(sink);
  return FileOptions(Ints{l.n_kv_heads, l.head_dim, l.page_size, l.k_bits, l.v_bits, l.tail ? 1 : 0},
                     Ints{o.n_heads, o.batch, o.max_len, o.num_pages, o.window_left}, double{o.depth}, o.softmax_scale,
                     sinks);
}

Table file_table(File file) { return Table(file->file.table()); }

void file_read(File file, Tensor storage, Ints layout) { file->file.read_pages(storage_of(layout, storage)); }

}  // namespace
}  // namespace fold::binding

FOLD_EXPORT(page_bytes, fold::binding::page_bytes)
FOLD_EXPORT(cache_write, fold::binding::write)
FOLD_EXPORT(cache_read, fold::binding::read)
FOLD_EXPORT(prefill_attention, fold::binding::prefill)
FOLD_EXPORT(cache_check_options, fold::binding::check_options)
FOLD_EXPORT(cache_save, fold::binding::save)
FOLD_EXPORT(cache_file_open, fold::binding::open)
FOLD_EXPORT(cache_file_options, fold::binding::file_options)
FOLD_EXPORT(cache_file_table, fold::binding::file_table)
FOLD_EXPORT(cache_file_read, fold::binding::file_read)
