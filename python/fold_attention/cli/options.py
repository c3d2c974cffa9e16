"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from fold_attention.errors import bad_value

Batch = Annotated[int, typer.Option(help="Requests (sequences).", min=1)]
Heads = Annotated[int, typer.Option(help="Query heads.", min=1)]
KVHeads = Annotated[int, typer.Option(help="KV heads; query head h reads KV head h // (heads / kv-heads).", min=1)]
HeadDim = Annotated[int, typer.Option(help="Channels of a head.", min=1)]
Rounds = Annotated[int, typer.Option(help="Timed runs of each contender, in rotating order.", min=1)]
Threads = Annotated[int | None, typer.Option(help="Threads, of this library and of torch; default: torch's.", min=1)]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the results here, with their provenance.")]
Cold = Annotated[bool, typer.Option("--cold/--warm", help="Evict the processor's caches before each run.")]
Data = Annotated[
    str,
    typer.Option(
        help='"synthetic", "capture" (the one that comes with the package) or the path of a capture; a capture brings '
        "its own heads and head dim."
    ),
]


def capture_path(data: str, shipped: list[Path]) -> Path | None:
    """The file that --data names; None for synthetic data."""
    if data == "synthetic":
        return None
    if data == "capture":
        return shipped[0]
    path = Path(data)
    if not path.is_file():
        raise bad_value("--data", data, "allowed: synthetic, capture, or the path of a capture")
    return path


def parse_depth(text: str) -> float | None:
    """A depth as typed: a number, or none."""
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise bad_value("--depth", text, "allowed: none, or a number (log2 below the row's mass)") from None
