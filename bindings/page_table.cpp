#include "fold/page_table.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cache.h"
#include "export.h"
#include "page_table.h"

// Python holds tables as values: a call that changes one returns the changed copy.
namespace fold::binding {
namespace {

std::vector<int64_t> values(const Ints& ints) { return {ints.begin(), ints.end()}; }

using TableAndId = tvm::ffi::Tuple<Table, int64_t>;

Table create(int64_t num_pages, int64_t page_size, int64_t max_len) {
  return Table(PageTable(num_pages, page_size, max_len));
}

TableAndId add_request(Table table) {
  PageTable next = table->table;
  const int64_t id = next.add_request();
  return TableAndId(Table(std::move(next)), id);
}

Table free_request(Table table, int64_t id) {
  PageTable next = table->table;
  next.free_request(id);
  return Table(std::move(next));
}

TableAndId fork(Table table, int64_t id, int64_t length) {
  PageTable next = table->table;
  const int64_t child = next.fork(id, length);
  return TableAndId(Table(std::move(next)), child);
}

Table truncate(Table table, Ints ids, Ints lengths) {
  PageTable next = table->table;
  next.truncate(values(ids), values(lengths));
  return Table(std::move(next));
}

/// The table, the pages to copy (sources and destinations), and whether every request has the pages that it had.
tvm::ffi::Tuple<Table, Ints, Ints, bool> extend(Table table, Ints ids, Ints tokens) {
  const std::vector<int64_t> requests = values(ids);
  PageTable next = table->table;
  Ints sources, destinations;
  for (const PageTable::Copy& copy : next.extend(requests, values(tokens))) {
    sources.push_back(copy.source);
    destinations.push_back(copy.destination);
  }
  const bool same = std::ranges::all_of(requests, [&](int64_t id) {
    return next.pages(id).data() == table->table.pages(id).data();  // shared: no other page was needed
  });
  return tvm::ffi::Tuple<Table, Ints, Ints, bool>(Table(std::move(next)), sources, destinations, same);
}

Ints requests(Table table) {
  const std::vector<int64_t> ids = table->table.requests();
  return Ints(ids.begin(), ids.end());
}

/// block_table (ids, width) i32 and lengths (ids,) i32, both contiguous.
void write(Table table, Ints ids, Tensor block_table, Tensor lengths) {
  const TensorView pages = view(block_table, "block_table"), counts = view(lengths, "lengths");
  table->table.write_tables(values(ids), pages.shape[1], pages.as<int32_t>(), counts.as<int32_t>());
}

/// (ids,) i32, contiguous.
void lengths(Table table, Ints ids, Tensor out) {
  table->table.write_lengths(values(ids), view(out, "lengths").as<int32_t>());
}

int64_t free_pages(Table table) { return table->table.free_pages(); }

}  // namespace
}  // namespace fold::binding

FOLD_EXPORT(page_table_create, fold::binding::create)
FOLD_EXPORT(page_table_add_request, fold::binding::add_request)
FOLD_EXPORT(page_table_free_request, fold::binding::free_request)
FOLD_EXPORT(page_table_fork, fold::binding::fork)
FOLD_EXPORT(page_table_truncate, fold::binding::truncate)
FOLD_EXPORT(page_table_extend, fold::binding::extend)
FOLD_EXPORT(page_table_requests, fold::binding::requests)
FOLD_EXPORT(page_table_write, fold::binding::write)
FOLD_EXPORT(page_table_lengths, fold::binding::lengths)
FOLD_EXPORT(page_table_free_pages, fold::binding::free_pages)
