"""Steps on a GPU outside of captures: their kernels are submitted as a graph that is kept, in a workspace that is, too.

Needs a GPU that the backend runs on; docs/cuda.md says how these tests are run there.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from cache_testing import layer
from cuda_cache_testing import GPU, LENGTHS, both, needs_gpu, same
from torch import Tensor

from fold_attention import FoldKVCache, fold_attn_with_kvcache

pytestmark = needs_gpu


def test_steps_of_several_threads_and_streams_keep_their_bits():
    """Outside of a capture a step's kernels are submitted as a graph that is kept, for calls with other parameters."""
    steps = []  # what to call, and what comes of it
    for lengths in ((1301,), (65, 257, 1024), LENGTHS):
        layers = [layer(n, 8, 2, 64, n) for n in lengths]
        q = torch.stack([x[0][-1] for x in layers])
        for tail in (True, False):
            here, there = both(lengths, layers, tail=tail)
            table, held = there.tables()
            tables: dict[str, Any] = {"block_table": table, "cache_seqlens": held}
            for depth in (None, 10.0):
                call = partial(fold_attn_with_kvcache, cache=there, depth=depth, return_lse=True, **tables)
                steps.append((call, q.to(GPU), here.attend(q, depth=depth, return_lse=True)))
    torch.cuda.synchronize()

    def work(thread: int) -> list[tuple[int, Any]]:
        order = torch.randperm(8 * len(steps), generator=torch.Generator().manual_seed(thread)) % len(steps)
        results, stream = [], torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for at in order.tolist():
                call, q, _ = steps[at]
                results.append((at, call(q.clone())))  # in memory that differs from call to call
        stream.synchronize()
        return results

    with ThreadPoolExecutor(4) as threads:
        for results in threads.map(work, range(4)):
            for at, result in results:
                same(steps[at][2], result, f"step {at}")


def test_steps_that_write_on_several_threads_keep_their_bits():
    """A cache a thread, two threads a stream: half of the caches are without the tail model, whose fit the others reach
    at 1024 keys."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    works = []  # layers, their lengths, caches on both devices, a stream
    for thread in range(4):
        lengths = (1010 + thread, 1023, 70 * thread)
        layers = [layer(1100, 8, 2, 64, 3 * thread + i) for i in range(3)]
        works.append((layers, lengths, both(lengths, layers, room=24, tail=thread < 2), streams[thread // 2]))
    torch.cuda.synchronize()

    def steps(layers: list[tuple[Tensor, ...]], lengths: tuple[int, ...], cache: FoldKVCache) -> list[Any]:
        results = []
        for token in range(20):
            rows = [torch.stack([x[i][n + token] for x, n in zip(layers, lengths, strict=True)]) for i in range(3)]
            results.append(cache.decode(*(x.to(cache.device) for x in rows), return_lse=True))
        return results

    def work(thread: int) -> list[Any]:
        layers, lengths, (_, there), stream = works[thread]
        with torch.cuda.stream(stream):
            results = steps(layers, lengths, there)
        stream.synchronize()
        return results

    with ThreadPoolExecutor(4) as threads:
        for (layers, lengths, (here, there), _), results in zip(works, threads.map(work, range(4)), strict=True):
            same(steps(layers, lengths, here), results, f"{lengths}")
            same(here.storage, there.storage, f"{lengths}")


def test_steps_of_all_sizes_between_replays_of_a_graph():
    """Eager steps of a stream share a workspace, which grows with them; a graph's is its own."""
    scenes = []
    for lengths in ((65,), (1301, 257), LENGTHS * 3):
        layers = [layer(n, 8, 2, 64, n) for n in lengths]
        here, there = both(lengths, layers)
        q = torch.stack([x[0][-1] for x in layers])
        scenes.append((there, q.to(GPU), here.attend(q)))
    graphs = []
    for there, q, want in scenes:
        same(want, there.attend(q), "the first")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = there.attend(q)
        graphs.append((graph, captured))
    out = [torch.empty_like(q) for _, q, _ in scenes]
    for first in range(3):
        for (there, q, _), to, (graph, captured) in zip(scenes, out, graphs[first:] + graphs[:first], strict=True):
            captured.fill_(torch.nan)
            assert there.attend(q, out=to) is to
            graph.replay()
        for (_, _, want), to, (_, captured) in zip(scenes, out, graphs, strict=True):
            same(want, to, "eager")
            same(want, captured, "replayed")
