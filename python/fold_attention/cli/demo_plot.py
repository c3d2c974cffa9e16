"""The demo's picture: latency and error against depth."""

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

INK, MUTED, RULE = "#1f2328", "#656d76", "#d8dee4"
COLOURS = {16: "#0b5cad", 8: "#d9730d", 4: "#2a8a4a"}
PEER_LABELS = {
    "torch SDPA, enable_gqa": "torch SDPA",
    "torch SDPA, folded": "torch SDPA, folded group",
    "torch matmul, folded": "torch matmul, folded group",
}
ERROR_LABELS = {
    "torch SDPA, folded": "torch SDPA (bf16)",
    "fp8 cache (E4M3, scale 1)": "fp8 (E4M3) cache",
}
Rows = list[dict[str, Any]]
Label = tuple[float, str, str]  # height, text, colour
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
}


def plot(results: dict[str, Any], path: Path) -> None:
    """Two panels from the results of the demo (demo.json)."""
    rows = results["rows"]
    depths = sorted({row["depth"] for row in rows if row.get("depth") is not None})
    places = {depth: index for index, depth in enumerate([*depths, None])}
    shape, about = results["layers"][0], results["provenance"]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
        for axes, draw in zip(panels, (_latency, _error), strict=True):
            axes.set_yscale("log")
            axes.set_xlim(-0.3, len(places) + 0.4)
            axes.set_xticks(list(places.values()), ["none" if d is None else f"{d:g}" for d in places])
            axes.set_xlabel(r"depth (values with a weight below about $2^{-\mathrm{depth}}$ of the mass are not read)")
            axes.tick_params(which="both", length=0)
            axes.grid(axis="x", visible=False)
            _label(axes, draw(axes, rows, places), len(places) - 0.85)
        figure.suptitle(
            f"Keys and values of a real model: {len(results['layers'])} layers, {shape['keys']:,} keys, head dim "
            f"{shape['head_dim']}, heads {shape['heads']}/{shape['kv_heads']}, batch {shape['batch']}.  "
            f"{about['cpu']}, {about['threads']} thread{'s' * (about['threads'] > 1)}, {about['isa']}",
            x=0.008,
            ha="left",
            fontsize=9,
            color=MUTED,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, facecolor="white", metadata={"Software": None})
        plt.close(figure)


def _curve(rows: Rows, bits: int, tail: bool) -> Rows:
    found = [row for row in rows if row.get("bits") == bits and (row["tail"] == tail or row["depth"] is None)]
    return sorted(found, key=lambda row: float("inf") if row["depth"] is None else row["depth"])


def _latency(axes: Axes, rows: Rows, places: dict[float | None, int]) -> list[Label]:
    axes.set_title("Time of a decode step, ms")
    labels = []
    for bits, colour in COLOURS.items():
        curve = _curve(rows, bits, True)
        x = [places[row["depth"]] for row in curve]
        low, middle, high = ([row[name] * 1e3 for row in curve] for name in ("q1_s", "median_s", "q3_s"))
        axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        axes.plot(x, middle, "o-", color=colour, ms=4, lw=1.8)
        labels.append((middle[-1], f"{bits} bits", colour))
    for row in rows:
        if "bits" not in row and "median_s" in row:
            _level(axes, row["median_s"] * 1e3, PEER_LABELS[row["name"]], len(places))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    return labels


def _error(axes: Axes, rows: Rows, places: dict[float | None, int]) -> list[Label]:
    axes.set_title("Error against fp64, relative")
    labels = []
    for bits, colour in COLOURS.items():
        for tail in (False, True):
            curve = _curve(rows, bits, tail)
            x, y = [places[row["depth"]] for row in curve], [row["error"] for row in curve]
            axes.plot(x, y, "o-" if tail else ":", color=colour, ms=4, lw=1.8 if tail else 1.3)
        labels.append((y[-1], f"{bits} bits", colour))
    for row in rows:
        if row["name"] in ERROR_LABELS:
            _level(axes, row["error"], ERROR_LABELS[row["name"]], len(places))
    axes.plot([], [], "o-", color=MUTED, ms=4, lw=1.8, label="a model stands in for unread values")
    axes.plot([], [], ":", color=MUTED, lw=1.3, label="nothing stands in")
    axes.legend(frameon=False, fontsize=8.5, loc="lower left", labelcolor=MUTED)
    return labels


def _level(axes: Axes, y: float, text: str, places: int) -> None:
    """A line across for what has no depth."""
    axes.axhline(y, color=MUTED, lw=1, ls=(0, (4, 3)))
    axes.text(places + 0.35, y, text, color=MUTED, fontsize=8.5, va="bottom", ha="right")


def _label(axes: Axes, labels: list[Label], x: float) -> None:
    """Names at the ends of curves, moved up where they would touch."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    lowest = low
    for y, text, colour in sorted(labels):
        place = max(math.log(y), lowest)
        axes.text(x, math.exp(place), text, color=colour, fontsize=9, va="center", fontweight="bold")
        lowest = place + 0.055 * (high - low)
