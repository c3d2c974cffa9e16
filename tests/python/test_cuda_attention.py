"""Whole-sequence attention on CUDA tensors: accuracy, bits (P2), graphs and no waiting (P6), autograd, operators.

Needs a GPU that the backend runs on; docs/cuda.md says how these tests are run there.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from attention_reference import assert_same_bytes, assert_within, attention, run

from fold_attention import fold_attn_func, fold_attn_varlen_func, supports

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not supports("attention", device="cuda")[0], reason="no GPU, or no CUDA backend"
)
GPU = torch.device("cuda:0")
ops = torch.ops.fold_attention
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def tensors(batch, sq, sk, heads, kv_heads, dim, dtype=torch.bfloat16):
    """q, k, v and dout."""
    sizes = ((sq, heads), (sk, kv_heads), (sk, kv_heads), (sq, heads))
    return [torch.randn(batch, s, h, dim, dtype=dtype, device=GPU) for s, h in sizes]


def library(q, k, v, *, sinks=None, scale=None, causal=False, window=(-1, -1)):
    return fold_attn_func(q, k, v, softmax_scale=scale, causal=causal, window_size=window, sinks=sinks, return_lse=True)


def sdpa(q, k, v, causal):
    """torch's fused attention, which masks causally only where the lengths are equal."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(
        1, 2
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(2, 512, 512, 4, 2, 64), (1, 1021, 1021, 6, 6, 96), (1, 2048, 2048, 8, 2, 128), (3, 129, 129, 4, 1, 128)],
    ids=str,
)
def test_errors_beside_torch(shape, dtype, causal):
    """At most 1.05 times the error of torch's fused kernels, forward and gradients, on the same inputs."""
    batch, sq, sk, heads, kv_heads, dim = shape
    given = tensors(batch, sq, sk, heads, kv_heads, dim, dtype)
    exact = run(attention, *(x.double() for x in given), causal=causal)
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    plain = sdpa(q, k, v, causal)
    theirs = (plain.detach(), None, *torch.autograd.grad(plain, (q, k, v), given[3]))
    ours = run(library, *given, causal=causal)
    for name, got, other, want in zip(NAMES, ours, theirs, exact, strict=False):
        if other is not None:
            assert_within(1.05, got, other, want, name)
    torch.testing.assert_close(ours[1].double(), exact[1], rtol=2**-21, atol=2**-21)


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
    ours = run(library, *given, **with_sinks, **options)
    for name, got, other, want in zip(NAMES, ours, plain, exact, strict=False):
        if name not in ("lse", "dsinks"):
            assert_within(1.05, got, other, want, name)


def test_error_of_the_sinks_gradient():
    """One number per head, so many heads for the ratio of two errors to mean something."""
    given = tensors(2, 40, 40, 256, 32, 64)
    sinks = torch.randn(256, device=GPU)
    exact = run(attention, *(x.double() for x in given), sinks=sinks.double(), causal=True)
    plain = run(attention, *given, sinks=sinks, causal=True)
    assert_within(1.05, run(library, *given, sinks=sinks, causal=True)[5], plain[5], exact[5], "dsinks")


def packed(lengths, heads=6, kv_heads=3, dim=128, behind=0):
    """q, k, v, dout of sequences one behind the other, and cu_seqlens; `behind` more rows hold NaN."""
    total = sum(lengths) + behind
    q, k, v, dout = (x[0] for x in tensors(1, total, total, heads, kv_heads, dim))
    for x in (q, k, v, dout):
        x[total - behind :] = torch.nan
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(GPU)
    return q, k, v, dout, ends


def varlen(ends, **options):
    return lambda q, k, v, sinks=None: fold_attn_varlen_func(q, k, v, ends, ends, return_lse=True, **options)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"causal": True, "window_size": (90, 0)}], ids=str)
def test_a_packed_sequence_has_the_bits_it_has_alone(dim, options):
    """P2, gradients included: at every position, beside sequences of any length, and NaN behind the last."""
    lengths = (1, 0, 129, 63, 300, 64, 1, 257, 0)
    q, k, v, dout, ends = packed(lengths, dim=dim, behind=7)
    results = run(varlen(ends, **options), q, k, v, dout)
    window = options.get("window_size", (-1, -1))
    for index, length in enumerate(lengths):
        if length == 0:
            continue
        rows = slice(int(ends[index]), int(ends[index]) + length)
        alone = run(
            lambda *x, **o: library(*x, causal=options.get("causal", False), window=window),
            *(x[None, rows] for x in (q, k, v, dout)),
        )
        for name, all_rows, one in zip(NAMES, results, alone, strict=False):
            part = all_rows[:, rows] if name == "lse" else all_rows[rows]
            assert_same_bytes(part, one[0], f"{name} of sequence {index}")
    assert not results[0][sum(lengths) :].any()


def test_a_sequence_in_a_batch_has_the_bits_it_has_alone_and_again():
    """P2: 5 repeats, and each sequence on its own."""
    given = tensors(7, 333, 333, 8, 2, 64)
    all_of_them = run(library, *given, causal=True)
    for _ in range(5):
        for name, a, b in zip(NAMES, run(library, *given, causal=True), all_of_them, strict=False):
            assert_same_bytes(a, b, name)
    for index in range(7):
        alone = run(library, *(x[index : index + 1] for x in given), causal=True)
        for name, one, many in zip(NAMES, alone, all_of_them, strict=False):
            assert_same_bytes(one[0], many[index], f"{name} of sequence {index}")


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
        run(varlen(ends, causal=True), q, k, v, dout)
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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dim": 80}, "head_dim=80; supported on cuda: 64, 96, 128"),
        ({"dtype": torch.float32}, "q.dtype=float32; supported: bfloat16, float16"),
    ],
)
def test_what_cannot_be_honoured_is_said(change, text):
    dim, dtype = change.get("dim", 64), change.get("dtype", torch.bfloat16)
    q, k, v, _ = tensors(1, 8, 8, 2, 2, dim, dtype)
    with pytest.raises((ValueError, TypeError), match=text):
        fold_attn_func(q, k, v)
    yes, reason = supports("attention", device="cuda", head_dim=dim, dtype=dtype)
    assert not yes
    assert text.split("; ")[1] in str(reason)
