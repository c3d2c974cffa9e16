"""Fits the gates of docs/numerics.md, section 6, on captures: `python -m fold_attention.fit_gates CAPTURE...`.

For each depth: the gates (K.l, K.b, V.h, V.l, V.b, in log2 below a row's Z) that read the fewest bytes while no
capture's error exceeds its target. The target is the error at that depth of the scheme with two int8 K planes and a
bf16 V: measured ones are taken from `--targets` (benchmarks/published.json), missing ones are emulated with this
library by reading every K to level 2 within 4 of the cut and every V above it in full. `--held-out` instead judges each
capture with gates fitted on the others.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors import safe_open
from torch import Tensor

from fold_attention._lib import lib
from fold_attention.kv_cache import FoldKVCache

Gates = tuple[float, ...]  # K.l, K.b, V.h, V.l, V.b
OPEN = 2.0**100  # a gate that everything passes
DEPTHS = (10, 12, 14, 16, 20)
ERROR_FACTOR = 0.95  # of the target: what a fit on some captures leaves for others
DENSE_TARGET = 1.2e-4  # depth=None stays below this where everything read does
FULL_KEY_MARGIN = 4  # the two-plane scheme reads its second K plane where a weight is this far above the cut


@dataclass
class Case:
    """One capture: its cache, every `every`-th decode step as one batch, and their fp64 outputs."""

    path: Path
    q: Tensor  # (steps, 1, H, D)
    cache: FoldKVCache
    block_table: Tensor  # (steps, max_pages)
    lengths: Tensor  # (steps,)
    expected: Tensor  # (steps, H, D) float64

    @property
    def name(self) -> str:
        return self.path.stem

    def run(self, gates: Gates | None = None, depth: float | None = None) -> tuple[float, float, float]:
        """Relative error, bytes read over a bf16 cache's, share of keys whose V was read. `gates` go before `depth`."""
        steps, _, heads, dim = self.q.shape
        kv_heads = self.cache.n_kv_heads
        out = torch.empty(steps, 1, heads, dim)
        kept, dropped = torch.empty(steps, 1, heads), torch.empty(steps, 1, heads)
        again = torch.empty(steps, 1, heads, dtype=torch.uint8)
        read = torch.empty(steps, 1, kv_heads, dtype=torch.int64)
        depths = None if depth is None else torch.tensor([depth], dtype=torch.float32)
        explicit = None if gates is None else torch.tensor(gates, dtype=torch.float32)
        options = (None, None, depths, None, 0.0, -1, 0, explicit, 0.0)
        tables = (self.block_table, self.lengths)
        results = (out, None, kept, dropped, again, read)
        lib.decode(self.q, self.cache.storage, self.cache.layout, None, None, None, *tables, *options, *results, None)
        whole = self.lengths.double().sum() * kv_heads * 4 * dim
        return self.error_of(out[:, 0].double()), float(read.sum() / whole), float(kept.mean())

    def error_of(self, out: Tensor) -> float:
        """Relative error of outputs (steps, H, D)."""
        return float((out - self.expected).norm() / self.expected.norm())

    def rounding_error(self) -> float:
        """The error that fp64 attention makes on the cache's finest readings: what its planes cost by themselves."""
        keys, values = (rows.transpose(0, 1) for rows in self.cache.read())
        return self.error_of(_outputs(self.q[:, 0], keys, values, self.lengths))


def load(path: Path, every: int, bits: int | tuple[int, int] = 16) -> Case:
    """A decode capture: q (T, H, D), k and v (HK, L, D), step t at position L - T + t."""
    with safe_open(path, "pt") as file:
        q, k, v = (file.get_tensor(name) for name in "qkv")
    steps, heads, dim = q.shape
    kv_heads, length, _ = k.shape
    cache = FoldKVCache(1, heads, kv_heads, dim, length, bits=bits)
    cache.write_prompt(k.transpose(0, 1), v.transpose(0, 1), torch.tensor([0, length], dtype=torch.int32))
    chosen = torch.arange(0, steps, every)
    lengths = (length - steps + 1 + chosen).to(torch.int32)
    table = cache.tables(None)[0].expand(len(chosen), -1)
    return Case(path, q[chosen][:, None].contiguous(), cache, table, lengths, _outputs(q[chosen], k, v, lengths))


def _outputs(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """fp64 attention of tokens q (steps, H, D) over the first lengths[i] keys of k, v (HK, L, D)."""
    return torch.stack([_attention(row, k[:, :n], v[:, :n]) for row, n in zip(q, lengths.tolist(), strict=True)])


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """fp64 attention of one token: q (H, D), k and v (HK, L, D)."""
    rows = q.double().view(k.shape[0], -1, q.shape[-1]) / math.sqrt(q.shape[-1])
    return (torch.softmax(rows @ k.double().mT, -1) @ v.double()).flatten(0, 1)


def two_plane_bytes(case: Case, depth: float) -> float:
    """Bytes of the two-plane scheme over a bf16 cache's: an int8 K plane and its scale for every key, bf16 V above the
    cut, the second K plane FULL_KEY_MARGIN above it, a bf16 mean row a block."""
    dim = case.q.shape[-1]
    values = case.run((OPEN, OPEN, depth, depth, depth))[2]
    keys = case.run((OPEN, OPEN, depth - FULL_KEY_MARGIN, 0.0, 0.0))[2]
    return (dim + 2 + values * 2 * dim + keys * dim + 2 * dim / 64) / (4 * dim)


def target(case: Case, depth: float | None, measured: dict[str, Any]) -> float:
    key = "None" if depth is None else f"{depth:g}"
    if case.name in measured and key in measured[case.name]:
        limit = float(measured[case.name][key])
    else:
        cut = OPEN if depth is None else depth
        limit = case.run((OPEN, cut - FULL_KEY_MARGIN, cut, cut, cut))[0]
    return min(limit, DENSE_TARGET) if depth is None else limit


def fit(cases: list[Case], targets: list[float], starts: list[Gates], fixed: frozenset[int] = frozenset()) -> Gates:
    """Local searches on the mean log of bytes plus a penalty for errors past their target: single gates, then trades.
    The best of those from several starts, since each ends where no such move helps."""

    def cost(gates: Gates) -> float:
        total = 0.0
        for case, limit in zip(cases, targets, strict=True):
            error, read, _ = case.run(gates)
            total += math.log(read) + 20 * max(0.0, error / (ERROR_FACTOR * limit) - 1)
        return total / len(cases)

    free = [i for i in range(5) if i not in fixed]

    def follow(lowest: float, best: Gates, move: dict[int, float]) -> tuple[float, Gates]:
        """As often as it helps."""
        while True:
            trial = tuple(gate + move.get(i, 0.0) for i, gate in enumerate(best))
            if (value := cost(trial)) >= lowest - 1e-5:
                return lowest, best
            lowest, best = value, trial

    def search(best: Gates) -> tuple[float, Gates]:
        lowest = cost(best)
        for step in (1.0, 0.5):
            moves = [{i: change} for i in free for change in (-step, step)]
            moves += [{i: step, j: -change} for i in free for j in free if i != j for change in (step, 2 * step)]
            before = math.inf
            while lowest < before:
                before = lowest
                for move in moves:
                    lowest, best = follow(lowest, best, move)
        return lowest, best

    return min(search(start) for start in starts)[1]


def guesses(depth: float | None) -> list[Gates]:
    """One that reads all planes of V about as deeply as V itself, one that reads them less so."""
    if depth is None:
        return [(18.0, 13.0, OPEN, 20.0, 13.0), (18.0, 13.0, OPEN, 17.0, 11.0)]
    return [
        (depth, depth - 5, depth + 2, depth, depth - 6),
        (depth - 4, depth - 8, depth - 1, depth - 5, depth - 9),
    ]


def fitted(cases: list[Case], depth: float | None, measured: dict[str, Any]) -> Gates:
    targets = [target(case, depth, measured) for case in cases]
    return fit(cases, targets, guesses(depth), frozenset({2}) if depth is None else frozenset())


def report(cases: list[Case], depth: float | None, gates: Gates, measured: dict[str, Any]) -> None:
    for case in cases:
        error, read, kept = case.run(gates)
        limit = target(case, depth, measured)
        ratio = "" if depth is None else f"  {read / two_plane_bytes(case, depth):.3f} of the two-plane scheme's"
        print(f"  {case.name}: error {error:.2e} ({error / limit:.2f} of {limit:.2e}), V read {kept:.3f}, ", end="")
        print(f"bytes {read:.3f}{ratio}")


def table(rows: dict[float | None, Gates]) -> str:
    lines = [
        "// Fitted by `python -m fold_attention.fit_gates` (docs/numerics.md, section 6); log2 below a row's Z.",
        "// Depth, ascending, then K.l, K.b, V.h, V.l, V.b; last depth=None, which reads every V's plane h.",
    ]
    for depth, gates in sorted((math.inf if depth is None else depth, gates) for depth, gates in rows.items()):
        values = ", ".join("kOpen" if gate >= OPEN else f"{gate:.1f}f" for gate in gates)
        lines.append(f"FOLD_DENSE_GATES({values})" if depth == math.inf else f"FOLD_GATES({depth:.1f}f, {values})")
    return "\n".join(lines) + "\n"


def main(
    captures: Annotated[list[Path], typer.Argument(help="Decode captures (safetensors: q, k, v).", exists=True)],
    targets: Annotated[Path | None, typer.Option(help="JSON with measured errors to stay under.", exists=True)] = None,
    output: Annotated[Path | None, typer.Option(help="Write the table here, as src/numerics/gates.inc.")] = None,
    every: Annotated[int, typer.Option(help="Use every n-th decode step.", min=1)] = 1,
    held_out: Annotated[bool, typer.Option(help="Judge each capture with gates fitted on the others.")] = False,
) -> None:
    """Fit the gates on captures and print what they read and what they cost."""
    measured = json.loads(targets.read_text())["errors"] if targets else {}
    cases = [load(path, every) for path in captures]
    rows: dict[float | None, Gates] = {}
    for depth in (*DEPTHS, None):
        if held_out:
            for case in cases:
                gates = fitted([other for other in cases if other is not case], depth, measured)
                print(f"depth {depth}, fitted without {case.name}: {gates}")
                report([case], depth, gates, measured)
            continue
        gates = fitted(cases, depth, measured)
        print(f"depth {depth}: {gates}")
        report(cases, depth, gates, measured)
        rows[depth] = gates
    if output and rows:
        output.write_text(table(rows))


if __name__ == "__main__":
    typer.run(main)
