"""Extreme inputs of attention on a GPU: very large and very small ones, zeros, rows and sequences that must not touch
others, rows whose gradient is known."""

import math

import pytest
import torch
from attention_reference import assert_within, attention, error, run
from cuda_attention_testing import GPU, NAMES, SameBytes, dense, ends_of, needs_gpu, of_sequence, tensors, varlen

pytestmark = needs_gpu
INPUTS = ("q", "k", "v", "dout")
# The power of 2 in each result for one in an input; the logits keep their size, since softmax_scale takes it out again.
POWERS = {
    "q": {"dq": -1},
    "k": {"dk": -1},
    "v": {"out": 1, "dq": 1, "dk": 1},
    "dout": {"dq": 1, "dk": 1, "dv": 1},
}


@pytest.mark.parametrize("exponent", [-100, -60, 60, 100])
@pytest.mark.parametrize("scaled", INPUTS)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_powers_of_two_pass_through(dim, scaled, exponent):
    """Scaled by 2^exponent, an input scales its results and changes no other bit."""
    given = tensors(2, 300, 300, 4, 2, dim)
    expected = run(dense, *given, causal=True)
    more = [x * 2.0**exponent if name == scaled else x for name, x in zip(INPUTS, given, strict=True)]
    scale = dim**-0.5 * (2.0**-exponent if scaled in "qk" else 1)
    results = run(dense, *more, causal=True, scale=scale)
    with SameBytes() as same:
        moved = [x * 2.0 ** (exponent * POWERS[scaled].get(name, 0)) for name, x in zip(NAMES, expected, strict=False)]
        same.compare(results, moved, f"{scaled} times 2^{exponent}")


@pytest.mark.parametrize("exponent", [-100, -60])
@pytest.mark.parametrize("scaled", ["q", "k"])
def test_logits_that_vanish(scaled, exponent):
    given = dict(zip(INPUTS, tensors(2, 300, 300, 4, 2, 128), strict=True))
    given[scaled] *= 2.0**exponent
    check_errors(list(given.values()))


def check_errors(given, factor=1.05, **options):
    """Beside the ordinary implementation's."""
    exact = run(attention, *(x.double() for x in given), causal=True, **options)
    plain = run(attention, *given, causal=True, **options)
    for name, x, other, want in zip(NAMES, run(dense, *given, causal=True, **options), plain, exact, strict=False):
        assert x.isfinite().all(), name
        if name != "lse":
            assert_within(factor, x, other, want, name)


@pytest.mark.parametrize("exponent", [12, 20, 60, 100])
@pytest.mark.parametrize("scaled", ["q", "k"])
def test_logits_beyond_any_resolution_are_never_silently_wrong(scaled, exponent):
    """One key holds a row's whole mass: out is its value, dv the sum of its rows' dout, and the other gradients vanish.
    lse in fp32 is too coarse to tell the backward so; rows where it is are NaN."""
    given = dict(zip(INPUTS, tensors(2, 300, 300, 2, 2, 128), strict=True))
    given[scaled] *= 2.0**exponent
    exact = run(attention, *(x.double() for x in given.values()), causal=True)
    out, _, *gradients = run(dense, *given.values(), causal=True)
    assert error(out, exact[0]) <= 1.1 * error(exact[0].bfloat16(), exact[0])
    for name, x, want in zip(NAMES[2:5], gradients, exact[2:], strict=True):
        size = {"dq": given["k"], "dk": given["q"], "dv": given["dout"]}[name].double().square().mean().sqrt()
        wrong = (x.double() - want).abs() > 2**-6 * (size + want.abs())
        print(f"{name}: NaN {int(x.isnan().sum())}, wrong {int(wrong.sum())} of {x.numel()}")
        assert not wrong.any(), name


@pytest.mark.parametrize("zero", [("q",), ("k",), ("v",), ("dout",), INPUTS], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_zeros(dim, zero):
    """What must be zero is; nothing else is harmed."""
    given = dict(zip(INPUTS, tensors(2, 300, 300, 4, 2, dim), strict=True))
    for name in zero:
        given[name] *= 0
    check_errors(list(given.values()))
    results = dict(zip(NAMES, run(dense, *given.values(), causal=True), strict=False))
    vanish = {"q": ("dk",), "k": ("dq",), "v": ("out", "dq", "dk"), "dout": ("dq", "dk", "dv")}
    for name in zero:
        for result in vanish[name]:
            assert not results[result].any(), result


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("where", INPUTS)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_a_poisoned_sequence_leaves_the_bytes_of_others_alone(dim, where, poison):
    lengths = (130, 1, 257, 64, 200)
    ends, starts = ends_of(lengths), [sum(lengths[:i]) for i in range(len(lengths))]
    packed = dict(zip(INPUTS, (x[0] for x in tensors(1, sum(lengths), sum(lengths), 4, 2, dim)), strict=True))
    batch = dict(zip(INPUTS, tensors(5, 190, 190, 4, 2, dim), strict=True))
    clean = run(varlen(ends, ends), *packed.values(), causal=True), run(dense, *batch.values(), causal=True)
    packed[where][starts[2] : starts[3]] = poison
    batch[where][2] = poison
    results = run(varlen(ends, ends), *packed.values(), causal=True), run(dense, *batch.values(), causal=True)
    with SameBytes() as same:
        for i in (0, 1, 3, 4):
            rows = slice(starts[i], starts[i] + lengths[i])
            one, other = (of_sequence(x[0], rows, rows) for x in (results, clean))
            same.compare(one, other, f"sequence {i}, packed")
            one, other = ([y[i] for y in x[1]] for x in (results, clean))
            same.compare(one, other, f"sequence {i} of the batch")
    assert any(not x[2].isfinite().all() for x in results[1])


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_a_huge_row_of_dout_touches_its_keys_alone(dim):
    """Other rows' dq, and dk and dv of keys that it does not see, keep their bytes: a grid belongs to a row."""
    q, k, v, dout = tensors(1, 400, 400, 4, 2, dim)
    clean = run(dense, q, k, v, dout, causal=True)
    dout[:, 250] *= 2.0**60
    results = run(dense, q, k, v, dout, causal=True)
    others = [i for i in range(400) if i != 250]
    one, other = ([x[0], x[1], x[2][:, others], x[3][:, 251:], x[4][:, 251:]] for x in (results, clean))
    with SameBytes() as same:
        same.compare(one, other, "what the row does not touch")
    assert all(x.isfinite().all() for x in results)
    check_errors([q, k, v, dout])


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_a_huge_value_touches_the_rows_that_see_it_alone(dim):
    q, k, v, dout = tensors(1, 400, 400, 4, 2, dim)
    clean = run(dense, q, k, v, dout, causal=True)
    v[:, 250] *= 2.0**60
    results = run(dense, q, k, v, dout, causal=True)
    one, other = ([x[0][:, :250], x[1], x[2][:, :250]] for x in (results, clean))
    with SameBytes() as same:
        same.compare(one, other, "rows before it")
    check_errors([q, k, v, dout])


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_keys_that_are_all_equal(dim):
    """Every weight is 1 / n, and dq vanishes but for the rounding of out, in Delta, and of dS: 2^-9 of each term in
    bf16, and as much again for all that is fp32."""
    q, k, v, dout = tensors(1, 400, 400, 2, 2, dim)
    k = k[:, :1].expand(k.shape).contiguous()
    exact = run(attention, *(x.double() for x in (q, k, v, dout)), causal=True)
    plain, ours = (run(function, q, k, v, dout, causal=True) for function in (attention, dense))
    for name in ("out", "dk", "dv"):
        i = NAMES.index(name)
        assert_within(1.05, ours[i], plain[i], exact[i], name)
    k, v, dout = (x.double() for x in (k, v, dout))
    p = torch.ones(400, 400, dtype=torch.float64, device=GPU).tril()
    p /= p.sum(1, keepdim=True)
    dp = torch.einsum("bqhd,bkhd->bqhk", dout, v)
    ds = p[:, None] * (dp - (p[:, None] * dp).sum(-1, keepdim=True))
    terms = ds.abs().sum(-1, keepdim=True) + (dout * exact[0]).abs().sum(-1, keepdim=True)
    assert (ours[2].double().abs() <= 2**-8 * dim**-0.5 * terms * k.abs()).all()


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_one_visible_key(dim):
    """Its weight is 1: out is its value, dv the row's dout, to the bit. dS is what rounding leaves of dP - Delta,
    fp32 sums of dim products, and dq lies on a grid of 2^-29 of its bound."""
    q, k, v, dout = tensors(2, 300, 300, 2, 2, dim)
    out, _, dq, dk, dv = run(dense, q, k, v, dout, causal=True, window=(0, 0))
    with SameBytes() as same:
        same.compare([out], [v], "one visible key")
        same.compare([dv], [dout], "dv of one visible key")
    q, k, v, dout = (x.double().abs() for x in (q, k, v, dout))
    norms = [x.norm(dim=-1, keepdim=True) for x in (dout, v, k)]
    ds, unit = 2 * dim * 2**-24 * (dout * v).sum(-1, keepdim=True), 2**-29 * 2 * norms[0] * norms[1] * norms[2]
    assert (dq.abs() <= dim**-0.5 * (ds * k + unit)).all()
    assert (dk.abs() <= dim**-0.5 * ds * q).all()
