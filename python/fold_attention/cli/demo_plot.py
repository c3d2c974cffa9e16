"""The demo's picture: latency and error against depth."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

INK, MUTED, RULE = "#1f2328", "#656d76", "#d8dee4"
COLOURS = {16: "#0b5cad", 8: "#d9730d", 4: "#2a8a4a"}
PEER_LABELS = {
    "torch SDPA, enable_gqa": "torch SDPA",
    "torch SDPA, folded": "torch SDPA, folded group",
    "torch matmul, folded": "torch matmul, folded group",
    "fp8 cache (E4M3, scale 1)": "fp8 (E4M3) cache",
}
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
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
        _latency(left, rows, places)
        _error(right, rows, places)
        for axes in (left, right):
            axes.set_xticks(list(places.values()), ["none" if d is None else f"{d:g}" for d in places])
            axes.set_xlabel("depth: values with a weight below 2^-depth of the mass are not read")
            axes.set_xlim(-0.3, len(places) + 0.9)
            axes.tick_params(length=0)
            axes.set_yscale("log")
            axes.grid(axis="x", visible=False)
            axes.yaxis.set_minor_formatter(NullFormatter())
        shape, about = results["layers"][0], results["provenance"]
        figure.suptitle(
            f"Real K and V ({len(results['layers'])} layers, {shape['keys']} keys, head dim {shape['head_dim']}, "
            f"{shape['heads']}/{shape['kv_heads']} heads, batch {shape['batch']}) on {about['cpu']}, "
            f"{about['threads']} threads, {about['isa']}",
            x=0.01,
            ha="left",
            fontsize=10,
            color=MUTED,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, facecolor="white", metadata={"Software": None})
        plt.close(figure)


def _curve(rows: list[dict[str, Any]], bits: int, tail: bool) -> list[dict[str, Any]]:
    found = [row for row in rows if row.get("bits") == bits and (row["tail"] == tail or row["depth"] is None)]
    return sorted(found, key=lambda row: float("inf") if row["depth"] is None else row["depth"])


def _latency(axes: Axes, rows: list[dict[str, Any]], places: dict[float | None, int]) -> None:
    axes.set_title("Time of a decode step, µs")
    labels = []
    for bits, colour in COLOURS.items():
        curve = _curve(rows, bits, True)
        x = [places[row["depth"]] for row in curve]
        middle = [row["median_s"] * 1e6 for row in curve]
        low, high = ([row[name] * 1e6 for row in curve] for name in ("q1_s", "q3_s"))
        axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        axes.plot(x, middle, "o-", color=colour, ms=4, lw=1.8)
        labels.append((middle[-1], f"{bits} bits", colour))
    for row in rows:
        if "bits" not in row and "median_s" in row:
            level = row["median_s"] * 1e6
            axes.axhline(level, color=MUTED, lw=1, ls=(0, (4, 3)))
            axes.text(-0.2, level, PEER_LABELS[row["name"]], color=MUTED, fontsize=8.5, va="bottom")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _label(axes, labels, len(places) - 0.85)


def _error(axes: Axes, rows: list[dict[str, Any]], places: dict[float | None, int]) -> None:
    axes.set_title("Error against fp64")
    labels = []
    for bits, colour in COLOURS.items():
        for tail in (False, True):
            curve = _curve(rows, bits, tail)
            x, y = [places[row["depth"]] for row in curve], [row["error"] for row in curve]
            axes.plot(x, y, "o-" if tail else ":", color=colour, ms=4, lw=1.8 if tail else 1.3)
        labels.append((y[-1], f"{bits} bits", colour))
    for row in rows:
        if row["name"] in ("torch SDPA, folded", "fp8 cache (E4M3, scale 1)"):
            axes.axhline(row["error"], color=MUTED, lw=1, ls=(0, (4, 3)))
            label = PEER_LABELS[row["name"]] if "fp8" in row["name"] else "torch SDPA (bf16)"
            axes.text(len(places) + 0.85, row["error"], label, color=MUTED, fontsize=8.5, va="bottom", ha="right")
    axes.plot([], [], "o-", color=MUTED, ms=4, lw=1.8, label="tail model stands in for unread values")
    axes.plot([], [], ":", color=MUTED, lw=1.3, label="nothing stands in")
    axes.legend(frameon=False, fontsize=8.5, loc="lower left", labelcolor=MUTED)
    _label(axes, labels, len(places) - 0.85)


def _label(axes: Axes, labels: list[tuple[float, str, str]], x: float) -> None:
    for y, text, colour in labels:
        axes.text(x, y, text, color=colour, fontsize=9, va="center", fontweight="bold")
