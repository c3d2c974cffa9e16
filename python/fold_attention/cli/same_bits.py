"""Shows that what may vary from call to call varies no bit: hashes of decode outputs and of gradients."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import fold_attention
from fold_attention import FoldKVCache, fold_attn_func
from fold_attention.cli.problems import DecodeProblem, TrainingProblem

SPLITS = (1, 4, 7, 33)
THREADS = (1, 2)


@dataclass
class Check:
    """One thing that is varied, and the SHA-256 of the result at each of its settings."""

    what: str
    hashes: dict[str, str]

    @property
    def equal(self) -> bool:
        return len(set(self.hashes.values())) == 1


def decode_checks(problem: DecodeProblem, depth: float | None = 12) -> list[Check]:
    """Outputs and log-sum-exps of all steps of the problem's request 0, under several ways to run them."""
    q, k, v = problem.q[:, 0], problem.k[0].transpose(0, 1), problem.v[0].transpose(0, 1)
    length = k.shape[0]

    def cache(position: int = 0, batch: int = 1, page_size: int = 256, chunk: int = length) -> FoldKVCache:
        """The request at a position of a batch; the neighbours' keys are fewer, and in another order."""
        heads, kv_heads, dim = q.shape[1], k.shape[1], k.shape[2]
        made = FoldKVCache(batch, heads, kv_heads, dim, length, page_size=page_size, softmax_scale=problem.scale)
        for index, request in enumerate(made.requests):
            fewer = length - 99 * (index + 1)
            keys, values = (k, v) if index == position else (k[:fewer].flip(0), v[-fewer:])
            for first in range(0, len(keys), chunk):
                rows = slice(first, first + chunk)
                made.write_prompt(keys[None, rows], values[None, rows], ids=[request])
        return made

    def run(cache: FoldKVCache, position: int = 0, splits: int = 0) -> str:
        table, lengths = cache.tables()
        results = []
        for step, n in enumerate(problem.lengths):
            seqlens = lengths.clone()
            seqlens[position] = n
            queries = q[step].expand(len(lengths), *q.shape[1:])
            out, lse = cache.attend(
                queries,
                block_table=table,
                cache_seqlens=seqlens,
                depth=depth,
                splits=splits,
                out_dtype=torch.float32,
                return_lse=True,
            )
            results += [out[position], lse[position]]
        return sha256(*results)

    alone = cache()
    return [
        Check("splits of the keys", {str(n): run(alone, splits=n) for n in SPLITS}),
        Check("threads", {str(n): hashed for n, hashed in _over_threads(lambda: run(alone, splits=4))}),
        Check(
            "place in a batch",
            {"alone": run(alone)} | {f"{i + 1} of 5": run(cache(i, 5), i) for i in (0, 2, 4)},
        ),
        Check("keys a page", {str(n): run(cache(page_size=n)) for n in (64, 256, 1024)}),
        Check("prompt in chunks of", {str(n): run(cache(chunk=n)) for n in (1000, 4096)} | {"whole": run(alone)}),
    ]


def training_checks(problem: TrainingProblem) -> list[Check]:
    """Output and gradients of the problem's sequence 0."""

    def run(position: int = 0, batch: int = 1) -> str:
        g = torch.Generator().manual_seed(0)
        inputs = []
        for x in (problem.q, problem.k, problem.v, problem.dout):
            rows = torch.randn(batch, *x.shape[1:], generator=g).to(x.dtype)
            rows[position] = x[0]
            inputs.append(rows)
        q, k, v, dout = inputs
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = fold_attn_func(q, k, v, causal=problem.causal, softmax_scale=problem.scale)
        gradients = torch.autograd.grad(out, leaves, dout)
        return sha256(out[position].detach(), *(x[position] for x in gradients))

    return [
        Check("gradients: threads", {str(n): hashed for n, hashed in _over_threads(run)}),
        Check("gradients: place in a batch", {"alone": run()} | {f"{i + 1} of 3": run(i, 3) for i in (0, 2)}),
    ]


def sha256(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _over_threads(run: Callable[[], str]) -> Iterator[tuple[int, str]]:
    for threads in THREADS:
        with _threads(threads):
            yield threads, run()


@contextmanager
def _threads(threads: int) -> Iterator[None]:
    before = fold_attention.get_num_threads()
    fold_attention.set_num_threads(threads)
    try:
        yield
    finally:
        fold_attention.set_num_threads(before)
