"""Training attention on a GPU, forward and backward, beside other kernels in one run.

    python benchmarks/cuda/attention.py --published DIR --json attention.json --plot attention.png

A contender's forward and its backward are captured CUDA graphs. Before each replay the L2 is emptied by writing 256 MB
and then reading other 256 MB; contenders run in turn, each round starting with another one. TFLOP/s counts the two
products of the forward and the five of the backward over the pairs that are seen (half of them if causal). Errors are
against fp64 on sequence 0 and KV head 0. Peers that are not installed are left out: FlashAttention-4 is `flash-attn-4`;
DIR is where `pip install --target DIR fold-attention` put the implementation of that name, whose forward is
FlashAttention-4's; torch is `scaled_dot_product_attention` with its cuDNN kernels, which take no packed sequences.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import attention_problem
import peers
import torch
import typer
from attention_peers import Contender, contenders
from attention_plot import plot_rows
from attention_problem import Problem
from device_timing import Captured, rotating
from side_by_side import measured

from fold_attention.cli import options, report
from fold_attention.cli.problems import relative_error

SHAPES = (
    "B1 S8192 H32/32 D128",
    "B1 S8192 H32/8 D128",
    "B2 S8192 H32/8 D128",
    "B1 S16384 H32/8 D128",
    "B4 S4096 H32/32 D64",
    "B4 S4096 H64/8 D64",
    "B1 S2048 H8/2 D128",
    "B8 S2048 H32/32 D128",
    "B1 S8192 H16/16 D128",
    "B1 S8192 H32/32 D128 full",
    "B4 S4096 H32/32 D64 full",
    "B1 S32768 H32/8 D128 packed",
)
PRODUCTS = {"forward": 2, "backward": 5}


def work(shape: str, rounds: int, published: Path | None, backward: bool) -> Iterator[list[Any]]:
    """For `measured`: the contenders of one shape."""
    problem = attention_problem.make(shape)
    reference = attention_problem.expected(problem)
    if not backward:
        reference = {"out": reference["out"]}
    graphs: dict[tuple[str, str], Captured] = {}
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for contender in contenders(problem, published):
        if not (backward or contender.forward):
            continue
        try:
            captured, errors = _captured(contender, problem, reference, stream)
        except Exception as error:
            failures.append(f"{contender.name}: {type(error).__name__}: {error}")
            continue
        graphs |= {(contender.name, direction): graph for direction, graph in captured.items()}
        rows.append({"name": contender.name, "deterministic": contender.deterministic, "errors": errors})
    yield failures
    times = rotating(graphs, rounds)
    for row in rows:
        for direction, products in PRODUCTS.items():
            if (timing := times.get((row["name"], direction))) is not None:
                row[direction] = timing.json() | {"tflops": products * problem.product / timing.median * 1e-6}
    yield rows


def _captured(
    contender: Contender, problem: Problem, reference: dict[str, torch.Tensor], stream: torch.cuda.Stream
) -> tuple[dict[str, Captured], dict[str, float]]:
    """Graphs by direction, and errors of what they compute."""
    graphs = {}
    if contender.forward:
        with torch.no_grad():
            graphs["forward"] = Captured(contender.run, stream)
    if len(reference) == 1:
        graphs["forward"].replay()
        results = [graphs["forward"].result]
    else:
        with torch.cuda.stream(stream):
            out = contender.run()
        gradient = functools.partial(torch.autograd.grad, out, problem.leaves, problem.dout, retain_graph=True)
        graphs["backward"] = Captured(gradient, stream)
        graphs["backward"].replay()
        results = [out, *graphs["backward"].result]
    errors = {
        name: relative_error(attention_problem.first(problem, x), exact)
        for (name, exact), x in zip(reference.items(), results, strict=True)
    }
    return graphs, errors


def show(shape: str, rows: list[dict[str, Any]]) -> None:
    lines = [
        [
            row["name"],
            *(
                text
                for direction in PRODUCTS
                for text in (
                    (f"{row[direction]['median_us']:,.1f}", f"{row[direction]['tflops']:.0f}")
                    if direction in row
                    else ("", "")
                )
            ),
            *(f"{error:.2e}" for error in row["errors"].values()),
        ]
        for row in rows
    ]
    errors = [f"error {name}" for name in rows[0]["errors"]]
    report.show(shape, ("", "forward µs", "TFLOP/s", "backward µs", "TFLOP/s", *errors), lines)


def main(
    shape: Annotated[
        list[str] | None, typer.Option(help="As in 'B1 S8192 H32/8 D128', then causal, full or packed. Repeatable.")
    ] = None,
    published: Annotated[Path | None, typer.Option(help="Where fold-attention of PyPI was installed to.")] = None,
    backward: Annotated[bool, typer.Option(help="The gradients, too; head dim 256 has none.")] = True,
    rounds: options.Rounds = 15,
    jobs: Annotated[int, typer.Option(help="Shapes prepared side by side.", min=1)] = 3,
    json: options.Json = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the throughput here.")] = None,
) -> None:
    """Time the forward and backward of this library and of its peers on the current GPU."""
    tasks = {text: (text, rounds, published, backward) for text in shape or SHAPES}
    results: dict[str, list[dict[str, Any]]] = {}
    problems: list[str] = []
    about = peers.provenance("attention.py", published)
    for name, rows, met in measured(work, tasks, jobs):
        problems += met
        if rows:
            results[name] = rows
            show(name, rows)
        if json:  # after every shape, since a run is long
            shapes = [{"shape": shape, "rows": of_shape} for shape, of_shape in results.items()]
            report.write_json(json, {"provenance": about, "shapes": shapes})
    if plot and results:
        plot_rows(plot, results)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
