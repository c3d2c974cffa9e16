"""Runs the command line in this process, and makes captures to run it on."""

from pathlib import Path

import torch
from cache_testing import layer
from safetensors.torch import save_file

from fold_attention.cli import main


def run(capsys, *arguments) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refused(capsys, *arguments) -> str:
    """The one line with which a command that cannot be honoured ends."""
    status, _, err = run(capsys, *arguments)
    assert status == 1
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("fold-attention: ")
    assert "; " in lines[0]
    return lines[0]


def tensors(keys: int = 300, steps: int = 3, heads: int = 4, kv_heads: int = 2, dtype=torch.bfloat16) -> dict:
    """Those of a decode capture."""
    q, k, v = layer(keys, heads, kv_heads, dtype=dtype)
    return {"q": q[-steps:].contiguous(), **{n: x.transpose(0, 1).contiguous() for n, x in (("k", k), ("v", v))}}


def decode_capture(path: Path, metadata: dict[str, str] | None = None, **changes) -> Path:
    """A small decode capture in which some tensors are others, or missing (None)."""
    named = {name: x for name, x in (tensors() | changes).items() if x is not None}
    save_file(named, path, {"capture": "decode"} | (metadata or {}))
    return path
