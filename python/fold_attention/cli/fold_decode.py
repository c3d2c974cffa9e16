"""This library on a decode problem: one cache, called step by step."""

from typing import Any

import torch
from torch import Tensor

from fold_attention import FoldKVCache
from fold_attention.cli.problems import DecodeProblem


class FoldDecode:
    """A cache that holds all keys of a problem; each step sees its own number of them."""

    def __init__(self, problem: DecodeProblem, bits: int = 16, tail: bool = True, page_size: int = 256) -> None:
        batch, kv_heads, keys, dim = problem.k.shape
        heads = problem.q.shape[2]
        self.cache = FoldKVCache(batch, heads, kv_heads, dim, keys, page_size=page_size, tail=tail, bits=bits)
        self.problem = problem
        for request in range(batch):
            k, v = (x[request].transpose(0, 1)[None] for x in (problem.k, problem.v))
            self.cache.write_prompt(k, v, ids=[self.cache.requests[request]])
        self.block_table = self.cache.tables()[0]
        self.seqlens = {n: torch.full((batch,), n, dtype=torch.int32) for n in set(problem.lengths)}

    def __call__(self, step: int, depth: float | None, **options: Any) -> Any:
        """(B, H, D) float32, or what the options ask for."""
        return self.cache.attend(
            self.problem.q[step],
            block_table=self.block_table,
            cache_seqlens=self.seqlens[self.problem.lengths[step]],
            depth=depth,
            softmax_scale=self.problem.scale,
            out_dtype=torch.float32,
            **options,
        )

    @property
    def bytes_per_key(self) -> float:
        """Memory of a key and its value in one KV head, block summaries and the tail model included."""
        return self.cache.storage.shape[1] / self.cache.page_size / self.cache.n_kv_heads


def bf16_bytes(problem: DecodeProblem, step: int) -> int:
    """What a bf16 cache reads in a step: every visible key and value once."""
    batch, kv_heads, _, dim = problem.k.shape
    return batch * kv_heads * problem.lengths[step] * dim * 2 * 2


def peer_step(attention: Any, problem: DecodeProblem, step: int) -> Tensor:
    """One step of a peer (peers.py) on the problem's own keys and values."""
    n = problem.lengths[step]
    result: Tensor = attention(problem.q[step], problem.k[:, :, :n], problem.v[:, :, :n], problem.scale)
    return result
