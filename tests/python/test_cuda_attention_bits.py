"""P2 on a GPU, by bytes: a sequence's outputs and gradients over repeats, under load, for any number of
multiprocessors, alone, in a batch, and packed at every position."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from attention_reference import run
from cuda_attention_testing import GPU, SameBytes, dense, ends_of, needs_gpu, of_sequence, tensors, varlen
from torch.cuda.green_contexts import GreenContext

pytestmark = needs_gpu
REPEATS = 1000
# Edges of tiles (64, 128 and 192 rows) and of pages, primes, and sequences without a row between them.
LENGTHS: tuple[int, ...] = (1, 0, 2, 3, 7, 31, 63, 64, 65, 0, 127, 128, 129, 191, 192, 193, 0, 251, 255, 256, 257, 383)
LENGTHS += (384, 385, 509, 1021, 1024, 1025, 0, 0, 2039, 2048, 4093, 4096, 4097, 8191, 8192)


class Load:
    """Matrix products and copies of several sizes on a stream of their own."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        sizes = (64, 1024, 320, 2048, 512, 4096)
        self.pairs = itertools.cycle([torch.randn(2, n, n, dtype=torch.bfloat16, device=GPU) for n in sizes])
        torch.cuda.synchronize()

    def add(self) -> None:
        with torch.cuda.stream(self.stream):
            a, b = next(self.pairs)
            torch.mm(a, a, out=b)
            a.copy_(b)


@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "beside a second stream"])
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((2, 1024, 1024, 8, 2, 128), torch.bfloat16, {"causal": True}),
        ((2, 1024, 1024, 12, 12, 64), torch.float16, {}),
        ((1, 333, 2000, 6, 3, 96), torch.bfloat16, {"causal": True, "window": (700, 0), "sinks": True}),
    ],
    ids=str,
)
def test_a_thousand_repeats(shape, dtype, options, loaded):
    """FA#2244: forward and backward."""
    given = tensors(*shape, dtype=dtype)
    options = {**options, **({"sinks": torch.randn(shape[3], device=GPU)} if "sinks" in options else {})}
    first = run(dense, *given, **options)
    load = Load()
    with SameBytes() as same:
        for repeat in range(REPEATS):
            if loaded:
                load.add()
            same.compare(run(dense, *given, **options), first, f"repeat {repeat}")


def test_deterministic_algorithms():
    """TE#2798, pytorch#182551: no warning, no error, the same bytes; torch then fills new memory with NaN, too."""
    given, sinks = tensors(2, 300, 411, 8, 2, 128), torch.randn(8, device=GPU)
    expected = run(dense, *given, sinks=sinks, causal=True)
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings(), SameBytes() as same:
            warnings.simplefilter("error")
            same.compare(run(dense, *given, sinks=sinks, causal=True), expected, "deterministic algorithms")
    finally:
        torch.use_deterministic_algorithms(False)


def elapsed(function) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@pytest.mark.parametrize("multiprocessors", [8, 48, 104])
def test_fewer_multiprocessors(multiprocessors):
    """A green context has that many and no more; a product that fills the device shows that it does."""
    given = tensors(3, 1021, 1021, 8, 2, 128)
    q, k, v, dout = (x.flatten(0, 1) for x in given)
    ends = ends_of([1021, 0, 1, 1020, 1021])
    expected = run(dense, *given, causal=True), run(varlen(ends, ends), q, k, v, dout, causal=True)
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=GPU)
    torch.mm(matrix, matrix)
    whole = min(elapsed(lambda: torch.mm(matrix, matrix)) for _ in range(5))
    torch.cuda.synchronize()
    context: Any = GreenContext.create(num_sms=multiprocessors, device_id=0)
    context.set_context()
    try:
        torch.mm(matrix, matrix)
        # Autograd's own thread would run the backward outside the context: on all multiprocessors, and not in the order
        # of the context's stream, as what it reads is computed, or while memory that it gave back is written again.
        with torch.autograd.set_multithreading_enabled(False):
            results = run(dense, *given, causal=True), run(varlen(ends, ends), q, k, v, dout, causal=True)
        part = min(elapsed(lambda: torch.mm(matrix, matrix)) for _ in range(5))
        torch.cuda.synchronize()
    finally:
        context.pop_context()
    count = torch.cuda.get_device_properties(GPU).multi_processor_count
    print(f"{multiprocessors} of {count} multiprocessors: a product takes {part / whole:.1f} times as long")
    assert part > (1 + count / multiprocessors) / 2 * whole
    with SameBytes() as same:
        for what, a, b in zip(("a batch", "packed"), results, expected, strict=True):
            same.compare(a, b, f"{what} on {multiprocessors} multiprocessors")


@pytest.mark.parametrize("length", [129, 1021])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_alone_and_at_every_position_of_a_batch(dim, length):
    """FA#1897, FA#2450: among neighbours of another magnitude, which no shared grid may feel."""
    alone = tensors(1, length, length + 60, 4, 2, dim)
    expected = run(dense, *alone, causal=True)
    with SameBytes() as same:
        for batch in (2, 5, 64):
            neighbours = [1000 * x for x in tensors(batch, length, length + 60, 4, 2, dim)]
            for position in range(batch):
                many = [x.clone() for x in neighbours]
                for x, one in zip(many, alone, strict=True):
                    x[position] = one[0]
                results = [x[position : position + 1] for x in run(dense, *many, causal=True)]
                same.compare(results, expected, f"position {position} of {batch}")


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "key_turn", "options"),
    [
        ((4, 2), 128, torch.bfloat16, 0, {"causal": True}),
        ((3, 3), 96, torch.bfloat16, 0, {"sinks": True}),
        ((4, 1), 64, torch.float16, 17, {"causal": True, "window": (1500, 0)}),
        ((8, 2), 128, torch.float16, 5, {}),
    ],
    ids=str,
)
def test_alone_and_packed_at_every_position(heads, dim, dtype, key_turn, options):
    """FA#1897: all lengths packed in every rotation of their order; key_turn: queries and keys differ in length."""
    key_lengths = LENGTHS[key_turn:] + LENGTHS[:key_turn]
    pairs = list(zip(LENGTHS, key_lengths, strict=True))
    sequences = [[x[0] for x in tensors(1, sq, sk, *heads, dim, dtype=dtype)] for sq, sk in pairs]
    options = {**options, **({"sinks": torch.randn(heads[0], device=GPU)} if "sinks" in options else {})}
    alone = [run(dense, *(x[None] for x in sequence), **options) for sequence in sequences]
    with SameBytes() as same:
        for turn in range(len(pairs)):
            order = [*range(turn, len(pairs)), *range(turn)]
            starts_q, starts_k = ([0, *itertools.accumulate(pairs[i][side] for i in order)] for side in (0, 1))
            ends = (ends_of([pairs[i][side] for i in order]) for side in (0, 1))
            packed = [torch.cat([sequences[i][which] for i in order]) for which in range(4)]
            results = run(varlen(*ends), *packed, **options)
            for place, i in enumerate(order):
                rows_q, rows_k = (slice(*starts[place : place + 2]) for starts in (starts_q, starts_k))
                same.compare(of_sequence(results, rows_q, rows_k), alone[i], f"lengths {pairs[i]}, place {place}")
