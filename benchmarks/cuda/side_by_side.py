"""Work in processes of its own: some get ready side by side, since peers compile at first use; each is then measured
while the others wait."""

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

#: Yields what it had to leave out (a list of sentences) once all is compiled and filled, and then, measured, its rows.
Work = Callable[..., Iterator[list[Any]]]


def measured(
    work: Work, tasks: Mapping[str, tuple[Any, ...]], jobs: int
) -> Iterator[tuple[str, list[dict[str, Any]], list[str]]]:
    """For each task its name, the rows of `work(*arguments)` and what went wrong; `jobs` get ready side by side."""
    spawn = multiprocessing.get_context("spawn")
    names = list(tasks)
    for first in range(0, len(names), jobs):
        workers = []
        for name in names[first : first + jobs]:
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(work, tasks[name], there), daemon=True)
            process.start()
            there.close()
            workers.append((name, process, here))
        ready = [_answer(here) for _, _, here in workers]
        for (name, process, here), answer in zip(workers, ready, strict=True):
            problems = []
            if isinstance(answer, list):
                problems += [f"{name}: left out: {failure}" for failure in answer]
                here.send("go")
                answer = _answer(here)
            process.join()
            if isinstance(answer, str):
                problems.append(f"{name}: {answer}")
                answer = []
            yield name, answer, problems


def _serve(work: Work, arguments: tuple[Any, ...], parent: Connection) -> None:
    try:
        steps = work(*arguments)
        parent.send(next(steps))
        parent.recv()
        parent.send(next(steps))
    except Exception:  # the parent says it
        parent.send(traceback.format_exc())


def _answer(worker: Connection) -> Any:
    """What the worker sends; a string if it failed."""
    try:
        return worker.recv()
    except EOFError:
        return "the process ended"
