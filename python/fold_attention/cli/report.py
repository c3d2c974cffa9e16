"""Tables on the terminal, and results as JSON with where they come from."""

import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import fold_attention
from fold_attention._lib import lib

PIPE_WIDTH = 132  # of tables where the output is not a terminal


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def progress() -> Progress:
    """On standard error, so that the results can be piped."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *notes: str) -> None:
    """Prints a table, its first column to the left, the others to the right; an empty row is a rule."""
    made = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        made.add_row(*row) if row else made.add_section()
    terminal = console()
    terminal.print(f"\n{title}", style="bold", markup=False, soft_wrap=True)
    terminal.print(made)
    for note in notes:
        terminal.print(note, style="dim", markup=False, soft_wrap=True)


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"


def provenance(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Versions, machine, threads, command and date of a result."""
    given = sys.argv[1:] if arguments is None else arguments
    return {
        "command": " ".join(["fold-attention", *given]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "fold_attention": fold_attention.__version__,
        "source": _describe(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "isa": str(lib.isa()),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "threads": fold_attention.get_num_threads(),
        "torch_threads": torch.get_num_threads(),
    }


def machine(about: dict[str, Any]) -> str:
    """One line on what a result was measured with."""
    return (
        f"{about['cpu']}, {about['threads']} thread(s), {about['isa']}; fold-attention {about['fold_attention']}, "
        f"torch {about['torch']} ({about['torch_isa']})"
    )


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write_json(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


def _describe() -> str | None:
    """git's description of the sources, where the package lies in its own checkout."""
    here = Path(fold_attention.__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        top = Path(git("rev-parse", "--show-toplevel"))
        return git("describe", "--always", "--dirty") if (top / "python" / "fold_attention").is_dir() else None
    except (OSError, subprocess.CalledProcessError):
        return None
