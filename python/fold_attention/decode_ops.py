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
    lib.decode(q, storage, layout, None, None, None, block_table, seqlens, *options, None, 0.0, *_for_library(results))
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
    keys: tuple[Tensor | None, ...] = (k, v, slot_mapping)
    if q.is_cuda:  # tables are not read by the host: they are updated on the device, and the two kernels follow
        starts, after, q_lens, slots = _step_on_device(q, layout, block_table, seqlens, q_lens, slot_mapping)
        lib.cache_write(storage, layout, k, v, block_table, seqlens, starts, slots)
        keys, seqlens = (None, None, None), after
    options = (q_lens, tree, depth, sinks, softmax_scale, window_left, splits)
    lib.decode(q, storage, layout, *keys, block_table, seqlens, *options, None, 0.0, *_for_library(results))
    return results


def _step_on_device(
    q: Tensor,
    layout: Sequence[int],
    block_table: Tensor,
    seqlens: Tensor,
    q_lens: Tensor | None,
    slot_mapping: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """cu_seqlens (B + 1,), keys after the step (B,), tokens (B,) and slots (B T,) of a step, as decode_step of the C++
    API finds them. A request without keys whose first page id is negative is padding."""
    batch, tokens = q.shape[:2]
    starts = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=q.device)
    counts = torch.full_like(seqlens, tokens) if q_lens is None else q_lens
    counts = counts.masked_fill((seqlens == 0) & (block_table[:, 0] < 0), 0)
    if slot_mapping is not None:
        counts = torch.minimum(counts, (slot_mapping.view(batch, tokens) >= 0).sum(1, dtype=torch.int32))
    elif q_lens is not None:
        at = torch.arange(tokens, device=q.device)
        position = seqlens[:, None] + at
        page = (position // layout[2]).clamp(max=block_table.shape[1] - 1)
        slots = block_table.gather(1, page).long() * layout[2] + position % layout[2]
        slot_mapping = slots.masked_fill(at >= counts[:, None], -1).flatten()
    return starts, seqlens + counts, counts, slot_mapping


decode_step.register_fake(_decode_fake)


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


def _for_library(results: Results) -> tuple[Tensor | None, ...]:
    out, lse, kept_fraction, dropped_mass, recomputed, bytes_read = results
    if kept_fraction.ndim == 1:
        return out, lse, None, None, None, None
    return out, lse, kept_fraction, dropped_mass, recomputed.view(torch.uint8), bytes_read
