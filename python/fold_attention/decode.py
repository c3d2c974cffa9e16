"""Attention over a cache, and its partial sums."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fold_attention import decode_ops
from fold_attention._lib import lib
from fold_attention.errors import bad_type, bad_value, whole

if TYPE_CHECKING:
    from fold_attention.kv_cache import FoldKVCache

Depth = float | Tensor | None | Literal["cache"]
Window = tuple[int | None, int | None]
Info = Mapping[str, Tensor]
_INFO = ("kept_fraction", "dropped_mass", "recomputed", "bytes_read")


class Partial(NamedTuple):
    """A sum over a range of keys, in integers: partials of disjoint ranges add, in any order, to the bits of the whole.

    B requests, T tokens, H heads, D head dim (docs/numerics.md, section 7).
    """

    numerator: Tensor  #: (B, T, H, D) int64, rotated channels
    denominator: Tensor  #: (B, T, H, 3) int64: sums of weights (unit 2^-26), of weights times V's scales, visible keys
    grid: Tensor  #: (B, T, H, 3) float32: the declared reference Z (log2), the value grid E, the row's spread (log2)


def fold_attn_with_kvcache(
    q: Tensor,
    cache: "FoldKVCache",
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    ids: Sequence[int] | None = None,
    depth: Depth = "cache",
    tree: Tensor | None = None,
    q_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: Window | None = None,
    block_table: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    slot_mapping: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    return_info: bool = False,
    splits: int = 0,
    num_splits: int = 0,
    causal: bool = True,
    softcap: float = 0.0,
) -> Any:
    """Attention of each request's newest tokens over its cached keys, their own included.

    The bits of a request's result depend on its own keys, query and options alone.

    Args:
        q: (batch, n_heads, head_dim), or (batch, T, n_heads, head_dim) for the T newest tokens of each request;
            bfloat16, float16 or float32, last dimension contiguous. Query head h reads KV head
            h // (n_heads / n_kv_heads); token t sees the keys up to its own.
        cache: the pages, and the defaults of `depth`, `sinks`, `softmax_scale` and `window_size`.
        k, v: the tokens' keys and values, to be written first: (batch, n_kv_heads, head_dim), or with a T axis as q.
        ids: the requests, in q's order; all of them by default, in the order of their addition.
        depth: how far below the row's mass, in log2 of a key's weight, its V is still worth reading: about there it is
            left unread, and K and V are read less finely above it (docs/numerics.md, section 6). None: every V is
            read. A number, or a tensor that broadcasts to (batch, T, n_heads); finite.
        tree: the T tokens are a draft tree of at most 64 nodes, each behind its parent: a bool mask (batch, T, T) or
            (T, T), true where node i sees node j, itself included; or parents, integers (batch, T) or (T,), negative
            for a root. By default they are a chain.
        q_lens: (batch,) int32, how many of the T tokens a request has; the others are padding.
        sinks: (n_heads,) one extra logit per head (natural log), in the denominator only.
        window_size: (left, right): keys before its own that a row sees; right is without effect.
        block_table: (batch, max_pages) int32, page ids of requests that the caller manages in the pool; entries past
            a request's length are never read. `page_table` is the same argument. Needs `cache_seqlens`.
        cache_seqlens: (batch,) int32 or an int: keys before k and v are written; without k and v, all keys. Length 0
            is padding; with k and v, so is length 0 with a first page id below 0.
        slot_mapping: (batch * T,) int64: page * page_size + slot of each token of k, or -1 for padding, which comes
            last in a request. It must agree with `block_table`.
        out: where to write the output; its dtype is the output's. It may be q itself, but overlap no input otherwise.
        out_dtype: dtype of the output: the cache's `dtype` by default, else q's.
        splits: how many parts the keys are split into; changes no bits. `num_splits` is the same argument.
        return_softmax_lse: the same as return_lse. causal: must be True unless T is 1. softcap: must be 0.

    Returns:
        out, shape of q; a tuple of out and what else was asked for: lse (batch, n_heads) or (batch, n_heads, T),
        float32, natural log; info, a mapping of `kept_fraction` (keys whose V was read), `dropped_mass` (share of the
        softmax that belongs to the others), `recomputed` (bool: the sampled reference or the value grid was wrong and
        the row ran again), each (batch, n_heads) or (batch, T, n_heads), and `bytes_read` (batch, [T,] n_kv_heads)
        int64.
        A row without keys, and padding, has out 0 and lse -inf.

    Raises:
        ValueError, TypeError: for what cannot be honoured, as *what=got; allowed*, before anything is written.
    """
    _require_query(q, cache)
    batch, tokens = q.shape[0], q.shape[1] if q.ndim == 4 else 1
    table = _one_of(block_table, page_table)
    if not cache.storage.is_cuda:  # where it is, the library says so, and here time matters
        require_device(
            cache,
            q=q,
            k=k,
            v=v,
            tree=tree,
            q_lens=q_lens,
            depth=depth,
            sinks=sinks,
            block_table=table,
            cache_seqlens=cache_seqlens,
            slot_mapping=slot_mapping,
            out=out,
        )
    if table is None or ids is not None:
        _require_one_owner(table, ids, cache_seqlens, slot_mapping)
    if softcap != 0:
        raise bad_value("softcap", softcap, "supported: 0.0")
    if not causal and tokens != 1:
        raise bad_value("causal", causal, "supported: True for more than one token")
    if (k is None) != (v is None):
        raise bad_value("v" if v is None else "k", None, "k and v come together")
    options = (
        None if tree is None else _tree(tree, batch, tokens),
        _depth(depth, cache, q),
        _sinks(sinks, cache),
        _scale(softmax_scale, cache),
        cache.window_left if window_size is None else window_left(window_size),
        whole("splits", splits or num_splits),
    )
    want_lse = return_lse or return_softmax_lse
    asked = (_out_dtype(q, cache, out, out_dtype), return_info, want_lse, out)
    if k is not None and v is not None:
        rows = (_new_rows("k", k, batch, tokens), _new_rows("v", v, batch, tokens))
        if table is None:
            results = cache._step(q, tokens, *rows, ids, q_lens, options, asked)
        else:
            lengths = _lengths(cache_seqlens, q)
            where = (cache.storage, cache.layout)
            results = decode_ops.run_decode_step(
                asked, q, *where, *rows, slot_mapping, table, lengths, q_lens, *options
            )
    else:
        if slot_mapping is not None:
            raise bad_value("slot_mapping", "a tensor", "allowed: None without k and v")
        pages, lengths = cache.tables(ids) if table is None else (table, _lengths(cache_seqlens, q))
        results = decode_ops.run_decode(asked, q, cache.storage, cache.layout, pages, lengths, q_lens, *options)
    result = results[0]
    if out is not None and result is not out:
        result = out.copy_(result)
    if not (want_lse or return_info):
        return result
    returned: list[Any] = [result]
    if want_lse:
        returned.append(results[1])
    if return_info:
        returned.append(dict(zip(_INFO, results[2:], strict=True)))
    return tuple(returned)


def partial_attention(
    q: Tensor,
    cache: "FoldKVCache",
    begin: int,
    end: int,
    *,
    ids: Sequence[int] | None = None,
    depth: Depth = "cache",
    tree: Tensor | None = None,
    q_lens: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: Window | None = None,
    block_table: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    splits: int = 0,
) -> Partial:
    """The part of `fold_attn_with_kvcache` that the keys begin <= j < end of every request contribute.

    `begin` and `end` are multiples of 64, or at or past the request's length. Sinks are no keys: `finish` counts them.
    Other arguments as in `fold_attn_with_kvcache`; q (batch, n_heads, head_dim)
    counts as one token.
    """
    query = _query(q, cache)
    b, t, h, d = query.shape
    require_device(
        cache,
        q=q,
        tree=tree,
        q_lens=q_lens,
        depth=depth,
        block_table=block_table,
        cache_seqlens=cache_seqlens,
    )
    _require_one_owner(block_table, ids, cache_seqlens, None)
    pages, lengths = cache.tables(ids) if block_table is None else (block_table, _lengths(cache_seqlens, query))
    partial = Partial(
        q.new_empty((b, t, h, d), dtype=torch.int64),
        q.new_empty((b, t, h, 3), dtype=torch.int64),
        q.new_empty((b, t, h, 3), dtype=torch.float32),
    )
    lib.partial(
        query,
        cache.storage,
        cache.layout,
        pages,
        lengths,
        q_lens,
        None if tree is None else _tree(tree, b, t),
        _depth(depth, cache, q),
        _scale(softmax_scale, cache),
        cache.window_left if window_size is None else window_left(window_size),
        whole("splits", splits),
        whole("begin", begin),
        whole("end", end),
        *partial,
    )
    return partial


def add_partials(first: Partial, *others: Partial) -> Partial:
    """The sum of partials of the same rows over disjoint ranges of keys; the order is without effect.

    Grids that differ are of different queries, caches or options. On the CPU that raises ValueError; on a GPU, where
    nobody waits to look, such a row becomes a poisoned one: its grid is NaN, and `finish` returns NaN, not valid.
    """
    total = Partial(*(t.clone() for t in first))
    for other in others:
        lib.add_partials(*total, *other)
    return total


def finish(
    partial: Partial, *, sinks: Tensor | None = None, out_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises the sum over all keys of a request.

    Args:
        sinks: (n_heads,) as in `fold_attn_with_kvcache`; the cache's are not known here.

    Returns:
        out (B, T, H, D) with the bits of `fold_attn_with_kvcache`; lse (B, H, T) float32, natural log; valid (B, T, H)
        bool. A row whose sampled reference or value grid was wrong is not valid and NaN: `fold_attn_with_kvcache`
        computes it.
    """
    b, t, h, _ = partial.numerator.shape
    out = partial.numerator.new_empty(partial.numerator.shape, dtype=out_dtype)
    lse = partial.grid.new_empty((b, h, t))
    valid = partial.numerator.new_empty((b, t, h), dtype=torch.bool)
    lib.finish(*partial, sinks, out, lse, valid.view(torch.uint8))
    return out, lse, valid


def window_left(window_size: Window) -> int:
    """The left side of (left, right); -1 or None: no limit."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise bad_value("window_size", window_size, "allowed: (left, right)")
    return -1 if window_size[0] is None else whole("window_left", window_size[0])


def require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise bad_type(name, type(value).__name__, "allowed: torch.Tensor")


def require_device(cache: "FoldKVCache", **arguments: object) -> None:
    """Those that are tensors must be where the cache is."""
    on_gpu = cache.storage.is_cuda
    for name, value in arguments.items():
        # is_cuda is several times quicker than device.type
        if isinstance(value, Tensor) and (value.is_cuda != on_gpu or not (on_gpu or value.is_cpu)):
            raise bad_type(f"{name}.device", value.device.type, f"supported: {cache.device.type}")


def require_depth(depth: object) -> None:
    """A default depth: None or a finite number."""
    if depth is None:
        return
    if isinstance(depth, bool) or not isinstance(depth, (int, float)):
        raise bad_type("depth", type(depth).__name__, "allowed: None or a number; per call also a tensor")
    if not abs(depth) <= torch.finfo(torch.float32).max:
        raise bad_value("depth", depth, "allowed: None or a finite number (float32)")


def require_scale(scale: object) -> None:
    """None or a finite number other than 0."""
    if scale is None:
        return
    if not isinstance(scale, (int, float)):
        raise bad_type("softmax_scale", type(scale).__name__, "allowed: None or a number")
    if scale == 0 or not abs(scale) <= torch.finfo(torch.float32).max:
        raise bad_value("softmax_scale", scale, "allowed: None or a finite number (float32) other than 0")


def _query(q: Tensor, cache: "FoldKVCache") -> Tensor:
    """q as (B, T, H, D)."""
    _require_query(q, cache)
    return q if q.ndim == 4 else q.unsqueeze(1)


def _require_query(q: Tensor, cache: "FoldKVCache") -> None:
    require_tensor("q", q)
    if q.ndim not in (3, 4):
        allowed = "allowed: 3, (batch, n_heads, head_dim), or 4, with a token axis after batch"
        raise bad_value("q.ndim", q.ndim, allowed)
    if q.shape[-2] != cache.n_heads:
        raise bad_value("q.shape", tuple(q.shape), f"allowed: {cache.n_heads} heads, as the cache's n_heads")


def _new_rows(name: str, rows: Tensor, b: int, t: int) -> Tensor:
    """k or v of a step as (B T, HK, D)."""
    require_tensor(name, rows)
    if rows.ndim == 3 and t == 1:
        if rows.shape[0] == b:
            return rows
        rows = rows.unsqueeze(1)
    if rows.ndim != 4 or rows.shape[0] != b or rows.shape[1] != t:
        raise bad_value(f"{name}.shape", tuple(rows.shape), f"allowed: ({b}, {t}, n_kv_heads, head_dim), as q")
    return rows.flatten(0, 1)


def _out_dtype(q: Tensor, cache: "FoldKVCache", out: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise bad_type("out_dtype", type(out_dtype).__name__, "allowed: None or a torch.dtype")
    if out is None:
        return out_dtype or cache.dtype or q.dtype
    require_tensor("out", out)
    if out.shape != q.shape:
        raise bad_value("out.shape", tuple(out.shape), f"allowed: {tuple(q.shape)}, as q")
    if 0 in out.stride() and any(n > 1 and stride == 0 for n, stride in zip(out.shape, out.stride(), strict=True)):
        raise bad_value("out.stride", out.stride(), "must not be 0 in a tensor that is written")
    if out.get_device() != q.get_device():
        raise bad_type("out.device", out.device, f"allowed: {q.device}, as q")
    if out.requires_grad:
        raise bad_value("out.requires_grad", True, "allowed: False; what is cached carries no gradient")
    if out_dtype not in (None, out.dtype):
        raise bad_type("out.dtype", out.dtype, f"allowed: {out_dtype}, as out_dtype says")
    return out.dtype


def _depth(depth: Depth, cache: "FoldKVCache", q: Tensor) -> Tensor | None:
    if isinstance(depth, str) and depth == "cache":
        depth = cache.depth
    elif isinstance(depth, Tensor):
        if depth.dtype == torch.bool or depth.is_complex():
            raise bad_type("depth.dtype", depth.dtype, "allowed: floating-point or integer")
        # Rows are (B, H) for a query without token axis.
        return depth.unsqueeze(1).float() if q.ndim == 3 and depth.ndim == 2 else depth.float()
    if depth is None:
        return None
    if torch.compiler.is_compiling():  # nothing may be kept from a trace
        require_depth(depth)
        return q.new_full((1,), depth, dtype=torch.float32)
    return cache._depth_tensor(depth)


def _tree(tree: Tensor, b: int, t: int) -> Tensor:
    """Bit j of element (b, i) is set where node i sees node j."""
    require_tensor("tree", tree)
    mask = _ancestors(tree, t) if tree.dtype != torch.bool else tree
    if mask.shape not in ((b, t, t), (t, t)):
        raise bad_value("tree.shape", tuple(tree.shape), f"allowed: ({b}, {t}, {t}) bool or ({b}, {t}) parents")
    shifts = torch.arange(t, device=tree.device)
    return (mask.long() << shifts).sum(-1).expand(b, t).contiguous()


def _ancestors(parents: Tensor, t: int) -> Tensor:
    if parents.is_floating_point() or parents.ndim not in (1, 2) or parents.shape[-1] != t:
        got = f"{parents.dtype} {tuple(parents.shape)}"
        raise bad_value("tree", got, f"allowed: a bool mask, or integer parents (batch, {t})")
    if bool((parents >= torch.arange(t, device=parents.device)).any()):
        raise bad_value("tree", "a parent at or behind its node", "parents come before their nodes")
    mask = torch.eye(t, dtype=torch.bool, device=parents.device).expand(*parents.shape, t).clone()
    for i in range(t):
        parent = parents[..., i].long()
        inherited = torch.take_along_dim(mask, parent.clamp(min=0)[..., None, None], dim=-2).squeeze(-2)
        mask[..., i, :] |= inherited & (parent >= 0)[..., None]
    return mask


def _scale(softmax_scale: float | None, cache: "FoldKVCache") -> float:
    if softmax_scale is None:
        softmax_scale = cache.softmax_scale
    else:
        require_scale(softmax_scale)
    return 0.0 if softmax_scale is None else float(softmax_scale)  # 0: the library's word for 1 / sqrt(head_dim)


def _sinks(sinks: Tensor | None, cache: "FoldKVCache") -> Tensor | None:
    if sinks is None:
        return cache.sinks
    require_tensor("sinks", sinks)
    return sinks


def _require_one_owner(table: object, ids: object, cache_seqlens: object, slot_mapping: object) -> None:
    """Requests are named by ids, or live in pages of the caller's."""
    if table is not None and ids is not None:
        raise bad_value("ids", ids, "allowed: None beside block_table, whose rows are the requests")
    if table is None:
        for name, value in (("cache_seqlens", cache_seqlens), ("slot_mapping", slot_mapping)):
            if value is not None:
                got = "a tensor" if isinstance(value, Tensor) else value
                raise bad_value(name, got, "allowed: None without block_table")


def _one_of(block_table: Tensor | None, page_table: Tensor | None) -> Tensor | None:
    if block_table is not None and page_table is not None:
        raise bad_value("page_table", "a tensor", "allowed: None beside block_table, which is the same argument")
    table = page_table if block_table is None else block_table
    if table is not None:
        require_tensor("block_table", table)
    return table


def _lengths(cache_seqlens: Tensor | int | None, q: Tensor) -> Tensor:
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if isinstance(cache_seqlens, int):
        if not 0 <= cache_seqlens < 2**31:
            raise bad_value("cache_seqlens", cache_seqlens, "allowed: 0 to 2147483647")
        return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    if cache_seqlens is None:
        raise bad_value("cache_seqlens", None, "required beside block_table")
    raise bad_type("cache_seqlens", type(cache_seqlens).__name__, "allowed: torch.Tensor")
