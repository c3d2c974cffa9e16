"""`fold-attention demo`: a captured cache at every depth, beside torch, and the same bits however it is run."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Annotated, Any

import torch
import typer

from fold_attention.cli import demo_plot, peers, problems, report, same_bits, timing
from fold_attention.cli.fold_decode import FoldDecode, bf16_bytes, peer_step
from fold_attention.cli.problems import DecodeProblem, relative_error

DEPTHS: tuple[float | None, ...] = (None, 20, 16, 14, 12, 10)
BITS = (16, 8, 4)

#: One row of the results: a peer's name, or (bits, tail, depth).
Key = str | tuple[int, bool, float | None]


def demo(
    capture: Annotated[
        list[Path] | None,
        typer.Option(
            help="Decode captures to use, one per layer; by default the two that come with the package.", exists=True
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(help="Requests a step decodes, each with its own copy of the cache.", min=1)
    ] = 8,
    threads: Annotated[int | None, typer.Option(help="Threads, of this library and of torch.", min=1)] = None,
    output: Annotated[Path, typer.Option(help="Folder for demo.png and demo.json.", file_okay=False)] = Path("out"),
) -> None:
    """Decode a captured cache at every depth and bit width, beside torch.

    Depth is in base-2 logarithms: where a key's softmax weight is below 2^-depth of its row's mass, its value is not
    read (at depth 12, below 1/4096); "none" reads every value. Bits are what the cache keeps of an element of K and V.
    The error is the norm of the difference to an fp64 computation on the same keys, over the norm of its result.

    A step decodes one token for each request of a batch, in each captured layer; times are medians over the captured
    steps, every contender once a round, caches of the processor evicted before each run. Then the same steps run with
    other splits, threads, batches, pages and prompt chunks, and the hashes of the results are compared.
    """
    timing.use_threads(threads)
    layers = [problems.load_decode(path, batch) for path in capture or problems.SHIPPED_DECODE]
    training = [problems.load_training(path) for path in problems.SHIPPED_TRAINING]
    with report.progress() as bar:
        measured = [_layer(layer, bar) for layer in layers]
        rows = [_joined([layer[key] for layer in measured]) for key in measured[0]]
        task = bar.add_task("Same bits", total=len(layers) + len(training))
        checks: dict[str, list[same_bits.Check]] = {}
        for layer in layers:
            checks[layer.name] = same_bits.decode_checks(layer)
            bar.advance(task)
        for problem in training:
            checks[problem.name] = same_bits.training_checks(problem)
            bar.advance(task)
    results = {
        "provenance": report.provenance(),
        "layers": [{"name": layer.name, **layer.shape, "steps": len(layer.lengths)} for layer in layers],
        "rows": rows,
        "per_layer": {layer.name: list(found.values()) for layer, found in zip(layers, measured, strict=True)},
        "bf16_rounding_of_the_output": geometric_mean(_rounding(layer) for layer in layers),
        "same_bits": {name: {c.what: c.hashes for c in found} for name, found in checks.items()},
    }
    report.write_json(output / "demo.json", results)
    demo_plot.plot(results, output / "demo.png")
    _print(results, checks)
    console = report.console()
    console.print(f"Picture: {output / 'demo.png'}   numbers: {output / 'demo.json'}")
    if not all(check.equal for found in checks.values() for check in found):
        console.print("[bold red]The results above differ where they must not.[/]")
        raise typer.Exit(1)


def _layer(problem: DecodeProblem, bar: Any) -> dict[Key, dict[str, Any]]:
    """Every contender on one layer: time, bytes, error over all steps."""
    steps = len(problem.lengths)
    expected = torch.stack([problem.expected(step) for step in range(steps)])
    whole = sum(bf16_bytes(problem, step) for step in range(steps))
    runs: dict[Key, Callable[[int], Any]] = {}
    facts: dict[Key, dict[str, Any]] = {}
    element = 2 * problem.k.shape[-1]  # of K and V, per key
    task = bar.add_task(f"{problem.name}: caches", total=2 * len(BITS))
    for bits in BITS:
        for tail in (True, False):
            fold = FoldDecode(problem, bits, tail)
            for depth in DEPTHS:
                if depth is None and not tail:
                    continue  # every V is read: nothing to stand in for
                outs, infos = zip(*(fold(step, depth, return_info=True) for step in range(steps)), strict=True)
                runs[bits, tail, depth] = partial(fold, depth=depth)
                facts[bits, tail, depth] = {
                    "name": "fold",
                    "bits": bits,
                    "tail": tail,
                    "depth": depth,
                    "error": relative_error(torch.stack([out[0] for out in outs]), expected),
                    "bytes_read": sum(int(info["bytes_read"].sum()) for info in infos) / whole,
                    "values_read": fmean(float(info["kept_fraction"].mean()) for info in infos),
                    "dropped_mass": fmean(float(info["dropped_mass"].mean()) for info in infos),
                    "cache_bytes_per_key": fold.bytes_per_key,
                }
            bar.advance(task)
    for name, attention in peers.DECODE.items():
        runs[name] = partial(peer_step, attention, problem)
        facts[name] = {"name": name, "error": _peer_error(attention, problem, expected)}
        facts[name] |= {"bytes_read": 1.0, "cache_bytes_per_key": 2.0 * element}
    facts["fp8"] = {
        "name": "fp8 cache (E4M3, scale 1)",
        "error": _peer_error(peers.sdpa_folded, problem.fp8(), expected),
        "bytes_read": 0.5,
        "cache_bytes_per_key": 1.0 * element,
    }
    task = bar.add_task(f"{problem.name}: {steps} steps", total=(steps + 1) * len(runs))
    times = timing.rotating(runs, steps, advance=lambda: bar.advance(task))
    return {key: fact | (times[key].json() if key in times else {}) for key, fact in facts.items()}


def _peer_error(attention: Any, problem: DecodeProblem, expected: torch.Tensor) -> float:
    outs = [peer_step(attention, problem, step)[0] for step in range(len(problem.lengths))]
    return relative_error(torch.stack(outs), expected)


def _rounding(problem: DecodeProblem) -> float:
    """What rounding the exact output to bf16 costs: the peers' results are bf16."""
    expected = torch.stack([problem.expected(step) for step in range(len(problem.lengths))])
    return relative_error(expected.bfloat16(), expected)


def _joined(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Layers one after the other: times add, errors as their geometric mean, shares as their mean."""
    joined = dict(layers[0])
    for name in ("median_s", "q1_s", "q3_s"):
        if name in joined:
            joined[name] = sum(layer[name] for layer in layers)
    for name in ("bytes_read", "values_read", "dropped_mass", "cache_bytes_per_key"):
        if name in joined:
            joined[name] = fmean(layer[name] for layer in layers)
    joined["error"] = geometric_mean(layer["error"] for layer in layers)
    return joined


def _print(results: dict[str, Any], checks: dict[str, list[same_bits.Check]]) -> None:
    layers, rows = results["layers"], results["rows"]
    shape = layers[0]
    without_tail = {(row["bits"], row["depth"]): row for row in rows if row.get("tail") is False}
    lines: list[Sequence[str]] = []
    for row in rows:
        if row.get("tail") is False:
            continue
        cells = [row["name"], "", "", _spread(row), f"{row['bytes_read']:.3f}", f"{row['cache_bytes_per_key']:.0f}"]
        cells += ["", f"{row['error']:.1e}", ""]
        if "bits" in row:
            depth = row["depth"]
            bare = without_tail.get((row["bits"], depth))
            cells[1:3] = [str(row["bits"]), "none" if depth is None else f"{depth:g}"]
            cells[6] = f"{row['dropped_mass']:.4f}"
            cells[8] = f"{bare['error']:.1e}" if bare else ""
            if depth is None:
                lines.append(())
        elif row["name"] == next(iter(peers.DECODE)):
            lines.append(())
        lines.append(cells)
    names = ", ".join(layer["name"] for layer in layers)
    report.show(
        f"One decode step over {names}: batch {shape['batch']}, heads {shape['heads']}/{shape['kv_heads']}, "
        f"head dim {shape['head_dim']}, {shape['keys']} keys",
        ("", "bits", "depth", "µs (quartiles)", "bytes read", "B/key", "dropped mass", "error", "no tail"),
        lines,
        report.machine(results["provenance"]),
        "bytes read: share of a bf16 cache's. B/key: memory of one key and value in one KV head. dropped mass: softmax",
        "weight of the values not read. error: against fp64; fold's output is fp32, torch's is bf16, and that rounding",
        f"alone is {results['bf16_rounding_of_the_output']:.1e}. no tail: without what stands in for unread values.",
        "fp8: error only, torch has no fp8 attention on a CPU. Layers: times add, errors are geometric means.",
    )
    hashes = [
        (name, check.what, ", ".join(check.hashes), _hash(check)) for name, found in checks.items() for check in found
    ]
    title = "The same bits: SHA-256 of all outputs and log-sum-exps (depth 12), or of outputs and gradients"
    report.show(title, ("", "what varies", "settings", "SHA-256"), hashes)


def _hash(check: same_bits.Check) -> str:
    if check.equal:
        return f"{next(iter(check.hashes.values()))[:16]} [green]equal[/]"
    return "[bold red]" + " ".join(hashed[:8] for hashed in check.hashes.values()) + " DIFFERENT[/]"


def _spread(row: dict[str, Any]) -> str:
    if "median_s" not in row:
        return ""
    low, middle, high = (report.microseconds(row[name]) for name in ("q1_s", "median_s", "q3_s"))
    return f"{middle} ({low}-{high})"
