"""What the scripts of benchmarks/cuda compute without a GPU."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

for _needed in ("matplotlib", "rich", "safetensors", "typer"):
    pytest.importorskip(_needed)
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/cuda"))
attention_problem, decode, shapes, side_by_side, typer = (
    import_module(name) for name in ("attention_problem", "decode", "shapes", "side_by_side", "typer")
)


def test_shapes_are_read_or_refused() -> None:
    assert shapes.numbers("B8 S32768 H96/8 D128") == {
        "batch": 8,
        "seqlen": 32768,
        "heads": 96,
        "kv_heads": 8,
        "head_dim": 128,
    }
    for bad in ("B8 S32768 H96 D128", "8 S32768 H96/8 D128", "B8", ""):
        with pytest.raises(typer.BadParameter, match="allowed: as in"):
            shapes.numbers(bad)


def test_documents_add_up() -> None:
    lengths = attention_problem.documents(1 << 20)
    assert sum(lengths) == 1 << 20
    assert min(lengths) > 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_reference_has_autograds_gradients(causal: bool, packed: bool) -> None:
    g = torch.Generator().manual_seed(1)
    leading = (40,) if packed else (2, 20)
    q, k, v, dout = (torch.randn(*leading, h, 16, generator=g, dtype=torch.float64) for h in (4, 2, 2, 4))
    starts = torch.tensor([0, 20, 40], dtype=torch.int32) if packed else None
    problem = attention_problem.Problem(q, k, v, dout, causal, [20, 20], starts)
    heads_first = [attention_problem.first(problem, x).transpose(0, 1) for x in (q, k, v, dout)]
    leaves = [x.clone().requires_grad_() for x in heads_first[:3]]
    logits = leaves[0] @ leaves[1].mT / 4
    if causal:
        logits = logits.masked_fill(torch.ones(20, 20).triu(1).bool(), float("-inf"))
    out = torch.softmax(logits, -1) @ leaves[2]
    wanted = (out, *torch.autograd.grad(out, leaves, heads_first[3]))
    for result, exact in zip(attention_problem.expected(problem).values(), wanted, strict=True):
        torch.testing.assert_close(result.transpose(0, 1), exact)


def test_equal_error_takes_the_fastest_fair_setting() -> None:
    rows = [
        {"name": "a", "series": "fold, 16 bits", "error": 1e-3, "median_us": 100.0},
        {"name": "b", "series": "fold, 16 bits", "error": 5e-3, "median_us": 50.0},
        {"name": "c", "series": "fold, 8 bits", "error": 8e-3, "median_us": 40.0},
        {"name": "peer", "series": "published", "error": 6e-3, "median_us": 200.0},
        {"name": "exact", "series": "published", "error": 1e-4, "median_us": 200.0},
        {"name": "small", "series": "FlashInfer, fp8 KV", "error": 9e-2, "median_us": 80.0},
    ]
    found = [(x["peer"], x["fold"], x["ratio"]) for x in decode.at_equal_error(rows)]
    assert found == [("peer", "b", 0.25), ("exact", None, None), ("small", "c", 0.5), ("small", "c", 0.5)]


def _work(number: int) -> Iterator[list[Any]]:
    if number == 1:
        raise ValueError("one")
    yield ["a peer: no"] if number == 2 else []
    yield [{"number": number}]


def test_processes_report_rows_and_what_went_wrong() -> None:
    found = {name: (rows, met) for name, rows, met in side_by_side.measured(_work, {str(i): (i,) for i in range(3)}, 2)}
    assert found["0"] == ([{"number": 0}], [])
    assert found["2"] == ([{"number": 2}], ["2: left out: a peer: no"])
    assert found["1"][0] == []
    assert "ValueError: one" in found["1"][1][0]
