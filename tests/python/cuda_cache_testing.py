"""What the tests of caches on a GPU share: a cache on both devices, and comparisons of what they give."""

from typing import Any

import pytest
import torch
from attention_reference import assert_same_bytes
from cache_testing import starts
from torch import Tensor

from fold_attention import FoldKVCache, supports

GPU = torch.device("cuda:0")
LENGTHS = (1, 63, 64, 65, 257, 1024, 1301)
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or not supports("cache", device="cuda")[0], reason="no GPU, or no CUDA backend"
)


def both(lengths: Any, layers: Any, room: int = 0, **options: Any) -> tuple[FoldKVCache, FoldKVCache]:
    """The same requests on the CPU and on the GPU, in pools that read as NaN where nothing was written."""
    q, k, _ = layers[0]
    caches = []
    for device in ("cpu", GPU):
        cache = FoldKVCache(
            len(lengths), q.shape[1], k.shape[1], q.shape[2], max(lengths) + room, device=device, **options
        )
        cache.storage.fill_(0xFF)
        keys, values = (torch.cat([x[i][:n] for x, n in zip(layers, lengths, strict=True)]) for i in (1, 2))
        cache.write_prompt(keys.to(device), values.to(device), starts(lengths).to(device))
        caches.append(cache)
    return caches[0], caches[1]


def same(here: Any, there: Any, what: str = "") -> None:
    """Tensors, tuples and mappings of them, on the CPU and on the GPU."""
    if isinstance(here, Tensor):
        assert there.device == GPU
        assert_same_bytes(here, there.cpu(), what)
    elif isinstance(here, dict):
        assert here.keys() == there.keys()
        for key, value in here.items():
            same(value, there[key], f"{what} {key}")
    else:
        for a, b in zip(here, there, strict=True):
            same(a, b, what)
