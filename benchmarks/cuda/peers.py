"""Libraries that the benchmarks compare with: their versions, and the one that shares this library's name."""

import functools
import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fold_attention.cli import report

NAMES = ("flash-attn-4", "flashinfer-python", "nvidia-cutlass-dsl", "triton")


def versions(published: Path | None) -> dict[str, str]:
    """Of what is installed; `published`: where the fold-attention of PyPI is."""
    found = {}
    for name in NAMES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for package in metadata.distributions(path=[str(published)]) if published else ():
        found[f"published {package.name}"] = package.version
    return found


def provenance(script: str, published: Path | None) -> dict[str, Any]:
    """What a result of the script in this folder says of its origin."""
    about = report.provenance()
    return about | {
        "command": " ".join([f"benchmarks/cuda/{script}", *about["command"].split()[1:]]),
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "peers": versions(published),
    }


def label(name: str) -> str:
    """A contender's name as a reader of a picture sees it."""
    if name.startswith("fold"):
        return name.replace("fold", "this library", 1)
    return name.replace("published", "fold-attention of PyPI")


@functools.cache
def published_package(directory: Path) -> ModuleType:
    """The fold-attention of PyPI, which is imported as fold_attention too; here under another name.

    directory: where pip installed it (--target).
    """
    init = directory / "fold_attention/__init__.py"
    spec = importlib.util.spec_from_file_location(
        "published_fold_attention", init, submodule_search_locations=[str(init.parent)]
    )
    if spec is None or spec.loader is None or not init.is_file():
        raise ImportError(f"{directory}: no fold_attention in it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
