"""Whole decode steps on a GPU, the append included, at many settings and beside other kernels, in one run.

    python benchmarks/cuda/decode.py --json decode.json --plot decode.png --published DIR

Each step is a captured CUDA graph on a batch of equal lengths. Before every replay the L2 is emptied by writing 256 MB
and then reading other 256 MB; contenders run in turn, each round starting with another one. Errors are against fp64 on
request 0. Synthetic data has logits of standard deviation 3 nats, a sink at key 0 that holds about half of the mass,
and queries that share 0.8 of their direction within a group. Peers that are not installed are left out: FlashInfer and
XQA come with `flashinfer`; DIR is where `pip install --target DIR fold-attention` put the implementation of that name.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import decode_peers as contenders
import peers
import shapes
import torch
import typer
from decode_peers import Contender
from decode_plot import plot_rows
from device_timing import Captured, rotating
from side_by_side import measured

from fold_attention.cli import options, problems, report
from fold_attention.cli.problems import DecodeProblem, relative_error

SHAPES = (
    "B8 S32768 H32/8 D128",
    "B32 S8192 H32/8 D128",
    "B1 S32768 H32/8 D128",
    "B1 S131072 H32/8 D128",
    "B8 S32768 H64/8 D128",
    "B8 S32768 H64/8 D64",
    "B4 S32768 H96/8 D128",
    "B64 S2048 H32/8 D128",
    "B256 S1024 H32/8 D128",
)
DEPTHS = (None, *(x / 2 for x in range(40, 15, -1)))  # 20, 19.5, ... 8
CACHES: tuple[tuple[int | tuple[int, int], bool], ...] = ((16, True), (16, False), ((16, 8), True), (8, True))
PUBLISHED_DEPTHS = (None, 16.0, 12.0)


def load_problem(shape: str, capture: str | None) -> DecodeProblem:
    """`seqlen` keys and one more, the step's."""
    numbers = shapes.numbers(shape)
    if capture is None:
        return problems.synthetic_decode(**(numbers | {"seqlen": numbers["seqlen"] + 1, "steps": 1}), device="cuda")
    problem = problems.load_decode(Path(capture), numbers["batch"], numbers["seqlen"] + 1)
    q, k, v = (x.cuda() for x in (problem.q[:1], problem.k, problem.v))
    return DecodeProblem(problem.name, q, k, v, problem.lengths[:1], problem.scale)


def makers(
    step: contenders.Step, depths: list[float | None], published: Path | None
) -> Iterator[tuple[str, Callable[[], Iterable[Contender]]]]:
    """Who takes part, and how it is made."""
    for bits, tail in CACHES:
        yield f"fold, {bits} bits", partial(contenders.fold, step, bits, tail, depths)
    if published is not None:
        for depth in PUBLISHED_DEPTHS:
            yield f"published, depth {depth}", partial(contenders.published, step, published, depth)
    if (flashinfer := imported("flashinfer")) is not None:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            yield f"FlashInfer, {dtype}", partial(contenders.flashinfer_decode, step, flashinfer, dtype)
        yield "XQA", partial(contenders.xqa, step, flashinfer)


def prepared(
    problem: DecodeProblem, depths: list[float | None], published: Path | None
) -> tuple[dict[str, Captured], list[dict[str, Any]], list[str]]:
    """Graphs by name, what is known of them before they are timed, and which peers could not be run."""
    step = contenders.Step(problem)
    expected = problem.expected(0)
    graphs: dict[str, Captured] = {}
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for name, make in makers(step, depths, published):
        try:
            for contender in make():
                graphs[contender.name] = Captured(contender.run)
                error = relative_error(contender.run()[0], expected)
                about = {"error": error, **contender.counts(), **contender.about}
                rows.append({"name": contender.name, **about})
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return graphs, rows, failures


def imported(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None


def work(
    shape: str, capture: str | None, depths: list[float | None], rounds: int, published: Path | None
) -> Iterator[list[Any]]:
    """For `measured`: the contenders of one shape."""
    graphs, rows, failures = prepared(load_problem(shape, capture), depths, published)
    torch.cuda.empty_cache()
    yield failures
    times = rotating(graphs, rounds)
    yield [row | times[row["name"]].json() for row in rows]


def at_equal_error(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each peer our fastest setting whose error is no larger, and for an fp8 cache the fastest one as small whose
    error is at most a tenth."""
    ours = [row for row in rows if row["series"].startswith("fold")]
    small = [row for row in ours if row["series"].startswith("fold, 8 bits")]
    found = []
    for row in rows:
        if row["series"].startswith("fold"):
            continue
        rivals = [(ours, 1.0)] + ([(small, 0.1)] if "fp8" in row["series"] else [])
        for candidates, factor in rivals:
            fair = [x for x in candidates if x["error"] <= factor * row["error"]]
            best = min(fair, key=lambda x: x["median_us"], default=None)
            found.append(
                {
                    "peer": row["name"],
                    "error_factor": factor,
                    "fold": best and best["name"],
                    "ratio": best and best["median_us"] / row["median_us"],
                }
            )
    return found


def show(shape: str, rows: list[dict[str, Any]], bandwidth: float, every: bool) -> None:
    lines = []
    for row in rows:
        if not every and row["series"].startswith("fold") and row["depth"] not in (None, 20, 16, 14, 12, 10):
            continue
        speed = row["bytes"] / row["median_us"] * 1e-3  # GB/s
        lines.append(
            [
                row["name"],
                f"{row['median_us']:.1f}",
                f"{row['q1_us']:.1f}-{row['q3_us']:.1f}",
                f"{row['error']:.1e}",
                f"{row['bytes'] / 1e6:.0f}",
                f"{speed / bandwidth:.0%}",
                str(row.get("recomputed", "")),
            ]
        )
    notes = []
    for match in at_equal_error(rows):
        peer = match["peer"] + ("" if match["error_factor"] == 1 else f", {match['error_factor']:g} of its error")
        found = f"{match['ratio']:.2f} of its time with {match['fold']}" if match["fold"] else "no setting is as exact"
        notes.append(f"{peer}: {found}")
    report.show(shape, ("", "µs", "quartiles", "error", "MB", f"of {bandwidth:g} GB/s", "rows again"), lines, *notes)


def main(
    shape: Annotated[list[str] | None, typer.Option(help="As in 'B8 S32768 H32/8 D128'. May be repeated.")] = None,
    capture: Annotated[
        list[str] | None,
        typer.Option(
            help="Decode captures, their keys repeated: each in batches of 8 with 32768 keys. May be repeated."
        ),
    ] = None,
    depth: Annotated[list[str] | None, typer.Option(help="A number or none. May be repeated.")] = None,
    published: Annotated[Path | None, typer.Option(help="Where fold-attention of PyPI was installed to.")] = None,
    rounds: options.Rounds = 31,
    jobs: Annotated[int, typer.Option(help="Shapes prepared side by side.", min=1)] = 3,
    bandwidth: Annotated[float, typer.Option(help="GB/s that the memory reads at best, to compare with.")] = 4200,
    every: Annotated[bool, typer.Option("--every", help="Print every depth.")] = False,
    json: options.Json = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw latency against error here.")] = None,
) -> None:
    """Time decode steps of this library and of its peers on the current GPU."""
    depths = [options.parse_depth(text) for text in depth] if depth else list(DEPTHS)
    tasks: dict[str, tuple[Any, ...]] = {}
    for text in shape or (() if capture else SHAPES):
        tasks[text] = (text, None, depths, rounds, published)
    for path in capture or ():
        of = problems.load_decode(Path(path)).shape
        text = f"B8 S32768 H{of['heads']}/{of['kv_heads']} D{of['head_dim']}"
        tasks[f"{Path(path).stem}, {text}"] = (text, path, depths, rounds, published)
    results: dict[str, list[dict[str, Any]]] = {}
    found: list[dict[str, Any]] = []
    problems_met: list[str] = []
    about = peers.provenance("decode.py", published)
    for name, rows, met in measured(work, tasks, jobs):
        problems_met += met
        if rows:
            results[name] = rows
            show(name, rows, bandwidth, every)
            found.append({"shape": name, "rows": rows, "at_equal_error": at_equal_error(rows)})
        if json:  # after every shape, since a run is long
            report.write_json(json, {"provenance": about, "bandwidth": bandwidth * 1e9, "shapes": found})
    if plot and results:
        plot_rows(plot, results)
    for problem in problems_met:
        print(problem, file=sys.stderr)
    if problems_met:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
