"""P5 and the edges: NaN that must not be read, rows without a key, sequences without rows, out=, what is returned."""

import math

import pytest
import torch
from attention_reference import assert_same_bytes, attention, error, run, visible

from fold_attention import fold_attn_func, fold_attn_varlen_func

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAN = float("nan")


def dense(q, k, v, *, sinks=None, **options):
    return fold_attn_func(q, k, v, sinks=sinks, return_lse=True, **options)


def cu(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_behind_the_last_sequence_is_read(dtype):
    """FA#1745, FA#2374, FI#941: NaN behind the packed rows reaches no output and no gradient; those rows get zeros."""
    cu_q, cu_k = cu(30, 70), cu(64, 41)
    q, k, v, dout = (torch.randn(n, h, 64).to(dtype) for n, h in ((110, 4), (120, 2), (120, 2), (110, 4)))

    def packed(q, k, v, **options):
        return fold_attn_varlen_func(q, k, v, cu_q, cu_k, 70, 64, causal=True, return_lse=True, **options)

    q[100:], dout[100:], k[105:], v[105:] = NAN, NAN, NAN, NAN
    results = run(packed, q, k, v, dout)
    q[100:], dout[100:], k[105:], v[105:] = 0, 0, 0, 0
    for name, x, y in zip(NAMES, results, run(packed, q, k, v, dout), strict=False):
        assert_same_bytes(x, y, name)
    out, lse, dq, dk, dv = results
    assert not out[100:].any()
    assert not dq[100:].any()
    assert not dk[105:].any()
    assert not dv[105:].any()
    assert (lse[:, 100:] == -math.inf).all()


@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_keys_are_never_read(dtype, poison):
    """A poisoned key that no query sees (behind a window) changes no byte of the output and the gradients."""
    sq, sk, options = 40, 200, {"causal": True, "window_size": (31, 0)}
    hidden = ~visible(sq, sk, causal=True, window=(31, 0)).any(0)
    assert hidden.sum() > 100
    q, k, v, dout = (torch.randn(2, n, h, 64).to(dtype) for n, h in ((sq, 4), (sk, 2), (sk, 2), (sq, 4)))
    k[:, hidden], v[:, hidden] = 0, 0
    expected = run(dense, q, k, v, dout, **options)
    k[:, hidden], v[:, hidden] = poison, poison
    results = run(dense, q, k, v, dout, **options)
    for name, x, y in zip(NAMES, results, expected, strict=False):
        assert_same_bytes(x, y, name)
    assert not results[3][:, hidden].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["k", "v"])
def test_nan_in_a_visible_key_stays_in_the_rows_that_see_it(dtype, where):
    """NaN in the rows that see it, and not a byte of the others changes."""
    q, k, v = (torch.randn(2, 150, h, 64).to(dtype) for h in (4, 2, 2))
    clean, clean_lse = dense(q, k, v, causal=True)
    {"k": k, "v": v}[where][1, 77, 1, 5] = NAN
    out, lse = dense(q, k, v, causal=True)
    hit = torch.zeros(2, 150, 4, dtype=torch.bool)
    hit[1, 77:, 2:] = True
    assert_same_bytes(out[~hit], clean[~hit], "rows that do not see it")
    assert out[hit].isnan().all() if where == "k" else out[hit][:, 5].isnan().all()
    if where == "k":
        assert lse.transpose(1, 2)[hit].isnan().all()
    assert_same_bytes(lse.transpose(1, 2)[~hit], clean_lse.transpose(1, 2)[~hit], "lse")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_in_one_sequence_changes_no_gradient_of_another(dtype):
    q, k, v, dout = (torch.randn(3, 90, h, 64).to(dtype) for h in (4, 2, 2, 4))
    expected = run(dense, q, k, v, dout)
    k[1, 13, 0, 0] = NAN
    results = run(dense, q, k, v, dout)
    assert results[2][1, :, :2].isnan().all()
    for name, x, y in zip(NAMES, results, expected, strict=False):
        assert_same_bytes(x[::2], y[::2], name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
def test_rows_without_a_key(dtype, with_sinks):
    """mlx#2608, pytorch#103749: out 0, lse -inf, gradients 0, and no part in the gradients of keys."""
    q, k, v, dout = (torch.randn(1, n, h, 64).to(dtype) for n, h in ((100, 4), (37, 2), (37, 2), (100, 4)))
    sinks = torch.randn(4) if with_sinks else None
    out, lse, dq, dk, dv, *_ = run(dense, q, k, v, dout, sinks=sinks, causal=True)
    empty = slice(0, 63)  # bottom-right aligned: the last 37 queries see keys
    assert not out[:, empty].any()
    assert not dq[:, empty].any()
    assert (lse[:, :, empty] == -math.inf).all()
    rest = run(dense, q[:, 63:], k, v, dout[:, 63:], sinks=sinks, causal=True)
    exact = run(
        attention, *(x.double() for x in (q, k, v, dout)), sinks=None if sinks is None else sinks.double(), causal=True
    )
    for name, x, y in (("dk", dk, 3), ("dv", dv, 4)):
        assert error(x, exact[y]) <= 1.05 * error(rest[y], exact[y]), name


def test_zero_lengths():
    """FA#1537, FA#2562: cu_seqlens_q = [0,0,1,1,2], cu_seqlens_k = [0,0,3,3,8], H9 Hk3 D64: as each sequence alone."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 1, 1, 2], [0, 0, 3, 3, 8]))
    q, k, v, dout = (torch.randn(n, h, 64).bfloat16() for n, h in ((2, 9), (8, 3), (8, 3), (2, 9)))

    def packed(q, k, v, **options):
        return fold_attn_varlen_func(q, k, v, cu_q, cu_k, 1, 5, causal=True, return_lse=True, **options)

    results = run(packed, q, k, v, dout)
    for b, (q_rows, k_rows) in enumerate(((slice(0, 1), slice(0, 3)), (slice(1, 2), slice(3, 8)))):
        alone = run(dense, q[None, q_rows], k[None, k_rows], v[None, k_rows], dout[None, q_rows], causal=True)
        ours = (results[0][q_rows], results[1][:, q_rows], results[2][q_rows], results[3][k_rows], results[4][k_rows])
        for name, x, y in zip(NAMES, ours, alone, strict=False):
            assert_same_bytes(x[None], y, f"{name} of sequence {b}")


@pytest.mark.parametrize(
    ("cu_q", "cu_k"), [([0, 0, 5], [0, 7, 9]), ([0, 5, 5], [0, 0, 9]), ([0], [0]), ([0, 0], [0, 0])]
)
def test_sequences_without_queries_or_without_keys(cu_q, cu_k):
    cu_q, cu_k = torch.tensor(cu_q, dtype=torch.int32), torch.tensor(cu_k, dtype=torch.int32)
    q, k, v, dout = (torch.randn(int(c[-1]), 2, 32) for c in (cu_q, cu_k, cu_k, cu_q))

    def packed(q, k, v, **options):
        return fold_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 9, return_lse=True, **options)

    out, lse, dq, dk, dv = run(packed, q, k, v, dout)
    for b in range(len(cu_q) - 1):
        rows_q, rows_k = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        if cu_q[b] == cu_q[b + 1]:
            assert not dk[rows_k].any()
            assert not dv[rows_k].any()
        if cu_k[b] == cu_k[b + 1]:
            assert not out[rows_q].any()
            assert not dq[rows_q].any()
            assert (lse[:, rows_q] == -math.inf).all()
    assert (out.shape, lse.shape) == (q.shape, (2, len(q)))


@pytest.mark.parametrize(("b", "sq", "sk"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_empty_dimensions(b, sq, sk):
    q, k, v, dout = (torch.randn(b, s, 2, 16) for s in (sq, sk, sk, sq))
    out, lse, dq, dk, dv = run(dense, q, k, v, dout)
    assert (out.shape, lse.shape, dq.shape, dk.shape) == (q.shape, (b, 2, sq), q.shape, k.shape)
    for x in (out, dq, dk, dv):
        assert not x.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
@pytest.mark.parametrize("offset", [-200, 0, 60, 88, 200, 1e5])
def test_logits_of_any_size(dtype, offset):
    """Rows whose logits lie far from zero: never inf, never 0, and exact to the rounding of their inputs."""
    q, k, v, dout = (torch.randn(1, 70, 2, 64) for _ in range(4))
    q[..., 0], k[..., 0] = 8.0, offset  # one channel shifts every logit of a row by the same amount
    tensors = [x.to(dtype) for x in (q, k, v, dout)]
    exact = run(attention, *(x.double() for x in tensors), causal=True)
    ours, rival = run(dense, *tensors, causal=True), run(attention, *tensors, causal=True)
    for name, x, other, reference in zip(NAMES, ours, rival, exact, strict=False):
        assert x.isfinite().all(), name
        if name in ("out", "dv"):
            assert error(x, reference) <= max(
                2 * error(other, reference), 1.1 * error(reference.to(dtype), reference)
            ), name


def test_windows_given_in_every_spelling():
    q, k, v = (torch.randn(1, 90, 2, 32) for _ in range(3))
    assert_same_bytes(fold_attn_func(q, k, v, window_size=(None, None)), fold_attn_func(q, k, v), "(None, None)")
    assert_same_bytes(fold_attn_func(q, k, v, window_size=(None, 0)), fold_attn_func(q, k, v, causal=True), "(None, 0)")
    wide = fold_attn_func(q, k, v, window_size=(2**40, 2**40))
    assert_same_bytes(wide, fold_attn_func(q, k, v), "wider than the sequence")


def test_what_is_returned():
    q, k, v = (torch.randn(2, 20, h, 32) for h in (4, 2, 2))
    out = fold_attn_func(q, k, v)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    for both in (fold_attn_func(q, k, v, return_lse=True), fold_attn_func(q, k, v, return_attn_probs=True)):
        assert_same_bytes(both[0], out)
        assert (both[1].shape, both[1].dtype) == ((2, 4, 20), torch.float32)
    sinks = torch.randn(4)
    assert_same_bytes(fold_attn_func(q, k, v, sinks=sinks), fold_attn_func(q, k, v, learnable_sink=sinks))


def test_out_is_written_and_returned():
    q, k, v = (torch.randn(2, 20, h, 32) for h in (4, 2, 2))
    out = torch.full((2, 20, 4, 64), NAN)[..., :32]
    result, lse = fold_attn_func(q, k, v, out=out, return_lse=True)
    expected, expected_lse = fold_attn_func(q, k, v, return_lse=True)
    assert result is out
    assert_same_bytes(out, expected, "out")
    assert_same_bytes(lse, expected_lse, "lse")


def test_sinks_in_bf16_get_a_bf16_gradient():
    q, k, v = (torch.randn(1, 20, 2, 32).bfloat16() for _ in range(3))
    sinks = torch.randn(2).bfloat16().requires_grad_()
    fold_attn_func(q, k, v, sinks=sinks).sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.dtype == torch.bfloat16
