"""Loads the shared library from `path`; `lib.<name>` are its exported functions (bindings/)."""

import os
from pathlib import Path
from types import ModuleType

import torch


def _import_tvm_ffi() -> ModuleType:
    # A torch older than the C exchange API makes tvm-ffi compile one on import. Arguments then travel by the Python
    # protocol instead: a little slower, and no compiler is needed at run time.
    variable = "TVM_FFI_DISABLE_TORCH_C_DLPACK"
    disable = not hasattr(torch.Tensor, "__dlpack_c_exchange_api__") and variable not in os.environ
    if disable:
        os.environ[variable] = "1"
    try:
        import tvm_ffi
    finally:
        if disable:
            del os.environ[variable]
    return tvm_ffi


def _find(package_path: list[str]) -> Path:
    # An editable install keeps the library apart from the sources, so every directory of the package is asked.
    for directory in package_path:
        path = Path(directory) / "_fold.so"
        if path.is_file():
            return path
    raise ImportError(f"fold_attention: _fold.so is in none of {package_path}; install the package with pip")


path = _find(list(__import__("fold_attention").__path__))
lib = _import_tvm_ffi().load_module(str(path))
