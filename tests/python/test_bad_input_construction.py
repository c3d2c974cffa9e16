"""Bad input to a cache's constructor: an error that says what, got, allowed."""

import re
from typing import Any

import pytest
import torch

from fold_attention import FoldKVCache
from fold_attention.placement import page_pool

CONSTRUCTIONS: dict[str, Any] = {
    "head_dim": ((2, 4, 2, 80, 100), {}, ValueError, "head_dim=80; supported: 64, 128, 256"),
    "group": ((2, 5, 2, 64, 100), {}, ValueError, "n_heads=5; a multiple of n_kv_heads=2"),
    "large group": ((2, 65, 1, 64, 100), {}, ValueError, "n_heads=65; a multiple of n_kv_heads=1, 1 to 64 times it"),
    "kv heads": ((2, 4, 0, 64, 100), {}, ValueError, "n_kv_heads=0; at least 1"),
    "max_len": ((2, 4, 2, 64, 0), {}, ValueError, "max_len=0; allowed: 1 to 2147483647"),
    "batch": ((-1, 4, 2, 64, 100), {}, ValueError, "batch=-1; allowed"),
    "page_size": ((2, 4, 2, 64, 100), {"page_size": 96}, ValueError, "page_size=96; supported: multiples of 64"),
    "bits": ((2, 4, 2, 64, 100), {"bits": 12}, ValueError, "k_bits=12; supported: 16, 8, 4"),
    "bits of v": ((2, 4, 2, 64, 100), {"bits": (16, 2)}, ValueError, "v_bits=2; supported: 16, 8, 4"),
    "three bits": ((2, 4, 2, 64, 100), {"bits": (8, 8, 8)}, ValueError, "bits=(8, 8, 8); allowed"),
    "depth nan": ((2, 4, 2, 64, 100, float("nan")), {}, ValueError, "depth=nan; allowed: None or a finite number"),
    "depth inf": ((2, 4, 2, 64, 100, float("inf")), {}, ValueError, "depth=inf; allowed: None or a finite number"),
    "depth flag": ((2, 4, 2, 64, 100, True), {}, TypeError, "depth=bool; allowed"),
    "scale": (
        (2, 4, 2, 64, 100),
        {"softmax_scale": float("inf")},
        ValueError,
        "softmax_scale=inf; allowed: None or a finite",
    ),
    "scale huge": ((2, 4, 2, 64, 100), {"softmax_scale": 10**400}, ValueError, "; allowed: None or a finite number"),
    "dtype text": ((2, 4, 2, 64, 100), {"dtype": "bf16"}, TypeError, "dtype=bf16; allowed: None, torch.float32"),
    "dtype double": ((2, 4, 2, 64, 100), {"dtype": torch.float64}, TypeError, "dtype=torch.float64; allowed"),
    "bits text": ((2, 4, 2, 64, 100), {"bits": "16"}, TypeError, "bits=str; allowed: an integer"),
    "page size float": ((2, 4, 2, 64, 100), {"page_size": 64.0}, TypeError, "page_size=float; allowed: an integer"),
    "max_len huge": ((2, 4, 2, 64, 2**70), {}, ValueError, f"max_len={2**70}; allowed: 64-bit integers"),
    "batch float": ((2.0, 4, 2, 64, 100), {}, TypeError, "batch=float; allowed: an integer"),
    "tail text": ((2, 4, 2, 64, 100), {"tail": "no"}, TypeError, "tail=str; allowed: True or False"),
    "scale 0": ((2, 4, 2, 64, 100), {"softmax_scale": 0}, ValueError, "softmax_scale=0; allowed: None or a finite"),
    "scale text": (
        (2, 4, 2, 64, 100),
        {"softmax_scale": "1"},
        TypeError,
        "softmax_scale=str; allowed: None or a number",
    ),
    "sinks": ((2, 4, 2, 64, 100), {"sinks": torch.zeros(5)}, ValueError, "sinks=5 numbers; 4, one per head"),
    "sinks rank": ((2, 4, 2, 64, 100), {"sinks": torch.zeros(4, 1)}, ValueError, "sinks.ndim=2; allowed: 1"),
    "window": ((2, 4, 2, 64, 100), {"window_size": (-3, 0)}, ValueError, "window_left=-3; -1 (all keys) or more"),
    "num_pages": ((2, 4, 2, 64, 100), {"num_pages": 0}, ValueError, "num_pages=0; allowed: None or at least 1"),
    "too many pages": ((2, 4, 2, 64, 100), {"num_pages": 2**31}, ValueError, "num_pages=2147483648; allowed"),
    "more than memory": ((2, 4, 2, 64, 100), {"num_pages": 2**31 - 1}, ValueError, "memory for that many pages"),
    "device": ((2, 4, 2, 64, 100), {"device": "meta"}, TypeError, "device=meta; supported: cpu, cuda"),
    "no such GPU": ((2, 4, 2, 64, 100), {"device": "cuda:99"}, TypeError, "device=cuda:99; supported: cpu ("),
}


@pytest.mark.parametrize("kind", CONSTRUCTIONS)
def test_refused_constructions(kind):
    arguments, options, error, message = CONSTRUCTIONS[kind]
    with pytest.raises(error, match=re.escape(message)):
        FoldKVCache(*arguments, **options)


def test_a_gpu_without_room_for_the_pool(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(ValueError, match=re.escape("num_pages=7; memory for that many pages of 100 bytes on cuda:0")):
        page_pool(7, 100, torch.device("cuda", 0))
