"""`fold-attention bench forward|backward`: whole sequences, beside torch's scaled_dot_product_attention."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from fold_attention import fold_attn_func
from fold_attention.cli import options, problems, report, timing
from fold_attention.cli.problems import TrainingProblem, relative_error
from fold_attention.errors import bad_value

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
LARGEST_REFERENCE = 1 << 25  # logits of the fp64 reference: 256 MiB a copy, a few of which autograd keeps
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Seqlen = Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)]
DType = Annotated[str, typer.Option(help="bfloat16, float16 or float32; synthetic data only.")]
Causal = Annotated[bool, typer.Option(help="A query sees keys up to its own; a capture is always causal.")]


def forward(
    batch: options.Batch = 1,
    seqlen: Seqlen = 2048,
    heads: options.Heads = 8,
    kv_heads: options.KVHeads = 8,
    head_dim: options.HeadDim = 128,
    dtype: DType = "bfloat16",
    causal: Causal = True,
    data: options.Data = "synthetic",
    threads: options.Threads = None,
    rounds: options.Rounds = 7,
    json: options.Json = None,
) -> None:
    """Time the forward pass over whole sequences, this library and torch in turn.

    The error is the norm of the difference to fp64 over the norm of the result, on KV head 0 of sequence 0 where that
    reference is small enough. TFLOP/s counts the two products over the pairs that are seen (half of them if causal).
    """
    problem = _problem(batch, seqlen, heads, kv_heads, head_dim, dtype, causal, data)
    contenders = _contenders(problem)

    def run(attention: Attention, _: int) -> Tensor:
        with torch.no_grad():
            return attention(problem.q, problem.k, problem.v)

    runs = {name: partial(run, attention) for name, attention in contenders.items()}
    _bench("forward", problem, runs, threads, rounds, json)


def backward(
    batch: options.Batch = 1,
    seqlen: Seqlen = 2048,
    heads: options.Heads = 8,
    kv_heads: options.KVHeads = 8,
    head_dim: options.HeadDim = 128,
    dtype: DType = "bfloat16",
    causal: Causal = True,
    data: options.Data = "synthetic",
    threads: options.Threads = None,
    rounds: options.Rounds = 7,
    json: options.Json = None,
) -> None:
    """Time the gradients of q, k and v, this library and torch in turn; the forward pass is not timed.

    Errors as for `forward`, for each gradient. TFLOP/s counts five products over the pairs that are seen.
    """
    problem = _problem(batch, seqlen, heads, kv_heads, head_dim, dtype, causal, data)
    leaves = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]

    def run(out: Tensor, _: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, problem.dout, retain_graph=True)

    contenders = _contenders(problem)
    runs = {name: partial(run, attention(problem.q, problem.k, problem.v)) for name, attention in contenders.items()}
    _bench("backward", problem, runs, threads, rounds, json)


def _problem(
    batch: int, seqlen: int, heads: int, kv_heads: int, head_dim: int, dtype: str, causal: bool, data: str
) -> TrainingProblem:
    if dtype not in DTYPES:
        raise bad_value("--dtype", dtype, f"allowed: {', '.join(DTYPES)}")
    path = options.capture_path(data, problems.SHIPPED_TRAINING)
    if path is None:
        return problems.synthetic_training(batch, seqlen, heads, kv_heads, head_dim, DTYPES[dtype], causal)
    return problems.load_training(path, batch)


def _contenders(problem: TrainingProblem) -> dict[str, Attention]:
    """q (B, S, H, D), k and v (B, S, HK, D) -> (B, S, H, D)."""
    grouped = problem.q.shape[2] != problem.k.shape[2]

    def fold(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = fold_attn_func(q, k, v, causal=problem.causal, softmax_scale=problem.scale)
        return out

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, scale=problem.scale, enable_gqa=grouped)
        return out.transpose(1, 2)

    return {"fold": fold, "torch SDPA": sdpa}


def _bench(
    what: str,
    problem: TrainingProblem,
    runs: Mapping[str, Callable[[int], Any]],
    threads: int | None,
    rounds: int,
    json: Any,
) -> None:
    used = timing.use_threads(threads)
    expected = _expected(what, problem)
    rows: dict[str, dict[str, Any]] = {
        name: {"name": name, "errors": _errors(what, run(0), expected)} for name, run in runs.items()
    }
    with report.progress() as bar:
        task = bar.add_task("Rounds", total=(rounds + 1) * len(runs))
        times = timing.rotating(runs, rounds, advance=lambda: bar.advance(task))
    b, s, h, d = problem.q.shape
    operations = (4 if what == "forward" else 10) * b * h * s * s * d / (2 if problem.causal else 1)
    for name, row in rows.items():
        row |= times[name].json()
        row["flops"] = operations / row["median_s"]
        row["speedup_over_torch"] = times["torch SDPA"].median / row["median_s"]
    results: dict[str, Any] = {
        "provenance": report.provenance(),
        "problem": {
            "name": problem.name,
            "what": what,
            "shape": {"batch": b, "seqlen": s, "heads": h, "kv_heads": problem.k.shape[2], "head_dim": d},
            "dtype": str(problem.q.dtype).removeprefix("torch."),
            "causal": problem.causal,
        },
        "rows": list(rows.values()),
    }
    if json:
        report.write_json(json, results)
    title = (
        f"{what.capitalize()}, {problem.name}: batch {b}, {s} tokens, heads {h}/{problem.k.shape[2]}, head dim {d}, "
        f"{results['problem']['dtype']}{', causal' if problem.causal else ''}, {used} thread(s)"
    )
    names = list(next(iter(rows.values()))["errors"])
    lines = [
        [
            row["name"],
            f"{row['median_s'] * 1e3:,.1f}",
            f"{row['q1_s'] * 1e3:,.1f}-{row['q3_s'] * 1e3:,.1f}",
            f"{row['flops'] / 1e12:.3f}",
            f"{row['speedup_over_torch']:.2f}x",
            *(f"{row['errors'][name]:.1e}" for name in names),
        ]
        for row in rows.values()
    ]
    columns = ("", "ms", "quartiles", "TFLOP/s", "over torch", *(f"error {name}" for name in names))
    report.show(title, columns, lines, report.machine(results["provenance"]))


def _group(problem: TrainingProblem) -> int:
    """Query heads that read KV head 0."""
    return problem.q.shape[2] // problem.k.shape[2]


def _expected(what: str, problem: TrainingProblem) -> dict[str, Tensor]:
    """fp64 results of KV head 0 of sequence 0 and its query heads; empty where they would take too much memory."""
    s, group = problem.q.shape[1], _group(problem)
    if s * s * group > LARGEST_REFERENCE:
        return {}
    q, k, v, dout = (
        x[0].detach().double()[:, :n].transpose(0, 1)
        for x, n in ((problem.q, group), (problem.k, 1), (problem.v, 1), (problem.dout, group))
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    logits = q @ k.mT * problem.scale
    if problem.causal:
        logits = logits.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.softmax(logits, -1) @ v
    if what == "forward":
        return {"out": out.detach().transpose(0, 1)}
    gradients = torch.autograd.grad(out, leaves, dout)
    return {name: x.transpose(0, 1) for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)}


def _errors(what: str, got: Any, expected: dict[str, Tensor]) -> dict[str, float]:
    results = (got,) if what == "forward" else got
    return {
        name: relative_error(result[0, :, : reference.shape[1]].detach(), reference)
        for (name, reference), result in zip(expected.items(), results, strict=False)
    }
