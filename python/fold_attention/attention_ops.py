"""torch custom operators of whole-sequence attention: kernels, fake kernels and the gradient.

Sizes: B sequences, S rows of one, T rows of all, H query heads, Hk KV heads, D head dim. With `cu_seqlens_q` and
`cu_seqlens_k` (B + 1,) int32 the sequences are packed: q is (T, H, D), k and v (T, Hk, D), lse (H, T). Without them
q is (B, Sq, H, D), k and v (B, Sk, Hk, D), lse (B, H, Sq). `window_left` and `window_right` are -1 where unlimited.
Values are checked by the library, before anything is written.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fold_attention._lib import lib
from fold_attention.dispatch import is_watched, wants_gradient
from fold_attention.errors import bad_value
from fold_attention.support import supports


def lse_shape(q: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    if cu_seqlens is None:
        if q.ndim != 4:
            raise bad_value("q.ndim", q.ndim, "allowed: 4, (batch, seqlen, heads, head_dim)")
        return (q.shape[0], q.shape[2], q.shape[1])
    if q.ndim != 3:
        raise bad_value("q.ndim", q.ndim, "allowed: 3, (total_q, heads, head_dim)")
    return (q.shape[1], q.shape[0])


@torch.library.custom_op("fold_attention::forward_out", mutates_args=("out", "lse"))
def forward_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Writes out (as q) and lse (fp32, natural log)."""
    lib.attention_forward(
        q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_left, window_right, out, lse
    )


@torch.library.custom_op("fold_attention::forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
) -> tuple[Tensor, Tensor]:
    """Returns out (as q, contiguous) and lse (fp32, natural log)."""
    return _forward(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_left, window_right)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    out, lse = _forward_fake(q, k, v, sinks, cu_seqlens_q)
    lib.attention_forward(q, k, v, sinks, cu_seqlens_q, *rest, out, lse)
    return out, lse


@forward.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, sinks: Any, cu_seqlens_q: Any, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(lse_shape(q, cu_seqlens_q), dtype=torch.float32)


@torch.library.custom_op("fold_attention::backward", mutates_args=())
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv (as q, k, v, contiguous) and dsinks (H,) fp32, empty where there are no sinks."""
    options = (softmax_scale, causal, window_left, window_right)
    return _backward(dout, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *options, out, lse)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dsinks = _backward_fake(dout, q, k, v, sinks)
    dout = dout if _rows_fit(dout) else dout.clone(memory_format=torch.contiguous_format)
    lib.attention_backward(dout, q, k, v, sinks, *rest, dq, dk, dv, None if sinks is None else dsinks)
    return dq, dk, dv, dsinks


def _rows_fit(dout: Tensor) -> bool:
    """An incoming gradient may have any strides (those of a sum are all 0); the library wants contiguous channels, and
    on a GPU rows that start at multiples of 16 bytes."""
    if dout.stride(-1) != 1 or not dout.is_cuda:
        return dout.stride(-1) == 1
    return dout.data_ptr() % 16 == 0 and not any(stride * dout.element_size() % 16 for stride in dout.stride()[:-1])


@backward.register_fake
def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0 if sinks is None else sinks.shape[0], dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


@cache
def _no_gradient(head_dim: int, device: torch.device) -> str | None:
    """None, or why a forward on a GPU has no gradient."""
    return supports("attention", head_dim=head_dim, device=device)[1]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *options = inputs
    if q.is_cuda and (reason := _no_gradient(int(q.shape[-1]), q.device)) is not None:
        raise ValueError(reason)
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, out, lse)
    ctx.options = options


def _gradient(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
    tensors = (dout, q, k, v, sinks)
    by_operator = is_watched(*tensors) or wants_gradient(*tensors)  # which says that there is no second derivative
    run = backward if by_operator else _backward
    dq, dk, dv, dsinks = run(*tensors, cu_seqlens_q, cu_seqlens_k, *ctx.options, out, lse)
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None, None, None


forward.register_autograd(_gradient, setup_context=_setup_context)


# Calls that nobody watches go to the library by themselves.


class _Attention(torch.autograd.Function):
    """`forward`, differentiable."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_gradient)


def run_forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """`forward`."""
    run: Any = _forward
    if is_watched(q, k, v, sinks):
        run = forward
    elif wants_gradient(q, k, v, sinks):
        run = _Attention.apply
    out, lse = run(q, k, v, sinks, *rest)
    return out, lse


def run_forward_out(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> None:
    """`forward_out`."""
    run = forward_out if is_watched(q, k, v, sinks) else lib.attention_forward
    run(q, k, v, sinks, *rest)
