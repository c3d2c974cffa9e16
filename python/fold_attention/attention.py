"""Attention over whole sequences: the training entry points, with the signatures that users of flash-attn know."""

from numbers import Integral, Real
from types import NoneType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fold_attention.attention_ops import lse_shape, run_forward, run_forward_out
from fold_attention.errors import bad_type, bad_value

#: A Tensor, or two of them with `return_lse`: which, only the caller's arguments say.
Output: TypeAlias = Any


def fold_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    out: Tensor | None = None,
) -> Output:
    """Attention of every query over the keys it may see; differentiable in q, k, v and sinks.

    Gradients and outputs are the same bits over repeats, alone or in a batch, and for any number of threads.

    Args:
        q: (B, Sq, H, D), bfloat16, float16 or float32. The last dimension is contiguous, other strides are free. On a
            GPU: bfloat16 or float16, D 64, 96 or 128, and every row starts at a multiple of 16 bytes.
        k, v: (B, Sk, Hk, D), dtype of q. Query head h reads KV head h // (H / Hk).
        softmax_scale: factor of the logits; 1 / sqrt(D) by default.
        causal: query i sees keys up to i + Sk - Sq (aligned at the bottom right).
        window_size: (left, right) keys that query i sees beside key i + Sk - Sq, inclusive; -1 or None: no limit.
        sinks: (H,) one extra logit per head (natural log, not scaled), in the denominator only. `learnable_sink` is
            the same argument.
        return_lse: also return lse. `return_attn_probs=True` means the same; probabilities are never formed.
        out: where to write the output; not where a gradient is needed.
        deterministic, num_splits, pack_gqa, sm_margin: accepted, and without effect on any bit.
        dropout_p, softcap, alibi_slopes: only the values that switch them off are supported.

    Returns:
        out (B, Sq, H, D), dtype of q; with `return_lse` also lse (B, H, Sq), float32, natural log, which carries no
        gradient. A query that sees no key has out 0, lse -inf (with a sink too) and gradients 0.

    Raises:
        ValueError, TypeError: for what cannot be honoured, as *what=got; allowed*.
    """
    _refuse(dropout_p=(dropout_p, 0.0), softcap=(softcap, 0.0), alibi_slopes=(alibi_slopes, None))
    return _attention(
        (q, k, v),
        (None, None),
        softmax_scale,
        causal,
        window_size,
        _one_of(sinks, learnable_sink),
        out,
        return_lse or return_attn_probs,
    )


def fold_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    sinks: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    out: Tensor | None = None,
) -> Output:
    """`fold_attn_func` for sequences packed one behind the other; each gets the bits it would get alone.

    Args:
        q: (Tq, H, D); k, v: (Tk, Hk, D).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, contiguous, from 0, not decreasing, at most Tq and Tk: sequence b is
            rows cu_seqlens[b] to cu_seqlens[b + 1]. On a GPU nobody looks at them before the kernels do, which cut them
            to the tensors' rows.
        max_seqlen_q, max_seqlen_k: accepted and not used; the lengths are those of cu_seqlens.
        block_table, seqused_q, seqused_k: only None is supported.
        The others as in `fold_attn_func`.

    Returns:
        out (Tq, H, D); with `return_lse` also lse (H, Tq), float32, natural log.
    """
    _refuse(
        dropout_p=(dropout_p, 0.0),
        softcap=(softcap, 0.0),
        alibi_slopes=(alibi_slopes, None),
        block_table=(block_table, None),
        seqused_q=(seqused_q, None),
        seqused_k=(seqused_k, None),
    )
    for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _require_tensor(name, value)
    return _attention(
        (q, k, v),
        (cu_seqlens_q, cu_seqlens_k),
        softmax_scale,
        causal,
        window_size,
        _one_of(sinks, learnable_sink),
        out,
        return_lse or return_attn_probs,
    )


def _attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    sinks: Tensor | None,
    out: Tensor | None,
    return_lse: bool,
) -> Output:
    for name, value in zip(("q", "k", "v"), qkv, strict=True):
        _require_tensor(name, value)
    if sinks is not None:
        _require_tensor("sinks", sinks)
        sinks = sinks.float()
    if not isinstance(causal, int):
        raise bad_type("causal", causal, "allowed: bool")
    if not isinstance(softmax_scale, (Real, torch.SymFloat, NoneType)):
        raise bad_type("softmax_scale", softmax_scale, "allowed: a number, or None for 1 / sqrt(head_dim)")
    options = (softmax_scale, bool(causal), *_window(window_size))
    if out is None:
        result, lse = run_forward(*qkv, sinks, *cu_seqlens, *options)
    else:
        _require_tensor("out", out)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*qkv, sinks, out)):
            raise bad_value("out", "a tensor", "allowed: None where a gradient is needed")
        q = qkv[0]
        lse = q.new_empty(lse_shape(q, cu_seqlens[0]), dtype=torch.float32)
        run_forward_out(*qkv, sinks, *cu_seqlens, *options, out, lse)
        result = out
    return (result, lse) if return_lse else result


def _refuse(**arguments: tuple[Any, Any]) -> None:
    """Each argument as (given, the one supported value)."""
    for name, (given, supported) in arguments.items():
        if given is not supported and (isinstance(given, Tensor) or given != supported):
            got = "a tensor" if isinstance(given, Tensor) else given
            raise bad_value(name, got, f"supported: {supported}")


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise bad_type(name, type(value).__name__, "allowed: torch.Tensor")


def _one_of(sinks: Tensor | None, learnable_sink: Tensor | None) -> Tensor | None:
    if sinks is not None and learnable_sink is not None:
        raise bad_value("learnable_sink", "a tensor", "allowed: None beside sinks, which is the same argument")
    return learnable_sink if sinks is None else sinks


def _window(window_size: tuple[int | None, int | None]) -> tuple[int, int]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise bad_value("window_size", window_size, "allowed: (left, right)")
    left, right = (-1 if side is None else side for side in window_size)
    if not isinstance(left, (Integral, torch.SymInt)) or not isinstance(right, (Integral, torch.SymInt)):
        raise bad_type("window_size", window_size, "allowed: whole numbers of keys, or None")
    return left, right
