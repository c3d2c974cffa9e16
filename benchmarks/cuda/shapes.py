"""Shapes as the benchmarks are given them: "B8 S32768 H32/8 D128"."""

import typer


def numbers(shape: str) -> dict[str, int]:
    """batch, seqlen, heads, kv_heads and head_dim."""
    try:
        batch, keys, heads, dim = shape.split()
        queries, kv_heads = heads[1:].split("/")
        if (batch[0], keys[0], heads[0], dim[0]) != ("B", "S", "H", "D"):
            raise ValueError
        values = [int(x) for x in (batch[1:], keys[1:], queries, kv_heads, dim[1:])]
    except (ValueError, IndexError):
        raise typer.BadParameter(f"{shape}; allowed: as in 'B8 S32768 H32/8 D128'") from None
    return dict(zip(("batch", "seqlen", "heads", "kv_heads", "head_dim"), values, strict=True))
