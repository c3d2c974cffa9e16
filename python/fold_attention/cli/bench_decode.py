"""`fold-attention bench decode`: one step at any shape, beside torch, with the memory's own speed as the measure."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from fold_attention.cli import options, peers, problems, report, timing
from fold_attention.cli.fold_decode import FoldDecode, bf16_bytes, peer_step
from fold_attention.cli.problems import DecodeProblem, relative_error

PLAIN = next(iter(peers.DECODE))


def decode(
    batch: options.Batch = 1,
    seqlen: Annotated[
        int | None, typer.Option(help="Keys a request holds; default 32768, or a capture's.", min=1)
    ] = None,
    heads: options.Heads = 32,
    kv_heads: options.KVHeads = 8,
    head_dim: options.HeadDim = 128,
    depth: Annotated[
        list[str] | None,
        typer.Option(help='Depths to run, in log2 below the row\'s mass; "none" reads every value. May be repeated.'),
    ] = None,
    bits: Annotated[list[int] | None, typer.Option(help="Bits of K and V to run: 16, 8, 4. May be repeated.")] = None,
    tail: Annotated[bool, typer.Option(help="Keep the model that stands in for values that are not read.")] = True,
    data: options.Data = "synthetic",
    threads: options.Threads = None,
    rounds: options.Rounds = 9,
    cold: options.Cold = True,
    json: options.Json = None,
) -> None:
    """Time one decode step: this library at each depth and bit width, and torch on a bf16 cache.

    Synthetic data has logits of standard deviation 3 nats, a sink at key 0 and queries that are alike within a group; a
    capture's keys are repeated to --seqlen. All contenders run once a round, in rotating order; times are medians with
    quartiles. "best torch" is the fastest of torch's formulations in this run. GB/s counts the bytes a step needs (what
    the gates asked for; for torch the bf16 cache once) and is set against the read bandwidth measured in this run. The
    error is the norm of the difference to fp64 over the norm of the result, for request 0.
    """
    used = timing.use_threads(threads)
    depths = [options.parse_depth(text) for text in depth or ["none", "16", "12"]]
    path = options.capture_path(data, problems.SHIPPED_DECODE)
    if path is None:
        problem = problems.synthetic_decode(batch, seqlen or 32768, heads, kv_heads, head_dim)
    else:
        problem = problems.load_decode(path, batch, seqlen)
    bandwidth = timing.read_bandwidth()
    runs, rows = _contenders(problem, depths, bits or [16], tail)
    with report.progress() as bar:
        task = bar.add_task("Rounds", total=(rounds + 1) * len(runs))
        times = timing.rotating(runs, rounds, cold, lambda: bar.advance(task))
    for name, row in rows.items():
        if name in times:
            row |= times[name].json()
            row["bandwidth"] = row["bytes"] / row["median_s"]
            row["of_read_bandwidth"] = row["bandwidth"] / bandwidth
    best = min(rows[name]["median_s"] for name in peers.DECODE)
    for row in rows.values():
        if "median_s" in row:
            row["speedup_over_best_torch"] = best / row["median_s"]
            row["speedup_over_plain_torch"] = rows[PLAIN]["median_s"] / row["median_s"]
    results = {
        "provenance": report.provenance(),
        "problem": {"name": problem.name, **problem.shape, "scale": problem.scale, "cold": cold},
        "read_bandwidth": bandwidth,
        "rows": list(rows.values()),
    }
    if json:
        report.write_json(json, results)
    _print(results, used)


def _contenders(
    problem: DecodeProblem, depths: list[float | None], bits: list[int], tail: bool
) -> tuple[dict[str, Callable[[int], Any]], dict[str, dict[str, Any]]]:
    """What is timed, and what else is known of each, by name."""
    steps = len(problem.lengths)
    expected = problem.expected(0)
    whole = sum(bf16_bytes(problem, step) for step in range(steps)) / steps
    runs: dict[str, Callable[[int], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for width in bits:
        fold = FoldDecode(problem, width, tail)
        for depth in depths:
            name = f"fold, {width} bits, depth {'none' if depth is None else format(depth, 'g')}"
            results = [fold(step, depth, return_info=True) for step in range(steps)]
            needed = sum(int(info["bytes_read"].sum()) for _, info in results) / steps
            runs[name] = partial(_step, steps, partial(fold, depth=depth))
            rows[name] = {
                "name": name,
                "bits": width,
                "depth": depth,
                "tail": tail,
                "error": relative_error(results[0][0][0], expected),
                "bytes": needed,
                "bytes_read": needed / whole,
                "dropped_mass": float(results[0][1]["dropped_mass"].mean()),
            }
    for name, attention in peers.DECODE.items():
        runs[name] = partial(_step, steps, partial(peer_step, attention, problem))
        rows[name] = {
            "name": name,
            "error": relative_error(runs[name](0)[0], expected),
            "bytes": whole,
            "bytes_read": 1.0,
        }
    fp8 = relative_error(peer_step(peers.sdpa_folded, problem.fp8(), 0)[0], expected)
    rows["fp8"] = {"name": "fp8 cache (E4M3, scale 1)", "error": fp8, "bytes_read": 0.5}
    return runs, rows


def _step(steps: int, run: Callable[[int], Any], index: int) -> Any:
    return run(index % steps)


def _print(results: dict[str, Any], threads: int) -> None:
    problem = results["problem"]
    title = (
        f"Decode, {problem['name']}: batch {problem['batch']}, heads {problem['heads']}/{problem['kv_heads']}, "
        f"head dim {problem['head_dim']}, {problem['keys']} keys, {threads} thread(s), "
        + ("cold" if problem["cold"] else "warm")
    )
    columns = ("", "µs", "quartiles", "best torch", "plain torch", "GB/s", "of read", "bytes read", "error")
    lines = []
    for row in results["rows"]:
        timed = [""] * 6
        if "median_s" in row:
            low, high = report.microseconds(row["q1_s"]), report.microseconds(row["q3_s"])
            timed = [
                report.microseconds(row["median_s"]),
                f"{low}-{high}",
                f"{row['speedup_over_best_torch']:.2f}x",
                f"{row['speedup_over_plain_torch']:.1f}x",
                f"{row['bandwidth'] / 1e9:.1f}",
                f"{row['of_read_bandwidth']:.0%}",
            ]
        lines.append([row["name"], *timed, f"{row['bytes_read']:.3f}", f"{row['error']:.1e}"])
    report.show(
        title,
        columns,
        lines,
        report.machine(results["provenance"]),
        f"Read bandwidth: {results['read_bandwidth'] / 1e9:.1f} GB/s. best torch, plain torch: how many times faster",
        "than the fastest torch formulation, and than scaled_dot_product_attention(enable_gqa=True).",
    )
