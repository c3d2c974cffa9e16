"""Whole-sequence attention on CUDA tensors: accuracy, bits (P2), graphs and no waiting (P6), autograd, operators.

Needs a GPU that the backend runs on; docs/cuda.md says how these tests are run there.
"""

import warnings

import pytest
import torch
from attention_reference import assert_same_bytes, assert_within, attention, run
from cuda_attention_testing import GPU, NAMES, dense, ends_of, needs_gpu, of_sequence, tensors, varlen

from fold_attention import fold_attn_func, fold_attn_varlen_func, supports

pytestmark = needs_gpu
ops = torch.ops.fold_attention


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window": (100, -1)},
        {"window": (37, 60)},
        {"causal": True, "scale": 0.3},
        {"causal": True, "sinks": True},
        {"causal": True, "window": (128, 0), "sinks": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(300, 300), (77, 411), (411, 77)], ids=str)
def test_errors_of_masks_scales_and_sinks(dim, options, lengths):
    """At most 1.05 times the error of the ordinary implementation."""
    given = tensors(2, lengths[0], lengths[1], 4, 2, dim)
    options = dict(options)
    sinks = torch.randn(4, device=GPU) if options.pop("sinks", False) else None
    with_sinks = {} if sinks is None else {"sinks": sinks}
    wide = {} if sinks is None else {"sinks": sinks.double()}
    exact = run(attention, *(x.double() for x in given), **wide, **options)
    plain = run(attention, *given, **with_sinks, **options)
    ours = run(dense, *given, **with_sinks, **options)
    for name, got, other, want in zip(NAMES, ours, plain, exact, strict=False):
        if name not in ("lse", "dsinks"):
            assert_within(1.05, got, other, want, name)


def test_error_of_the_sinks_gradient():
    """One number per head, so many heads for the ratio of two errors to mean something."""
    given = tensors(2, 40, 40, 256, 32, 64)
    sinks = torch.randn(256, device=GPU)
    exact = run(attention, *(x.double() for x in given), sinks=sinks.double(), causal=True)
    plain = run(attention, *given, sinks=sinks, causal=True)
    assert_within(1.05, run(dense, *given, sinks=sinks, causal=True)[5], plain[5], exact[5], "dsinks")


def packed(lengths, behind=0):
    """q, k, v, dout of sequences one behind the other, and cu_seqlens; `behind` more rows hold NaN."""
    total = sum(lengths) + behind
    given = [x[0] for x in tensors(1, total, total, 6, 3, 128)]
    for x in given:
        x[sum(lengths) :] = torch.nan
    return *given, ends_of(lengths)


def test_nothing_behind_the_last_sequence_is_read():
    """FA#1745, FA#2374: its rows get zeros, and the others the bytes that they have without them."""
    lengths = (1, 0, 129, 63, 300)
    total = sum(lengths)
    *given, ends = packed(lengths, behind=7)
    with_more = run(varlen(ends, ends), *given, causal=True)
    without = run(varlen(ends, ends), *(x[:total] for x in given), causal=True)
    rows = slice(0, total)
    for name, a, b in zip(NAMES, *(of_sequence(x, rows, rows) for x in (with_more, without)), strict=False):
        assert_same_bytes(a, b, name)
    for name in ("out", "dq", "dk", "dv"):
        assert not with_more[NAMES.index(name)][total:].any(), name
    assert (with_more[1][:, total:] == -torch.inf).all()


def test_a_captured_step_serves_other_lengths():
    """P6: forward and backward of packed sequences in one graph; cu_seqlens change between replays."""
    lengths = ((100, 28, 0, 200), (0, 150, 150, 28), (328, 0, 0, 0))
    q, k, v, dout, ends = packed(lengths[0])
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())

    def step():
        out = fold_attn_varlen_func(q, k, v, ends, ends, causal=True)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for some in lengths:
        ends.copy_(torch.tensor([0, *some]).cumsum(0))
        graph.replay()
        for name, a, b in zip(("out", "dq", "dk", "dv"), results, step(), strict=True):
            assert_same_bytes(a, b, f"{name} of {some}")


def test_no_call_waits_for_the_device():
    q, k, v, dout, ends = packed((100, 200))
    try:
        with warnings.catch_warnings():  # that the mode does not see every way of waiting
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        run(varlen(ends, ends), q, k, v, dout, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_opcheck():
    q, k, v, dout = tensors(2, 70, 90, 4, 2, 64)
    options = (None, True, -1, -1)
    torch.library.opcheck(ops.forward.default, (*(x.requires_grad_() for x in (q, k, v)), None, None, None, *options))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = ops.forward(q, k, v, None, None, None, *options)
    torch.library.opcheck(ops.backward.default, (dout, q, k, v, None, None, None, *options, out, lse))


def test_gradients_with_strides_that_are_no_rows():
    """The gradient of a sum has strides of 0; one that starts off a 16-byte boundary is copied, too."""
    q, k, v, _ = tensors(1, 64, 64, 2, 2, 64)
    leaves = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    out = fold_attn_func(q, k, v, causal=True)
    ones = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    odd = torch.ones(out.numel() + 1, dtype=out.dtype, device=GPU)[1:].view(out.shape)
    for given in (torch.ones((), dtype=out.dtype, device=GPU).expand(out.shape), odd):
        for a, b in zip(torch.autograd.grad(out, leaves, given, retain_graph=True), ones, strict=True):
            assert_same_bytes(a, b)


def test_head_dim_256_has_no_gradient():
    """And its forward needs none: it is refused before anything runs backward."""
    q, k, v, _ = tensors(1, 64, 70, 2, 1, 256)
    assert supports("attention_forward", device="cuda", head_dim=256) == (True, None)
    fold_attn_func(q, k, v)
    with pytest.raises(ValueError, match="head_dim=256; supported on cuda: 64, 96, 128, and without a gradient 256"):
        fold_attn_func(q.requires_grad_(), k, v)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dim": 80}, "head_dim=80; supported on cuda: 64, 96, 128"),
        ({"dtype": torch.float32}, "q.dtype=float32; supported: bfloat16, float16"),
    ],
)
def test_what_cannot_be_honoured_is_said(change, text):
    dim, dtype = change.get("dim", 64), change.get("dtype", torch.bfloat16)
    q, k, v, _ = tensors(1, 8, 8, 2, 2, dim, dtype=dtype)
    with pytest.raises((ValueError, TypeError), match=text):
        fold_attn_func(q, k, v)
    yes, reason = supports("attention", device="cuda", head_dim=dim, dtype=dtype)
    assert not yes
    assert text.split("; ")[1] in str(reason)
