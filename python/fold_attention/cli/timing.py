"""Times of several contenders in one run, and what the memory can do."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

import fold_attention

EVICT_BYTES = 64 << 20  # more than a few cores' share of the last cache level
BANDWIDTH_BYTES = 256 << 20
Key = TypeVar("Key")


@dataclass
class Timing:
    """Seconds, one per round."""

    samples: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def json(self) -> dict[str, Any]:
        low, high = self.quartiles
        return {"median_s": self.median, "q1_s": low, "q3_s": high, "rounds": len(self.samples)}


def in_turn(keys: Iterable[Key], rounds: int) -> Iterator[tuple[int, list[Key]]]:
    """Round by round its number and its order: each starts with another key. A first one, -1, is not to be counted."""
    order = list(keys)
    for index in range(-1, rounds):
        shift = index % len(order)
        yield index, order[shift:] + order[:shift]


def rotating(
    contenders: Mapping[Key, Callable[[int], object]],
    rounds: int,
    cold: bool = True,
    advance: Callable[[], object] = lambda: None,
) -> dict[Key, Timing]:
    """Runs every contender once a round, each round starting with another one; contender(round) is what is timed.

    A first round is not counted. `cold`: before each run another buffer is written and read, so that nothing is left in
    the processor's caches.
    """
    buffer = torch.zeros(EVICT_BYTES // 8, dtype=torch.int64) if cold else None
    samples: dict[Key, list[float]] = {key: [] for key in contenders}
    for index, order in in_turn(contenders, rounds):
        for key in order:
            if buffer is not None:
                buffer.add_(1)
                buffer.sum()
            start = time.perf_counter()
            contenders[key](max(index, 0))
            elapsed = time.perf_counter() - start
            if index >= 0:
                samples[key].append(elapsed)
            advance()
    return {key: Timing(values) for key, values in samples.items()}


def read_bandwidth(rounds: int = 7) -> float:
    """Bytes per second at which torch adds up a large buffer: the best of some rounds, the memory's own speed."""
    buffer = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64)
    best = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        buffer.sum()
        best = max(best, BANDWIDTH_BYTES / (time.perf_counter() - start))
    return best


def use_threads(threads: int | None) -> int:
    """Sets the threads of this library and of torch; None: as many as torch would use. Returns how many."""
    if threads is not None:
        fold_attention.set_num_threads(threads)
        torch.set_num_threads(threads)
    else:
        fold_attention.set_num_threads(torch.get_num_threads())
    return fold_attention.get_num_threads()
