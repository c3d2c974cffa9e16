"""What the library can do, asked before anything is allocated."""

from collections.abc import Iterable
from typing import Any

import torch

from fold_attention._lib import lib
from fold_attention.errors import bad_value

_NUMBERS = ("n_heads", "n_kv_heads", "head_dim", "page_size", "k_bits", "v_bits", "tree_nodes")


def supports(op: str, **what: Any) -> tuple[bool, str | None]:
    """Whether the library can do something: (True, None), or (False, the reason).

    The answer comes from the checks of the operation itself, and the reason is the text that it would raise.

    Args:
        op: "attention" (`fold_attn_func`, `fold_attn_varlen_func`), "attention_forward" (these where nobody wants a
            gradient, and `FoldKVCache.prefill`) or "cache" (all else of `FoldKVCache`, `fold_attn_with_kvcache`).
        what: any of n_heads, n_kv_heads, head_dim, dtype (of q, k and v), device; for a cache also page_size, bits (one
            number or a pair for K and V) and tree_nodes (of a draft tree). What is left out does not matter.
    """
    given = {name: value for name, value in what.items() if value is not None}
    if "bits" in given:
        bits = given.pop("bits")
        given["k_bits"], given["v_bits"] = (bits, bits) if isinstance(bits, int) else bits
    numbers = [given.pop(name, None) for name in _NUMBERS]
    dtype = given.pop("dtype", None)
    device = given.pop("device", None)
    if given:
        raise bad_value("what", next(iter(given)), f"allowed: {', '.join(_NUMBERS)}, bits, dtype, device")
    reason = lib.unsupported(
        op,
        *numbers,
        None if dtype is None else str(dtype).removeprefix("torch."),
        None if device is None else torch.device(device).type,
        0 if device is None else torch.device(device).index or 0,
    )
    return reason is None, None if reason is None else str(reason)


def support_table() -> str:
    """docs/support.md: the table of what is supported on a CPU, in Markdown, from `supports`."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)
    rows: tuple[tuple[str, str, str, Iterable[Any]], ...] = (
        ("attention", "head dim", "head_dim", range(1, 513)),
        ("attention", "query heads per KV head", "n_heads", range(1, 257)),
        ("attention", "dtype", "dtype", dtypes),
        ("cache", "head dim", "head_dim", range(1, 513)),
        ("cache", "query heads per KV head", "n_heads", range(1, 257)),
        ("cache", "dtype of q, k, v", "dtype", dtypes),
        ("cache", "page size", "page_size", range(1, 2049)),
        ("cache", "bits of K or V", "k_bits", range(1, 33)),
        ("cache", "nodes of a draft tree", "tree_nodes", range(1, 129)),
    )
    lines = ["| Operation | What | Supported | Otherwise |", "|---|---|---|---|"]
    for op, title, name, values in rows:
        fixed = {"n_kv_heads": 1} if name == "n_heads" else {}
        answers = [(value, *supports(op, **fixed, **{name: value})) for value in values]
        accepted = [value for value, yes, _ in answers if yes]
        reason = next((f"`{why}`" for _, yes, why in answers if not yes), "")
        lines.append(f"| {op} | {title} | {_listed(accepted)} | {reason} |")
    return "\n".join(lines) + "\n"


def _listed(values: list[Any]) -> str:
    """Long runs of numbers as "first to last" or "first, second, ... last"."""
    texts = [str(value).removeprefix("torch.") for value in values]
    if len(values) <= 5:
        return ", ".join(texts)
    step = values[1] - values[0]
    if values != list(range(values[0], values[-1] + 1, step)):
        return ", ".join(texts)
    return f"{texts[0]} to {texts[-1]}" if step == 1 else f"multiples of {step}, {texts[0]} to {texts[-1]}"
