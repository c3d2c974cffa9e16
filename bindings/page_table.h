#pragma once
#include <tvm/ffi/tvm_ffi.h>

#include <utility>

#include "fold/page_table.h"

namespace fold::binding {

class TableObject : public tvm::ffi::Object {
 public:
  explicit TableObject(PageTable t) : table(std::move(t)) {}
  const PageTable table;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("fold_attention.PageTable", TableObject, tvm::ffi::Object);
};

/// A page table in Python's hands.
class Table : public tvm::ffi::ObjectRef {
 public:
  explicit Table(PageTable t) : Table(tvm::ffi::make_object<TableObject>(std::move(t))) {}
  explicit Table(tvm::ffi::ObjectPtr<TableObject> p) : ObjectRef(std::move(p)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(Table, tvm::ffi::ObjectRef, TableObject);
};

}  // namespace fold::binding
