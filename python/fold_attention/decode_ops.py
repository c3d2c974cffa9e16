"""torch custom operators on a paged cache: kernels and fake kernels.

Sizes: B requests, T query tokens each, H query heads, HK KV heads, D head dim. `storage` is (pages, bytes) uint8 and
`layout` says what its bytes are: (n_kv_heads, head_dim, page_size, k_bits, v_bits, tail). Values are checked by the
library, before anything is written.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fold_attention._lib import lib

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
OptionalResults = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@torch.library.custom_op("fold_attention::cache_write", mutates_args=("storage",))
def cache_write(
    storage: Tensor,
    layout: Sequence[int],
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    seqlens: Tensor,
    cu_seqlens: Tensor,
    slot_mapping: Tensor | None,
) -> None:
    """Appends packed tokens k, v (tokens, HK, D); `seqlens` (B,) are the keys before the call."""
    lib.cache_write(storage, layout, k, v, block_table, seqlens, cu_seqlens, slot_mapping)


@cache_write.register_fake
def _(*_args: object) -> None:
    return None


@torch.library.custom_op("fold_attention::decode", mutates_args=())
def decode(
    q: Tensor,
    storage: Tensor,
    layout: Sequence[int],
    block_table: Tensor,
    seqlens: Tensor,
    q_lens: Tensor | None,
    tree: Tensor | None,
    depth: Tensor | None,
    sinks: Tensor | None,
    softmax_scale: float,
    window_left: int,
    splits: int,
    out_dtype: torch.dtype,
    info: bool,
) -> Results:
    """Attention of each request's newest tokens, q (B, T, H, D).

    Returns out (B, T, H, D), lse (B, H, T) and, empty unless `info`, kept_fraction, dropped_mass and recomputed
    (B, T, H), bytes_read (B, T, HK).
    """
    results = _results(q, layout, out_dtype, info)
    options = (q_lens, tree, depth, sinks, softmax_scale, window_left, splits)
    _run(results, q, storage, layout, None, None, None, block_table, seqlens, *options)
    return results


@decode.register_fake
def _decode_fake(q: Tensor, storage: Tensor, layout: Sequence[int], *rest: Any) -> Results:
    out_dtype, info = rest[-2:]
    return _results(q, layout, out_dtype, info)


@torch.library.custom_op("fold_attention::decode_step", mutates_args=("storage",))
def decode_step(
    q: Tensor,
    storage: Tensor,
    layout: Sequence[int],
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor | None,
    block_table: Tensor,
    seqlens: Tensor,
    q_lens: Tensor | None,
    tree: Tensor | None,
    depth: Tensor | None,
    sinks: Tensor | None,
    softmax_scale: float,
    window_left: int,
    splits: int,
    out_dtype: torch.dtype,
    info: bool,
) -> Results:
    """Writes k, v (B T, HK, D) after the `seqlens` keys that each request holds, then `decode`."""
    results = _results(q, layout, out_dtype, info)
    options = (q_lens, tree, depth, sinks, softmax_scale, window_left, splits)
    _run(results, q, storage, layout, k, v, slot_mapping, block_table, seqlens, *options)
    return results


decode_step.register_fake(_decode_fake)


# An operator's dispatch takes the host longer than all the launches of a step. So a call that nobody traces, and from
# which no gradient could be asked, goes to the library by itself.


def run_decode(q: Tensor, *arguments: Any, want_lse: bool) -> OptionalResults:
    """`decode`; what is not asked for may be None, or empty."""
    if _needs_operator(q):
        results: OptionalResults = decode(q, *arguments)
        return results
    storage, layout, *inputs, out_dtype, info = arguments
    results = _wanted_results(q, layout, out_dtype, info, want_lse)
    _run(results, q, storage, layout, None, None, None, *inputs)
    return results


def run_decode_step(
    q: Tensor, storage: Tensor, layout: Sequence[int], k: Tensor, v: Tensor, *rest: Any, want_lse: bool
) -> OptionalResults:
    """`decode_step`; what is not asked for may be None, or empty."""
    if _needs_operator(q, k, v):
        results: OptionalResults = decode_step(q, storage, layout, k, v, *rest)
        return results
    *inputs, out_dtype, info = rest
    results = _wanted_results(q, layout, out_dtype, info, want_lse)
    _run(results, q, storage, layout, k, v, *inputs)
    return results


def _needs_operator(*tensors: Tensor) -> bool:
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.requires_grad:
            return True
    return torch.compiler.is_compiling()


def _run(results: OptionalResults, *arguments: Any) -> None:
    out, lse, kept_fraction, dropped_mass, recomputed, bytes_read = results
    info: tuple[Tensor | None, ...] = (None, None, None, None)
    if recomputed is not None and recomputed.ndim == 3:
        info = (kept_fraction, dropped_mass, recomputed.view(torch.uint8), bytes_read)
    lib.decode(*arguments, None, 0.0, out, lse, *info)


def _wanted_results(
    q: Tensor, layout: Sequence[int], out_dtype: torch.dtype, info: bool, want_lse: bool
) -> OptionalResults:
    if info:
        return _results(q, layout, out_dtype, info)
    b, t, h, _ = q.shape
    out = torch.empty_like(q, dtype=out_dtype, memory_format=torch.contiguous_format)
    return out, q.new_empty((b, h, t), dtype=torch.float32) if want_lse else None, None, None, None, None


def _results(q: Tensor, layout: Sequence[int], out_dtype: torch.dtype, info: bool) -> Results:
    b, t, h, d = q.shape
    rows, heads = ((b, t, h), (b, t, layout[0])) if info else ((0,), (0,))
    return (
        q.new_empty((b, t, h, d), dtype=out_dtype),
        q.new_empty((b, h, t), dtype=torch.float32),
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty(rows, dtype=torch.bool),
        q.new_empty(heads, dtype=torch.int64),
    )
