"""Attention written out: the fp64 reference, the ordinary implementation it is compared with, and the rule between."""

import math

import torch
from torch import Tensor


def visible(sq: int, sk: int, causal: bool = False, window: tuple[int | None, int | None] = (-1, -1)) -> Tensor:
    """(Sq, Sk) bool: query i sits at key i + Sk - Sq; the window counts keys on both sides of it, inclusive."""
    distance = torch.arange(sk)[None, :] - (torch.arange(sq)[:, None] + sk - sq)
    left, right = (math.inf if side is None or side < 0 else side for side in window)
    return (distance >= -left) & (distance <= (min(right, 0) if causal else right))


def attention(q, k, v, *, scale=None, causal=False, window=(-1, -1), sinks=None):
    """q (B, Sq, H, D), k and v (B, Sk, Hk, D) -> out (B, Sq, H, D), lse (B, H, Sq); differentiable.

    In float64 this is the reference. In a 16-bit type it is the ordinary implementation: products rounded to that type,
    softmax in float32 and rounded to it.
    """
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if logits.dtype != torch.float64:
        logits = logits.float()
    hidden = ~visible(q.shape[1], k.shape[1], causal, window).to(logits.device)
    logits = logits.masked_fill(hidden, -math.inf)
    if sinks is not None:
        column = sinks.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=-1)
    lse = torch.logsumexp(logits, dim=-1)
    seen = lse > -math.inf
    p = (logits - torch.where(seen, lse, 0.0)[..., None]).exp()[..., : k.shape[1]].to(v.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse


def run(function, *tensors, sinks=None, **options):
    """tensors q, k, v, dout -> out, lse and the gradients (dq, dk, dv[, dsinks]) of function at them."""
    *qkv, dout = tensors
    leaves = [x.detach().requires_grad_() for x in (*qkv, *(() if sinks is None else (sinks,)))]
    out, lse = function(*leaves[:3], sinks=leaves[3] if sinks is not None else None, **options)
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout))


def assert_same_bytes(a: Tensor, b: Tensor, what: str = "") -> None:
    """Equal to the byte (NaN equals the same NaN); the message names the first difference and both values."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype), what
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differ = (a.contiguous().view(integer) != b.contiguous().view(integer)).nonzero()
    if len(differ):
        first = tuple(differ[0].tolist())
        raise AssertionError(f"{what}: {len(differ)} differ, first at {first}: {a[first].item()!r} {b[first].item()!r}")


def error(x: Tensor, exact: Tensor) -> float:
    """Root of the summed squared error, after the same places were found infinite or NaN."""
    x = x.double()
    assert torch.equal(x.isnan(), exact.isnan()), "NaN in other places"
    assert torch.equal(x.isinf(), exact.isinf()), "infinity in other places"
    finite = exact.isfinite()
    return float((x[finite] - exact[finite]).square().sum().sqrt())


def assert_within(factor: float, x: Tensor, ordinary: Tensor, exact: Tensor, what: str) -> None:
    """The accuracy rule: at most `factor` times the ordinary implementation's error on the same inputs, where no
    implementation has to beat the correctly rounded result."""
    rounded = error(exact.to(x.dtype), exact)
    allowed = factor * max(error(ordinary, exact), rounded)
    got = error(x, exact)
    assert got <= allowed, f"{what}: error {got:.3e}, allowed {allowed:.3e} (rounding alone {rounded:.3e})"
