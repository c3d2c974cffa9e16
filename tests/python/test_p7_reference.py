"""P7: a wrong reference is never silent: such a row is computed again, exactly, in the same call."""

import math

import pytest
import torch
from attention_reference import assert_same_bytes
from cache_testing import bf16_error, exact, filled, layer

from fold_attention import FoldKVCache, finish, fold_attn_with_kvcache, partial_attention
from fold_attention._lib import lib

N, NEEDLE = 4000, 1234


def sampled(n: int) -> set[int]:
    """Keys that the sampled reference looks at (docs/numerics.md, section 5)."""
    rest = n - 64
    return {0, *range(n - 63, n), *(1 + (2 * i + 1) * rest // 256 for i in range(128))}


def needle(above: float):
    """A layer whose row has one key, which the reference does not sample, `above` (base 2) over the others' mass."""
    assert NEEDLE not in sampled(N)
    g = torch.Generator().manual_seed(5)
    q = torch.randn(1, 2, 64, generator=g)
    k, v = torch.randn(2, N, 1, 64, generator=g) * torch.tensor([0.01, 1.0])[:, None, None, None]
    # Both heads see the needle along their common direction.
    direction = q.sum(1, keepdim=True)[0, 0] / q.sum(1).norm()
    along = (q[0] @ direction).min()
    q = q.clone()
    k[NEEDLE, 0] = direction * (above + math.log2(N)) * math.log(2) * 8 / along
    return q, k, v


@pytest.mark.parametrize("depth", [None, 10.0])
@pytest.mark.parametrize("above", [0, 60, 88, 200, 1e5])
def test_the_true_maximum_lies_above_the_reference(above, depth):
    """Declared reference, 0, 60, 88, 200 and 1e5 too low: the exact row, never Inf or 0, and it says so."""
    q, k, v = needle(above)
    cache = filled([N], [(q.expand(N, -1, -1), k, v)], depth=depth)
    out, lse, info = cache.attend(q, return_lse=True, return_info=True)
    reference, expected_lse = exact(q, k, v)
    if depth is None or above > 0:  # a needle with the mass of all others together leaves those to the depth
        assert (out - reference).norm() < bf16_error(q, k, v, reference)
    # The logits' own error, which grows with them, is a bf16 implementation's at most.
    assert (lse - expected_lse.T).abs().max() <= expected_lse.abs().max() * 2**-8
    assert info["recomputed"].all() == (above > 0)
    assert info["recomputed"].any() == (above > 0)


@pytest.mark.parametrize("shift", [-200.0, -30.0, -7.0, 2.0, 30.0, 60.0, 200.0])
@pytest.mark.parametrize("length", [1, 64, 193, 1500])
def test_a_shifted_reference(length, shift):
    """200 above and 200 below the truth, and less: the row equals the one with the exact reference, to rounding."""
    q, k, v = layer(length, seed=length)
    cache = filled([length], [(q, k, v)])
    row = q[None, -1:]
    shape = (1, 1, 4)
    out, lse = torch.empty(1, 1, 4, 64), torch.empty(1, 4, 1)
    recomputed = torch.empty(shape, dtype=torch.uint8)
    options = (None, None, None, None, 0.0, -1, 0, None)
    lib.decode(
        row,
        cache.storage,
        cache.layout,
        None,
        None,
        None,
        *cache.tables(),
        *options,
        shift,
        out,
        lse,
        None,
        None,
        recomputed,
        None,
        None,
    )
    reference, expected_lse = exact(q[-1:], k, v)
    assert (out[0] - reference).norm() < bf16_error(q[-1:], k, v, reference)
    assert (lse[0] - expected_lse).abs().max() <= expected_lse.abs().max() * 2**-8
    if abs(shift) > 26:  # out of the safe range, wherever the sampled reference was
        assert bool(recomputed.all())
        true_reference = cache.attend(row)
        assert (out - true_reference).norm() < bf16_error(q[-1:], k, v, reference)


@pytest.mark.parametrize("depth", [None, 12.0])
def test_a_wrong_row_leaves_its_group_alone(depth):
    """Of four query heads on one KV head, one runs again: the others have the bits of their first run."""
    wrong, k, v = needle(100)
    across = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(6))
    along = k[NEEDLE, 0] / k[NEEDLE, 0].norm()
    across -= (across @ along)[..., None] * along  # these do not see the needle
    q = torch.cat([across, wrong[:, :1]], 1)
    cache = filled([N], [(q.expand(N, -1, -1), k, v)], depth=depth)
    out, info = cache.attend(q, return_info=True)
    assert info["recomputed"].flatten().tolist() == [False, False, False, True]
    first, _, valid = finish(partial_attention(q, cache, 0, N))
    assert valid.flatten().tolist() == [True, True, True, False]
    assert_same_bytes(out[0, :3], first[0, 0, :3])


def test_rows_beside_a_wrong_one_keep_their_bits():
    """Other requests and other KV heads do not notice."""
    wrong = needle(100)
    good = layer(N, 2, 1)
    query = torch.cat([good[0][-1:], wrong[0], good[0][-2:-1]])
    layers = [good, (wrong[0].expand(N, -1, -1), *wrong[1:]), good]
    cache = filled([N] * 3, layers, depth=12.0)
    out, info = cache.attend(query, return_info=True)
    assert info["recomputed"].any(1).tolist() == [False, True, False]
    alone = filled([N], [good], depth=12.0)
    assert_same_bytes(out[0], alone.attend(query[:1])[0])
    assert_same_bytes(out[2], alone.attend(query[2:])[0])


def test_a_wrong_reference_of_partials_is_reported():
    """`finish` cannot read the cache again: it says that the row is not valid, and decode computes it."""
    q, k, v = needle(100)
    cache = filled([N], [(q.expand(N, -1, -1), k, v)])
    out, lse, valid = finish(partial_attention(q, cache, 0, N))
    assert not valid.any()
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())
    assert bool(fold_attn_with_kvcache(q, cache).isfinite().all())


def test_a_sample_that_says_too_much_is_no_reason_to_run_again():
    """Two sampled keys far above the other samples make Z more than a bit too high, and the spread too large with it:
    the row, half of whose mass is on one key, is as good as with an exact reference."""
    n = 3000
    above = [key for key in sorted(sampled(n)) if 0 < key < n - 63][40:42]
    logits = torch.zeros(n)
    logits[0] = math.log(n)
    logits[above] = math.log(0.157 * n)
    q = torch.ones(1, 1, 64)
    k, v = (
        (logits / 8)[:, None, None].expand(n, 1, 64),
        torch.randn(n, 1, 64, generator=torch.Generator().manual_seed(7)),
    )
    cache = filled([n], [(q.expand(n, -1, -1), k, v)])
    out, lse, info = cache.attend(q, return_lse=True, return_info=True)
    z, _, spread = partial_attention(q, cache, 0, n).grid.flatten().tolist()
    assert 1 < z - lse.item() / math.log(2) < 2
    assert 4 < spread < 6
    assert not info["recomputed"].any()
    reference, _ = exact(q, k, v)
    assert (out - reference).norm() < bf16_error(q, k, v, reference)


def test_logits_that_are_all_equal_or_all_huge():
    """Rows whose logits are 0, or +-1e4 and more: the mean of V, the exact row."""
    v = torch.randn(1, 700, 1, 64)
    for scale in (0.0, 1e3, 1e6):
        k = torch.ones(1, 700, 1, 64) * scale
        for sign in (1, -1):
            cache = FoldKVCache(1, 1, 1, 64, 700)
            cache.append(k, v)
            q = torch.ones(1, 1, 64) * sign
            out, lse = cache.attend(q, return_lse=True)
            reference, expected = exact(q, k[0], v[0])
            assert (out - reference).norm() < bf16_error(q, k[0], v[0], reference)
            assert (lse - expected.T).abs().max() <= max(1e-3, expected.abs().max() * 2**-8)


def test_a_sink_far_above_or_below():
    q, k, v = layer(700)
    cache = filled([700], [(q, k, v)])
    for sink in (-1e4, -100.0, 0.0, 20.0, 60.0):
        sinks = torch.full((4,), sink)
        out, lse = cache.attend(q[-1:], sinks=sinks, return_lse=True)
        reference, expected = exact(q[-1:], k, v, sinks=sinks)
        plain, _ = exact(q[-1:], k, v)
        share = reference.norm() / plain.norm()
        assert (out - reference).norm() <= bf16_error(q[-1:], k, v, plain) * share
        assert (lse - expected.T).abs().max() <= max(1e-3, expected.abs().max() * 2**-8)
    out, lse = cache.attend(q[-1:], sinks=torch.tensor([math.nan, math.inf, 1e30, 0.0]), return_lse=True)
    assert out[0].isnan().all(1).tolist() == lse[0].isnan().tolist() == [True, False, False, False]
    assert not out[0, 1:3].any()
    assert lse[0, 1:3].tolist() == pytest.approx([math.inf, 1e30])
