"""torch custom operators on a paged cache: kernels and fake kernels.

Sizes: B requests, T query tokens each, H query heads, HK KV heads, D head dim; without the axis T, a query's and its
results', T is 1. `storage` is (pages, bytes) uint8 and
`layout` says what its bytes are: (n_kv_heads, head_dim, page_size, k_bits, v_bits, tail). Values are checked by the
library, before anything is written.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fold_attention import workspaces
from fold_attention._lib import lib
from fold_attention.dispatch import is_watched, wants_gradient

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
OptionalResults = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Asked = tuple[torch.dtype, bool, bool, Tensor | None]  #: of out; whether info, whether lse is wanted; where out may go


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
    """Attention of each request's newest tokens, q (B, [T,] H, D).

    Returns out (B, [T,] H, D), lse (B, H[, T]) and, empty unless `info`, kept_fraction, dropped_mass and recomputed
    (B, [T,] H), bytes_read (B, [T,] HK).
    """
    results = _results(q, layout, out_dtype, info)
    options = (q_lens, tree, depth, sinks, softmax_scale, window_left, splits)
    _run(results, None, q, storage, layout, None, None, None, block_table, seqlens, *options)
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
    _run(results, None, q, storage, layout, k, v, slot_mapping, block_table, seqlens, *options)
    return results


decode_step.register_fake(_decode_fake)


# Calls that nobody watches, and from which no gradient could be asked, go to the library by themselves.


def run_cache_write(storage: Tensor, layout: Sequence[int], k: Tensor, v: Tensor, *rest: Tensor | None) -> None:
    """`cache_write`."""
    write = cache_write if is_watched(k, v) else lib.cache_write
    write(storage, layout, k, v, *rest)


def run_decode(asked: Asked, q: Tensor, storage: Tensor, layout: Sequence[int], *inputs: Any) -> OptionalResults:
    """`decode`; what is not asked for may be None, or empty. Out is the given one if that was possible."""
    out_dtype, info, _, out = asked
    if is_watched(q, out) or wants_gradient(q):
        results: OptionalResults = decode(q, storage, layout, *inputs, out_dtype, info)
        return results
    results = _wanted_results(asked, q, layout)
    workspaces.keep(q, _run(results, workspaces.kept(q), q, storage, layout, None, None, None, *inputs))
    return results


def run_decode_step(
    asked: Asked, q: Tensor, storage: Tensor, layout: Sequence[int], k: Tensor, v: Tensor, *inputs: Any
) -> OptionalResults:
    """`decode_step`; what is not asked for may be None, or empty. Out is the given one if that was possible."""
    out_dtype, info, _, out = asked
    if is_watched(q, k, v, out) or wants_gradient(q, k, v):
        results: OptionalResults = decode_step(q, storage, layout, k, v, *inputs, out_dtype, info)
        return results
    results = _wanted_results(asked, q, layout)
    workspaces.keep(q, _run(results, workspaces.kept(q), q, storage, layout, k, v, *inputs))
    return results


def _run(results: OptionalResults, workspace: Tensor | None, *arguments: Any) -> int:
    """Returns the bytes of a workspace that would have done, where one was needed and this one is too small."""
    out, lse, kept_fraction, dropped_mass, recomputed, bytes_read = results
    if recomputed is None or recomputed.ndim == 1:  # not asked for
        info: tuple[Tensor | None, ...] = (None, None, None, None)
    else:
        info = (kept_fraction, dropped_mass, recomputed.view(torch.uint8), bytes_read)
    wanted: int = lib.decode(*arguments, None, 0.0, out, lse, *info, workspace)
    return wanted


def _wanted_results(asked: Asked, q: Tensor, layout: Sequence[int]) -> OptionalResults:
    out_dtype, info, want_lse, out = asked
    if out is None or out.stride(-1) != 1:
        out = torch.empty_like(q, dtype=out_dtype, memory_format=torch.contiguous_format)
    else:
        torch.autograd.graph.increment_version(out)  # the library writes unseen
    lse = q.new_empty(_lse_shape(q), dtype=torch.float32) if info or want_lse else None
    return out, lse, *(_new_info(q, layout) if info else (None,) * 4)


def _results(q: Tensor, layout: Sequence[int], out_dtype: torch.dtype, info: bool) -> Results:
    """All tensors, as operators return them."""
    out, lse = q.new_empty(q.shape, dtype=out_dtype), q.new_empty(_lse_shape(q), dtype=torch.float32)
    return out, lse, *_new_info(q, layout, info)


def _new_info(q: Tensor, layout: Sequence[int], wanted: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of no size if not wanted."""
    rows = q.shape[:-1] if wanted else (0,)
    heads = (*q.shape[:-2], layout[0]) if wanted else (0,)
    return (
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty(rows, dtype=torch.bool),
        q.new_empty(heads, dtype=torch.int64),
    )


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    b, *t, h, _ = q.shape
    return (b, h, *t)
