"""Latency against error, a panel a shape: this library's caches as lines over depth, peers as points."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import peers
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

COLUMNS = 3
MARKERS = {"published": "s", "FlashInfer, bf16": "^", "FlashInfer, fp8 KV": "v", "XQA, bf16": "D"}


def plot_rows(path: Path, results: dict[str, list[dict[str, Any]]]) -> None:
    columns = min(COLUMNS, len(results))
    lines = -(-len(results) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.6 * columns, 3.6 * lines), squeeze=False)
    handles: dict[str, Any] = {}
    for axis, (name, rows) in zip(axes.flat, results.items(), strict=False):
        series: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            series.setdefault(row["series"], []).append(row)
        for label, points in series.items():
            style = {"marker": "o", "markersize": 2.5, "linewidth": 1}
            if label in MARKERS:
                style = {"marker": MARKERS[label], "color": f"C{5 + list(MARKERS).index(label)}", "linestyle": ":"}
            (handles[peers.label(label)],) = axis.plot(
                [x["error"] for x in points], [x["median_us"] for x in points], **style
            )
        axis.set(xscale="log", yscale="log", title=name, xlabel="error (vs fp64)", ylabel="µs a step")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.tick_params(axis="y", labelsize=8)
        axis.grid(visible=True, which="both", alpha=0.2)
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.03 + 0.05 / lines, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)
