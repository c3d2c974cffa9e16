"""How long the host takes to submit one decode step in eager mode: `python benchmarks/cuda/host_time.py`.

Steps are submitted in short bursts to an idle GPU, so that nobody waits for it; the median burst counts. Ways: with
block table and lengths of the caller's on the GPU, as serving engines keep them, with memory for the output or without,
with and without the append; and with requests that the cache manages, whose tables the host advances. `--profile`
prints where Python spends the time.
"""

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

from fold_attention import FoldKVCache, fold_attn_with_kvcache
from fold_attention.cli import options, report

BURST, ROUNDS = 16, 200


def host_microseconds(step: Callable[[], Any]) -> float:
    samples = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(BURST):
            step()
        samples.append((time.perf_counter() - start) / BURST)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(samples[ROUNDS // 10 :])


def main(
    batch: options.Batch = 1,
    heads: options.Heads = 32,
    kv_heads: options.KVHeads = 8,
    head_dim: options.HeadDim = 128,
    keys: Annotated[int, typer.Option(help="Keys a request holds before the first step.", min=1)] = 1000,
    depth: Annotated[str, typer.Option(help="A number or none.")] = "12",
    tail: Annotated[bool, typer.Option("--tail/--no-tail", help="With the tail model: one launch more.")] = True,
    profile: Annotated[bool, typer.Option("--profile", help="Also print a profile of the first way.")] = False,
    json: options.Json = None,
) -> None:
    """Host time of a decode step, the append included."""
    room = keys + 2 * BURST * ROUNDS
    how: dict[str, Any] = {"depth": options.parse_depth(depth), "tail": tail, "dtype": torch.bfloat16}
    cache = FoldKVCache(batch, heads, kv_heads, head_dim, room, device="cuda", **how)
    shape = {"dtype": torch.bfloat16, "device": "cuda"}
    prompt = torch.randn(batch, keys, kv_heads, head_dim, **shape)
    cache.write_prompt(prompt, prompt)
    q, k = torch.randn(batch, heads, head_dim, **shape), torch.randn(batch, kv_heads, head_dim, **shape)
    table, held = (x.clone() for x in cache.tables())
    held -= 1  # the step's key is one that has a page

    def with_tables() -> Any:
        return fold_attn_with_kvcache(q, cache, k, k, block_table=table, cache_seqlens=held)

    out = torch.empty_like(q)

    def with_out() -> Any:
        return fold_attn_with_kvcache(q, cache, k, k, block_table=table, cache_seqlens=held, out=out)

    def attend() -> Any:
        return fold_attn_with_kvcache(q, cache, block_table=table, cache_seqlens=held)

    def managed() -> Any:
        return cache.decode(q, k, k)

    ways = {
        "tables of the caller's": with_tables,
        "the same, out given": with_out,
        "the same, no append": attend,
        "managed requests": managed,
    }
    rows = {name: host_microseconds(step) for name, step in ways.items()}
    kind = "with the tail model" if tail else "without a tail model"
    report.show(
        f"Host time of a step, batch {batch}, {heads}/{kv_heads} heads of {head_dim}, {keys} keys, {kind}",
        ("", "µs"),
        [[name, f"{value:.1f}"] for name, value in rows.items()],
        report.machine(report.provenance()),
    )
    if json:
        about = report.provenance() | {"gpu": torch.cuda.get_device_name()}
        report.write_json(json, {"provenance": about, "host_us": rows})
    if profile:
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(BURST * ROUNDS):
            with_tables()
        profiler.disable()
        torch.cuda.synchronize()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    typer.run(main)
