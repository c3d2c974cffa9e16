"""Caches for the tests: made-up layers, poisoned storage, and the fp64 reference of a decode step."""

import torch
from attention_reference import attention
from torch import Tensor

from fold_attention import FoldKVCache

HUGE_PAGE = 2147480000  # what serving engines leave in page table entries they do not use
ODD_LENGTHS = (1, 63, 64, 65, 127, 192, 193, 255, 256, 257, 509, 1024, 1087, 1301)


def layer(tokens: int, heads: int = 4, kv_heads: int = 2, dim: int = 64, seed: int = 0, dtype=torch.float32):
    """q (tokens, heads, dim), k and v (tokens, kv_heads, dim) whose rows look at a few keys each, key 0 among them."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, h, dim, generator=g) for h in (heads, kv_heads, kv_heads))
    group = heads // kv_heads
    q = q + k.roll(tokens // 3, 0).repeat_interleave(group, 1)  # each row has a favourite
    if tokens:
        q = q + 0.5 * k[0].repeat_interleave(group, 0)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def poisoned(batch: int, max_len: int, heads: int = 4, kv_heads: int = 2, dim: int = 64, **options) -> FoldKVCache:
    """A cache whose storage reads as NaN wherever nothing has been written."""
    cache = FoldKVCache(batch, heads, kv_heads, dim, max_len, **options)
    cache.storage.fill_(0xFF)
    return cache


def filled(lengths, layers, room: int = 0, **options) -> FoldKVCache:
    """A poisoned cache with room for more keys; request i holds the first lengths[i] keys of layers[i]."""
    q, k, _ = layers[0]
    cache = poisoned(len(lengths), max(1, *lengths) + room, q.shape[1], k.shape[1], q.shape[2], **options)
    keys, values = (torch.cat([x[i][:n] for x, n in zip(layers, lengths, strict=True)]) for i in (1, 2))
    cache.write_prompt(keys, values, starts(lengths))
    return cache


def starts(lengths) -> Tensor:
    """cu_seqlens of these lengths."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def exact(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    """fp64 attention of one request's newest rows: q (T, H, D), k, v (L, HK, D) -> (T, H, D), lse (H, T)."""
    q, k, v = (x.double()[None] for x in (q, k, v))
    sinks = options.pop("sinks", None)
    out, lse = attention(q, k, v, causal=True, sinks=None if sinks is None else sinks.double(), **options)
    return out[0], lse[0]


def bf16_error(q: Tensor, k: Tensor, v: Tensor, reference: Tensor, **options) -> Tensor:
    """Norm of the error of an ordinary bf16 implementation on the same inputs."""
    q, k, v = (x.bfloat16()[None] for x in (q, k, v))
    sinks = options.pop("sinks", None)
    out, _ = attention(q, k, v, causal=True, sinks=None if sinks is None else sinks.float(), **options)
    return (out[0].double() - reference).norm()


def snapshot(cache: FoldKVCache):
    """Requests, lengths, page tables and all bytes."""
    return cache.requests, cache.lengths, cache.free_pages, cache.tables()[0].clone(), cache.storage.clone()


def assert_unchanged(cache: FoldKVCache, before) -> None:
    after = snapshot(cache)
    assert after[:3] == before[:3]
    assert torch.equal(after[3], before[3]), "page tables"
    assert torch.equal(after[4], before[4]), "bytes"
