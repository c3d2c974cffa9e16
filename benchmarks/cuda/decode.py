"""Whole decode steps on a GPU, the append included, at many settings and beside other kernels, in one run.

    python benchmarks/cuda/decode.py --json decode.json --plot decode.png --published DIR

Each step is a captured CUDA graph on a batch of equal lengths. Before every replay the L2 is emptied by writing 256 MB
and then reading other 256 MB; contenders run in turn, each round starting with another one. Errors are against fp64 on
request 0. Synthetic data has logits of standard deviation 3 nats, a sink at key 0 that holds about half of the mass,
and queries that share 0.8 of their direction within a group. Peers that are not installed are left out: FlashInfer and
XQA come with `flashinfer`; DIR is where `pip install --target DIR fold-attention` put the implementation of that name.
"""

import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import decode_peers as contenders
import torch
import typer
from decode_peers import Contender
from decode_plot import plot_rows
from device_timing import Captured, rotating

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


def shape_numbers(shape: str) -> dict[str, int]:
    """ "B8 S32768 H32/8 D128" """
    try:
        batch, keys, heads, dim = shape.split()
        queries, kv_heads = heads[1:].split("/")
        if (batch[0], keys[0], heads[0], dim[0]) != ("B", "S", "H", "D"):
            raise ValueError
        numbers = [int(x) for x in (batch[1:], keys[1:], queries, kv_heads, dim[1:])]
    except (ValueError, IndexError):
        raise typer.BadParameter(f"{shape}; allowed: as in {SHAPES[0]!r}") from None
    return dict(zip(("batch", "seqlen", "heads", "kv_heads", "head_dim"), numbers, strict=True))


def load_problem(shape: str, capture: str | None) -> DecodeProblem:
    """`seqlen` keys and one more, the step's."""
    numbers = shape_numbers(shape)
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
                about = {"error": error, "bytes": contender.bytes_read(), **contender.about}
                rows.append({"name": contender.name, **about})
        except Exception as error:
            if name.startswith("fold"):
                raise
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return graphs, rows, failures


def imported(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None


def work(
    shape: str,
    capture: str | None,
    depths: list[float | None],
    rounds: int,
    published: Path | None,
    parent: Connection,
) -> None:
    """One shape, in a process of its own: says when all is compiled and filled, and measures when told to."""
    try:
        graphs, rows, failures = prepared(load_problem(shape, capture), depths, published)
        torch.cuda.empty_cache()
        parent.send(failures)
        parent.recv()
        times = rotating(graphs, rounds)
        parent.send([row | times[row["name"]].json() for row in rows])
    except Exception:  # the parent says it
        parent.send(traceback.format_exc())


def measured(
    shapes: list[tuple[str, str | None]], jobs: int, arguments: tuple[Any, ...]
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Rows by shape, and what went wrong. `jobs` shapes are prepared side by side, since peers compile at first use;
    each is then measured while the others wait."""
    spawn = multiprocessing.get_context("spawn")
    results: dict[str, list[dict[str, Any]]] = {}
    problems_met: list[str] = []
    for first in range(0, len(shapes), jobs):
        workers = []
        for shape, capture in shapes[first : first + jobs]:
            here, there = spawn.Pipe()
            process = spawn.Process(target=work, args=(shape, capture, *arguments, there), daemon=True)
            process.start()
            there.close()
            workers.append((shape if capture is None else f"{Path(capture).stem}, {shape}", process, here))
        ready = [answer_of(here) for _, _, here in workers]
        for (name, process, here), answer in zip(workers, ready, strict=True):
            if isinstance(answer, list):
                problems_met += [f"{name}: left out: {failure}" for failure in answer]
                here.send("go")
                answer = answer_of(here)
            process.join()
            if isinstance(answer, str):
                problems_met.append(f"{name}: {answer}")
            else:
                results[name] = answer
    return results, problems_met


def answer_of(worker: Connection) -> Any:
    try:
        return worker.recv()
    except EOFError:
        return "the process ended"


def at_equal_error(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each published point our fastest setting whose error is no larger."""
    ours = [row for row in rows if row["series"].startswith("fold")]
    found = []
    for row in rows:
        if row["series"] != "published":
            continue
        fair = [x for x in ours if x["error"] <= row["error"]]
        best = min(fair, key=lambda x: x["median_us"], default=None)
        found.append(
            {
                "published": row["name"],
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
            ]
        )
    notes = [
        f"{match['published']}: {match['ratio']:.2f} of its time with {match['fold']}"
        if match["fold"]
        else f"{match['published']}: no setting has so small an error"
        for match in at_equal_error(rows)
    ]
    report.show(shape, ("", "µs", "quartiles", "error", "MB", f"of {bandwidth:g} GB/s"), lines, *notes)


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
    chosen: list[tuple[str, str | None]] = [(s, None) for s in shape or (() if capture else SHAPES)]
    for path in capture or ():
        of = problems.load_decode(Path(path)).shape
        chosen.append((f"B8 S32768 H{of['heads']}/{of['kv_heads']} D{of['head_dim']}", path))
    results, problems_met = measured(chosen, jobs, (depths, rounds, published))
    for name, rows in results.items():
        show(name, rows, bandwidth, every)
    about = report.provenance() | {
        "command": " ".join(["benchmarks/cuda/decode.py", *report.provenance()["command"].split()[1:]]),
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
    }
    if json:
        shapes = [
            {"shape": name, "rows": rows, "at_equal_error": at_equal_error(rows)} for name, rows in results.items()
        ]
        report.write_json(json, {"provenance": about, "bandwidth": bandwidth * 1e9, "shapes": shapes})
    if plot and results:
        plot_rows(plot, results)
    for problem in problems_met:
        print(problem, file=sys.stderr)
    if len(results) < len(chosen):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
