"""Measures decode on captures and writes the tables of docs/accuracy.md: `python benchmarks/accuracy.py CAPTURE...`.

Errors are relative, against fp64 attention on the same bf16 inputs: the root of summed squares over the steps and
heads of a capture, outputs in fp32. Bytes are what a step reads of the cache, over what a bf16 cache of the same keys
holds.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from fold_attention import FoldKVCache, __version__
from fold_attention.fit_gates import Case, load

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/accuracy.md"
BEGIN, END = "<!-- tables: benchmarks/accuracy.py -->\n", "<!-- end of tables -->\n"
DEPTHS = (None, 20, 16, 14, 12, 10)
BITS = (16, (16, 8), 8, 4)


def without_tail(case: Case) -> Case:
    k, v = (rows.to(torch.bfloat16) for rows in load_rows(case))
    cache = FoldKVCache(1, case.q.shape[2], case.cache.n_kv_heads, case.q.shape[3], k.shape[0], tail=False)
    cache.append(k[None], v[None])
    return dataclasses.replace(case, cache=cache, block_table=cache.tables()[0].expand(len(case.q), -1))


def load_rows(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v (L, HK, D) of the capture."""
    with safe_open(case.path, "pt") as file:
        return file.get_tensor("k").transpose(0, 1), file.get_tensor("v").transpose(0, 1)


def sdpa_error(case: Case) -> float:
    """torch's scaled_dot_product_attention in bf16."""
    k, v = (rows.transpose(0, 1)[None] for rows in load_rows(case))
    outs = []
    for row, n in zip(case.q, case.lengths.tolist(), strict=True):
        q = row.transpose(0, 1)[None]  # (1, H, 1, D)
        out = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n], enable_gqa=True)
        outs.append(out[0, :, 0].double())
    return case.error_of(torch.stack(outs))


def mean(values: Iterable[float]) -> float:
    """Geometric."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def table(head: list[str], rows: Iterable[tuple[str, list[float]]], form: Callable[[float], str]) -> str:
    lines = [f"| {' | '.join([*head, 'mean'])} |", f"|{'---|' * (len(head) + 1)}"]
    for name, values in rows:
        lines.append(f"| {' | '.join([name, *map(form, values), form(mean(values))])} |")
    return "\n".join(lines) + "\n\n"


def measure(paths: list[Path], every: int) -> str:
    names = [path.stem.removeprefix("decode_").replace("_", " ") for path in paths]
    published = json.loads((ROOT / "benchmarks/published.json").read_text())["errors"]
    by_bits = {bits: [load(path, every, bits) for path in paths] for bits in BITS}
    cases = by_bits[16]
    results = {depth: [case.run(depth=depth) for case in cases] for depth in DEPTHS}
    errors = {f"depth {depth}": [error for error, _, _ in runs] for depth, runs in results.items()}
    read = {f"depth {depth}": [share for _, share, _ in runs] for depth, runs in results.items()}

    def scientific(x: float) -> str:
        return f"{x:.1e}".replace("e-0", "e-")

    def fixed(x: float) -> str:
        return f"{x:.2f}"

    steps = sum(len(case.q) for case in cases)
    text = f"Measured with version {__version__} on {steps} decoding steps of {len(cases)} layers.\n\n"
    text += "**Error, 16 bits.** The last row is torch's bf16 attention, whose output is bf16.\n\n"
    sdpa = ("torch, bf16", [sdpa_error(case) for case in cases])
    text += table(["", *names], [*errors.items(), sdpa], scientific)
    text += "**Bytes read, 16 bits**, as a share of a bf16 cache.\n\n"
    text += table(["", *names], read.items(), fixed)
    if all(path.stem in published for path in paths):
        text += "**Error over the published implementation's** at the same depth (`benchmarks/published.json`).\n\n"
        ratios = (
            (f"depth {d}", [e / published[p.stem][str(d)] for e, p in zip(errors[f"depth {d}"], paths, strict=True)])
            for d in DEPTHS
        )
        text += table(["", *names], ratios, fixed)
    text += "**Fewer bits**, error with every V read (depth None). A pair is bits of K and of V.\n\n"
    text += table(["", *names], ((f"bits {b}", [c.run()[0] for c in by_bits[b]]) for b in BITS), scientific)
    text += "**Without the tail model**, error, 16 bits.\n\n"
    bare = [without_tail(case) for case in cases]
    return text + table(
        ["", *names], ((f"depth {d}", [c.run(depth=d)[0] for c in bare]) for d in (16, 14, 12, 10)), scientific
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("captures", nargs="+", type=Path, help="decode captures (safetensors: q, k, v)")
    parser.add_argument("--every", type=int, default=1, help="use every n-th decoding step")
    arguments = parser.parse_args()
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + "\n" + measure(arguments.captures, arguments.every) + END + after)


if __name__ == "__main__":
    main()
