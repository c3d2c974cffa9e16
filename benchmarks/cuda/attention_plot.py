"""Throughput by shape: backward and forward, a panel for as many KV heads as query heads and one for fewer. Bars of
contenders whose gradients differ from run to run are hatched."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import peers

PANELS = {"MHA": lambda heads, kv_heads: heads == kv_heads, "GQA": lambda heads, kv_heads: heads > kv_heads}


def plot_rows(path: Path, results: dict[str, list[dict[str, Any]]]) -> None:
    names = list(dict.fromkeys(row["name"] for rows in results.values() for row in rows))
    shapes = {panel: [shape for shape in results if chosen(*_heads(shape))] for panel, chosen in PANELS.items()}
    shapes = {panel: held for panel, held in shapes.items() if held}
    figure, axes = plt.subplots(
        2,
        len(shapes),
        figsize=(13, 7.5),
        sharey="row",
        squeeze=False,
        width_ratios=[len(held) for held in shapes.values()],
    )
    handles: dict[str, Any] = {}
    for line, direction in zip(axes, ("backward", "forward"), strict=True):
        for axis, (panel, held) in zip(line, shapes.items(), strict=True):
            for place, shape in enumerate(held):
                rows = {row["name"]: row for row in results[shape] if direction in row}
                for index, name in enumerate(names):
                    if name not in rows:
                        continue
                    row = rows[name]
                    width = 0.8 / len(names)
                    label = peers.label(name) + ("" if row["deterministic"] else " (not deterministic)")
                    handles[label] = axis.bar(
                        place - 0.4 + (index + 0.5) * width,
                        row[direction]["tflops"],
                        width,
                        color=f"C{index}",
                        hatch=None if row["deterministic"] else "///",
                        edgecolor="white",
                        linewidth=0.3,
                    )
            axis.set_xticks(range(len(held)), [shape.replace(" H", "\nH") for shape in held], fontsize=7)
            axis.set_title(f"{panel}, {direction}")
            axis.grid(visible=True, axis="y", alpha=0.3)
            axis.set_axisbelow(True)
        line[0].set_ylabel("TFLOP/s")
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=len(handles), fontsize=8)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _heads(shape: str) -> tuple[int, int]:
    queries, kv_heads = shape.split()[2][1:].split("/")
    return int(queries), int(kv_heads)
