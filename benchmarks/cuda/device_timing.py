"""Times of several contenders on a GPU in one run: captured graphs, replayed in turn, after the L2 has been emptied."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from fold_attention.cli import timing
from fold_attention.cli.timing import in_turn

EVICT_BYTES = 256 << 20  # several times the L2
Key = TypeVar("Key")


class Timing(timing.Timing):
    """Microseconds, one per round."""

    def json(self) -> dict[str, Any]:
        low, high = self.quartiles
        return {"median_us": self.median, "q1_us": low, "q3_us": high, "rounds": len(self.samples)}


class Captured:
    """A graph of one call, which ran twice before: libraries are loaded, kernels compiled. A graph knows addresses
    alone, so what the call holds stays alive with it.

    stream: where it is captured; a gradient has to be where its forward ran.
    """

    def __init__(self, step: Callable[[], object], stream: torch.cuda.Stream | None = None) -> None:
        self.step = step
        stream = torch.cuda.Stream() if stream is None else stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.result: Any = step()

    def replay(self) -> None:
        self.graph.replay()


class Evictor:
    """Empties the L2: writes one buffer, then reads another one, which leaves no dirty lines."""

    def __init__(self) -> None:
        elements = EVICT_BYTES // 8
        self.written, self.read = (torch.zeros(elements, dtype=torch.int64, device="cuda") for _ in range(2))
        self.graph = Captured(lambda: (self.written.fill_(1), self.read.sum()))

    def __call__(self) -> None:
        self.graph.replay()


def rotating(graphs: Mapping[Key, Captured], rounds: int) -> dict[Key, Timing]:
    """Replays every graph once a round, each round starting with another one. A first round is not counted."""
    evict = Evictor()
    events: dict[Key, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in graphs}
    for index, order in in_turn(graphs, rounds):
        for key in order:
            evict()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[key].replay()
            end.record()
            if index >= 0:
                events[key].append((begin, end))
        torch.cuda.synchronize()
    return {key: Timing([1e3 * begin.elapsed_time(end) for begin, end in pairs]) for key, pairs in events.items()}
