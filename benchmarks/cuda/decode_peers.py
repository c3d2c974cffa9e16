"""Contenders of decode.py: this library, and the kernels that a user could pick instead, as far as they are installed.

A step appends one key and value to every request and attends over all, in one captured graph. B requests, H query
heads, HK KV heads, D head dim, L keys of a request, the new one included.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from peers import published_package
from torch import Tensor

from fold_attention import FoldKVCache
from fold_attention.cli.problems import DecodeProblem

PAGE = 64  # keys a page of FlashInfer's and XQA's cache
WORKSPACE = 256 << 20  # bytes, theirs


@dataclass
class Contender:
    """A step, and what is known of it."""

    name: str
    run: Callable[[], Tensor]  # (B, H, D)
    counts: Callable[[], dict[str, int]]  # once it has run; at least "bytes" of the cache, which the step needs
    about: dict[str, Any] = field(default_factory=dict)


@dataclass
class Step:
    """Tensors of a step, on the GPU."""

    problem: DecodeProblem

    @property
    def q(self) -> Tensor:
        """(B, H, D)"""
        return self.problem.q[0]

    @property
    def length(self) -> int:
        return self.problem.lengths[0]

    def new(self, rows: Tensor) -> Tensor:
        """(B, HK, D): the newest of k or v."""
        return rows[:, :, self.length - 1].contiguous()

    def packed(self, rows: Tensor, keys: int) -> Tensor:
        """(B keys, HK, D): the first keys of k or v."""
        return rows[:, :, :keys].transpose(1, 2).flatten(0, 1).contiguous()

    def paged(self, rows: Tensor) -> Tensor:
        """(B pages, HK, PAGE, D), a request's pages in a row."""
        b, heads, keys, dim = rows.shape
        pages = -(-keys // PAGE)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, pages * PAGE - keys))
        return padded.view(b, heads, pages, PAGE, dim).transpose(1, 2).flatten(0, 1).contiguous()


def fold(step: Step, bits: int | tuple[int, int], tail: bool, depths: list[float | None]) -> Iterator[Contender]:
    """This library at several depths, on one cache."""
    problem = step.problem
    batch, kv_heads, keys, dim = problem.k.shape
    cache = FoldKVCache(
        batch,
        step.q.shape[1],
        kv_heads,
        dim,
        keys,
        bits=bits,
        tail=tail,
        softmax_scale=problem.scale,
        device="cuda",
        dtype=torch.float32,
    )
    # A prompt, and the new token once: its page is in the block table then, and each step writes it again.
    for part in (slice(0, keys - 1), slice(keys - 1, keys)):
        cache.write_prompt(*(rows[:, :, part].transpose(1, 2) for rows in (problem.k, problem.v)))
    k, v, block_table = step.new(problem.k), step.new(problem.v), cache.tables()[0].clone()
    before = torch.full((batch,), keys - 1, dtype=torch.int32, device="cuda")
    k_bits, v_bits = cache.bits
    for depth in depths:

        def run(depth: float | None = depth, **options: Any) -> Any:
            return cache.decode(step.q, k, v, block_table=block_table, cache_seqlens=before, depth=depth, **options)

        def counts(run: Callable[..., Any] = run) -> dict[str, int]:
            info = run(return_info=True)[1]
            return {"bytes": int(info["bytes_read"].sum()), "recomputed": int(info["recomputed"].sum())}

        text = "none" if depth is None else format(depth, "g")
        width = f"{k_bits} bits" if k_bits == v_bits else f"{k_bits}, {v_bits} bits"
        name = f"fold, {width}{'' if tail else ', no tail'}, depth {text}"
        yield Contender(name, run, counts, {"series": name.rsplit(",", 1)[0], "depth": depth})


def published(step: Step, directory: Path, depth: float | None) -> list[Contender]:
    problem = step.problem
    batch, kv_heads, keys, dim = problem.k.shape
    cache = published_package(directory).FoldKVCache(batch, step.q.shape[1], kv_heads, dim, keys, depth=depth)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * (keys - 1)
    cache.write_prompt(step.packed(problem.k, keys - 1), step.packed(problem.v, keys - 1), starts)
    replay = cache.prepare_replay_step(step.q, step.new(problem.k), step.new(problem.v))

    def run() -> Tensor:
        out: Tensor = replay()[0]
        return out.view(step.q.shape)

    def counts() -> dict[str, int]:
        # Of every key K's first plane and its scale, of some V (bf16) and K's second plane; a row a block for the tail.
        values, refined = replay()[2].long().sum(0).tolist()
        blocks = 0 if cache.tail is None else batch * kv_heads * -(-keys // 64)
        return {"bytes": batch * kv_heads * keys * (dim + 2) + (values + blocks) * 2 * dim + refined * dim}

    name = f"published, depth {'none' if depth is None else format(depth, 'g')}"
    return [Contender(name, run, counts, {"series": "published", "depth": depth})]


class PagedCache:
    """What FlashInfer's and XQA's kernels read."""

    def __init__(self, step: Step, dtype: torch.dtype) -> None:
        problem = step.problem
        self.step, self.dtype = step, dtype
        limit = torch.finfo(dtype).max
        k, v = (step.paged(x).clamp(-limit, limit).to(dtype) for x in (problem.k, problem.v))
        self.pools = (k, v)
        self.new = tuple(step.new(x).clamp(-limit, limit).to(dtype) for x in (problem.k, problem.v))
        batch, self.pages = step.q.shape[0], -(-step.length // PAGE)
        each = {"dtype": torch.int32, "device": "cuda"}
        self.indptr = torch.arange(batch + 1, **each) * self.pages
        self.indices = torch.arange(batch * self.pages, **each)
        self.last = torch.full((batch,), (step.length - 1) % PAGE + 1, **each)
        self.requests, self.positions = torch.arange(batch, **each), torch.full((batch,), step.length - 1, **each)

    def append(self, flashinfer: ModuleType) -> None:
        flashinfer.append_paged_kv_cache(
            *self.new,
            self.requests,
            self.positions,
            self.pools,
            self.indices,
            self.indptr,
            self.last,
            kv_layout="HND",
        )

    def counts(self) -> dict[str, int]:
        batch, kv_heads, keys, dim = self.step.problem.k.shape
        return {"bytes": batch * kv_heads * keys * dim * 2 * self.dtype.itemsize}


def flashinfer_decode(step: Step, flashinfer: ModuleType, dtype: torch.dtype) -> list[Contender]:
    cache = PagedCache(step, dtype)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda"),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=True,  # faster for the groups here
        paged_kv_indptr_buffer=cache.indptr.clone(),
        paged_kv_indices_buffer=cache.indices.clone(),
        paged_kv_last_page_len_buffer=cache.last.clone(),
        backend="fa2",
    )
    heads, dim = step.q.shape[1:]
    wrapper.plan(
        cache.indptr,
        cache.indices,
        cache.last,
        heads,
        step.problem.k.shape[1],
        dim,
        PAGE,
        q_data_type=step.q.dtype,
        kv_data_type=dtype,
        sm_scale=step.problem.scale,
    )

    def run() -> Tensor:
        cache.append(flashinfer)
        out: Tensor = wrapper.run(step.q, cache.pools)
        return out

    name = "FlashInfer, bf16" if dtype == torch.bfloat16 else "FlashInfer, fp8 KV"
    return [Contender(name, run, cache.counts, {"series": name})]


def xqa(step: Step, flashinfer: ModuleType) -> list[Contender]:
    cache = PagedCache(step, torch.bfloat16)
    batch = step.q.shape[0]
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
    table = cache.indices.view(batch, cache.pages)
    lengths = torch.full((batch,), step.length, dtype=torch.int32, device="cuda").view(torch.uint32)
    out = torch.empty_like(step.q)

    def run() -> Tensor:
        cache.append(flashinfer)
        flashinfer.decode.xqa_batch_decode_with_kv_cache(
            step.q,
            cache.pools,
            workspace,
            table,
            lengths,
            cache.pages * PAGE,
            bmm1_scale=step.problem.scale,
            bmm2_scale=1.0,
            out=out,
            kv_layout="HND",
        )
        return out

    return [Contender("XQA, bf16", run, cache.counts, {"series": "XQA, bf16"})]
