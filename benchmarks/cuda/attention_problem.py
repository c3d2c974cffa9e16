"""What attention.py measures: whole sequences, causal, full or packed, and their fp64 reference."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import shapes
import torch
import typer
from torch import Tensor

KINDS = ("causal", "full", "packed")
BYTES_A_TOKEN = 4


@dataclass
class Problem:
    """Self-attention, with the gradient of its output. q and dout (B, S, H, D), k and v (B, S, HK, D); packed: without
    the first axis."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool
    lengths: list[int]  # of the sequences
    starts: Tensor | None = None  # (sequences + 1,) int32, where they are packed

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def product(self) -> float:
        """Operations of one product over the pairs that are seen."""
        pairs = sum(n * n for n in self.lengths) / (2 if self.causal else 1)
        return 2.0 * self.q.shape[-2] * self.q.shape[-1] * pairs


def make(text: str) -> Problem:
    """Normal q, k, v and gradient in bf16, at a shape and a kind: "B1 S8192 H32/8 D128 full"; causal by default."""
    shape, kind = text, "causal"
    if not text.split()[-1].startswith("D"):
        shape, kind = text.rsplit(maxsplit=1)
    if kind not in KINDS:
        raise typer.BadParameter(f"{kind}; allowed: {', '.join(KINDS)}")
    of = shapes.numbers(shape)
    batch, rows = of["batch"], of["seqlen"]
    leading = (batch * rows,) if kind == "packed" else (batch, rows)
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(*leading, of[heads], of["head_dim"], generator=g, dtype=torch.bfloat16, device="cuda")
        for heads in ("heads", "kv_heads", "kv_heads", "heads")
    )
    lengths, starts = [rows] * batch, None
    if kind == "packed":
        lengths = documents(batch * rows)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        starts = ends.to("cuda", torch.int32)
    for x in (q, k, v):
        x.requires_grad_()
    return Problem(q, k, v, dout, kind != "full", lengths, starts)


def documents(tokens: int) -> list[int]:
    """Lengths that add up to `tokens`: those of the standard library's modules in the order of their names, four bytes
    a token, again from the first one where they are too few."""
    sizes = [path.stat().st_size for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    lengths: list[int] = []
    while tokens:
        size = sizes[len(lengths) % len(sizes)]
        lengths.append(min(tokens, max(1, size // BYTES_A_TOKEN)))
        tokens -= lengths[-1]
    return lengths


def expected(problem: Problem) -> dict[str, Tensor]:
    """fp64 out, dq, dk, dv of sequence 0 and KV head 0, with the query heads that read it: (rows, heads, D)."""
    q, k, v, dout = (first(problem, x).double() for x in (problem.q, problem.k, problem.v, problem.dout))
    scale = 1 / math.sqrt(q.shape[-1])
    keys, values = k[:, 0], v[:, 0]
    outs, dqs = [], []
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for rows, gradient in zip(q.unbind(1), dout.unbind(1), strict=True):  # one head's logits at a time: they are large
        logits = rows @ keys.T * scale
        if problem.causal:
            logits.masked_fill_(torch.ones_like(logits, dtype=torch.bool).triu_(1), float("-inf"))
        p = torch.softmax(logits, -1)
        del logits
        outs.append(p @ values)
        dv += p.T @ gradient
        ds = gradient @ values.T
        ds.sub_((outs[-1] * gradient).sum(-1, keepdim=True)).mul_(p)
        del p
        dqs.append(ds @ keys * scale)
        dk += ds.T @ rows * scale
        del ds
    return {"out": torch.stack(outs, 1), "dq": torch.stack(dqs, 1), "dk": dk[:, None], "dv": dv[:, None]}


def first(problem: Problem, x: Tensor) -> Tensor:
    """Sequence 0, KV head 0 or the query heads that read it: (rows, heads, D)."""
    heads = x.shape[-2] // problem.k.shape[-2]
    sequence = x[: problem.lengths[0]] if problem.starts is not None else x[0]
    return sequence[:, :heads].detach()
