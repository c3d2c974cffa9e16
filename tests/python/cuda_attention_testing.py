"""What the tests of attention on a GPU share: inputs, calls, packed sequences, and byte comparisons that wait once."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fold_attention import fold_attn_func, fold_attn_varlen_func, supports

GPU = torch.device("cuda:0")
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or not supports("attention", device="cuda")[0], reason="no GPU, or no CUDA backend"
)


def tensors(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v and dout of a batch; shape: batch, rows of q, rows of k, heads, KV heads, head dim."""
    batch, sq, sk, heads, kv_heads, dim = shape
    sizes = ((sq, heads), (sk, kv_heads), (sk, kv_heads), (sq, heads))
    return [torch.randn(batch, s, h, dim, dtype=dtype, device=GPU) for s, h in sizes]


def dense(q, k, v, *, sinks=None, scale=None, causal=False, window=(-1, -1)):
    """The library as attention_reference.run calls it."""
    return fold_attn_func(q, k, v, softmax_scale=scale, causal=causal, window_size=window, sinks=sinks, return_lse=True)


def varlen(ends_q: Tensor, ends_k: Tensor) -> Callable[..., Any]:
    """The same for packed sequences."""

    def call(q, k, v, *, sinks=None, scale=None, causal=False, window=(-1, -1)):
        options = {"softmax_scale": scale, "causal": causal, "window_size": window, "sinks": sinks}
        return fold_attn_varlen_func(q, k, v, ends_q, ends_k, return_lse=True, **options)

    return call


def ends_of(lengths: Sequence[int]) -> Tensor:
    """cu_seqlens."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(GPU)


def of_sequence(results: Sequence[Tensor], queries: slice, keys: slice) -> list[Tensor]:
    """One packed sequence's out, lse, dq, dk and dv, as a batch of one has them."""
    out, lse, dq, dk, dv = results[:5]
    return [x[None] for x in (out[queries], lse[:, queries], dq[queries], dk[keys], dv[keys])]


class SameBytes:
    """Comparisons of bytes on the device; the host waits for all of them when the block ends."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.counts: list[Tensor] = []

    def __enter__(self) -> "SameBytes":
        return self

    def compare(self, a: Sequence[Tensor], b: Sequence[Tensor], what: str) -> None:
        """Results in the order of NAMES; the shorter list decides how many."""
        for name, x, y in zip(NAMES, a, b, strict=False):
            assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{name} of {what}"
            self.names.append(f"{name} of {what}")
            self.counts.append((x.contiguous().view(torch.uint8) != y.contiguous().view(torch.uint8)).sum())

    def __exit__(self, failed: Any, *_: Any) -> None:
        if failed is None:
            counts = torch.stack(self.counts).tolist()
            wrong = [f"{name}: {n} bytes" for name, n in zip(self.names, counts, strict=True) if n]
            assert not wrong, f"{len(wrong)} of {len(counts)} differ: {'; '.join(wrong[:5])}"
