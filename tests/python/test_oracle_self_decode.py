"""The oracle's decode against fp64 attention and the promises of docs/numerics.md."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from oracle import GateTable, Layout, OracleCache, decode_row_group, finish, partial_row_group, sample_keys
from oracle.ieee import fix
from test_oracle_self import correlated, error, filled, rng

NARROW = np.array([11, 7, 11, 11, 6], np.float32)  # a depth of about 11


def attention64(q, k, v, scale=None, sinks=None):
    """out (G, D) and LSE (G,) in fp64 of q (G, D) over k, v (n, D)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = q @ k.T * (scale or q.shape[-1] ** -0.5)
    m = s.max(axis=1, keepdims=True)
    p = np.exp(s - m)
    total = p.sum(axis=1) + (0 if sinks is None else np.exp(sinks - m[:, 0]))
    return (p @ v) / total[:, None], m[:, 0] + np.log(total)


@pytest.mark.parametrize("keys", [1, 63, 192, 193, 1500])
@pytest.mark.parametrize(("d", "g"), [(64, 3), (128, 1)])
def test_open_gates_are_softmax_attention(keys, d, g):
    cache, k, v = filled(Layout(2, d), keys)
    q = rng(5).normal(size=(g, d)).astype(np.float32)
    got = decode_row_group(cache, 1, q, keys - 1)
    out, lse = attention64(q, k[:, 1], v[:, 1])
    assert error(got.out, out) < 1e-4
    assert np.abs(got.lse - lse).max() < 1e-3
    assert (got.kept_fraction == 1).all()
    assert not got.recomputed.any()
    assert (got.levels.k == 2).all()
    assert (got.levels.v == 3).all()


@pytest.mark.parametrize(("k_bits", "v_bits", "limit"), [(8, 8, 2e-2), (16, 8, 1e-2), (4, 4, 0.3)])
def test_fewer_planes_are_coarser(k_bits, v_bits, limit):
    cache, k, v = filled(Layout(1, 64, 256, k_bits, v_bits), 900)
    q = rng(5).normal(size=(2, 64)).astype(np.float32)
    got = decode_row_group(cache, 0, q, 899)
    want = attention64(q, k[:, 0], v[:, 0])[0]
    assert 1e-4 < error(got.out, want) < limit
    assert (got.levels.k == {4: 0, 8: 1, 16: 2}[k_bits]).all()


@pytest.mark.parametrize("window", [0, 63, 500])
def test_window_and_sinks(window):
    cache, k, v = filled(Layout(1, 64), 1200)
    q = rng(6).normal(size=(4, 64)).astype(np.float32)
    sinks = np.array([-3, 0, 2, 9], np.float32)
    got = decode_row_group(cache, 0, q, 1100, window=window, sinks=sinks, softmax_scale=0.2)
    seen = np.s_[1100 - window : 1101]
    out, lse = attention64(q, k[seen, 0], v[seen, 0], 0.2, sinks.astype(np.float64))
    assert error(got.out, out) < 3e-4
    assert np.abs(got.lse - lse).max() < 2e-3
    assert got.levels.k.shape == (4, window + 1)


@pytest.mark.parametrize("gates", [NARROW, np.tile(NARROW, (3, 1)) - np.array([[0], [2], [4]], np.float32)])
@pytest.mark.parametrize("window", [None, 1800])
def test_partials_add_to_the_whole(gates, window):
    """The sums, the tail's included, over any block-aligned ranges; an empty range adds nothing."""
    cache, _, _ = filled(Layout(1, 64), 2200)
    q = 2 * rng(7).normal(size=(3, 64)).astype(np.float32)
    sinks = np.zeros(3, np.float32)
    whole = decode_row_group(cache, 0, q, 2150, gates=gates, window=window, sinks=sinks)
    assert not whole.recomputed.any()
    assert (whole.kept_fraction < 0.9).all()
    cuts = [0, 64, 640, 640, 1984, 4096]
    parts = [
        partial_row_group(cache, 0, q, 2150, (a, b), gates=gates, window=window, sinks=sinks)
        for a, b in itertools.pairwise(cuts)
    ]
    num, den, mass = (np.sum([getattr(p.sums, name) for p in parts], axis=0) for name in ("num", "den", "mass"))
    assert (num == whole.sums.num).all()
    assert (den == whole.sums.den).all()
    assert (mass == whole.sums.mass).all()
    assert (np.max([p.sums.peak for p in parts], axis=0) == whole.sums.peak).all()
    assert (np.sum([p.visible for p in parts], axis=0) == (2151 if window is None else 1801)).all()
    assert not any(x.any() for x in (parts[2].sums.num, parts[2].sums.den, parts[2].sums.mass))
    for part in parts:
        for name in ("z", "e", "spread"):
            assert (getattr(part, name) == getattr(whole, name)).all()
    out, lse = finish(num, den, whole.z, whole.e, sinks)
    assert (out == whole.out).all()
    assert (lse == whole.lse).all()


def test_tail_model_stands_in_for_dropped_keys():
    """Block means cut the error of a shallow depth, the rank-16 correction cuts it again."""
    gates = np.array([6, 4, 5, 5, 3], np.float32)
    q = 0.7 * rng(8).normal(size=(4, 64)).astype(np.float32)
    bare, k, v = filled(Layout(1, 64, tail=False), 3000)
    full, _, _ = filled(Layout(1, 64), 3000)
    want = attention64(q, k[:, 0], v[:, 0])[0]
    without, both = (decode_row_group(c, 0, q, 2999, gates=gates) for c in (bare, full))
    fit = full.fits[2560][0]
    full.fits[2560] = [replace(fit, f=np.zeros_like(fit.f))]
    means = decode_row_group(full, 0, q, 2999, gates=gates)
    assert (without.dropped_mass > 0.005).any()
    first = [partial_row_group(c, 0, q, 2999, (0, 3000), gates=gates).sums for c in (bare, full)]
    assert (first[0].den == first[1].den).all()
    assert (first[0].num != first[1].num).any()
    assert error(means.out, want) < 0.7 * error(without.out, want)
    assert error(both.out, want) < 0.8 * error(means.out, want)


def test_what_is_read():
    """Deeper gates read no less; the newest keys, key 0 and unfinished blocks are always read; unread mass is small."""
    cache, _, _ = filled(Layout(1, 64), 2100)
    q = 2 * rng(9).normal(size=(2, 64)).astype(np.float32)
    shallow = decode_row_group(cache, 0, q, 2080, gates=NARROW)
    deep = decode_row_group(cache, 0, q, 2080, gates=NARROW + np.float32(3))
    one = decode_row_group(cache, 0, q[:1], 2080, gates=NARROW)
    assert shallow.levels.k.shape == (2, 2081)
    assert (shallow.levels.v[0] == shallow.levels.v[1]).all()  # decided together
    assert (shallow.kept_fraction == (shallow.levels.v > 0).mean(axis=1)).all()
    assert (shallow.levels.v[:, 1:1984] == 0).any()
    assert (shallow.levels.v[:, 1984:] > 0).all()  # block 31 ends at 2047 > 2080 - 64
    assert (shallow.levels.k[:, 1984:] > 0).all()
    assert (shallow.levels.v[:, 0] > 0).all()
    assert (one.levels.k <= shallow.levels.k).all()
    assert (one.levels.v <= shallow.levels.v).all()
    assert deep.levels.k.sum() > shallow.levels.k.sum()
    assert deep.levels.v.sum() > shallow.levels.v.sum()
    unread = (shallow.levels.v == 0).sum(axis=1)
    assert (shallow.sums.dropped > 0).all()
    assert (shallow.sums.dropped <= unread * fix(np.float32(-11))).all()
    assert deep.dropped_mass.max() < shallow.dropped_mass.max()


def test_a_row_that_spreads_its_weight_reads_its_values_more_finely():
    """n equal weights are each 2^-S, S = log2 n: V.l and V.b open by (S - 4) / 2 beyond what depth says."""
    cache, _, _ = filled(Layout(1, 64), 2048)
    q = np.zeros((1, 64), np.float32)
    for g_vl, g_vb, level in ((7.6, 7.6, 3), (7.6, 7.4, 2), (7.4, 20, 1)):  # 11 = 7.5 + 3.5
        gates = np.array([30, 30, 30, g_vl, g_vb], np.float32)
        assert (decode_row_group(cache, 0, q, 2047, gates=gates).levels.v[0, 1:1984] == level).all()


def test_a_concentrated_row_keeps_the_gates_of_its_depth():
    cache, k, _ = filled(Layout(1, 64), 2048)
    q = rng(9).normal(size=(1, 64)).astype(np.float32)
    cache.truncate(0)
    k[:, 0] -= (k[:, 0] @ q[0] / (q[0] @ q[0]))[:, None] * q[0]  # logits of 0
    k[0, 0] = q[0] * 8 * 15 / (q[0] @ q[0])  # and of 15: weights of 2^-21.6
    cache.write(k, k)
    for g_vl, level in ((20, 1), (23, 2)):
        got = decode_row_group(cache, 0, q, 2047, gates=np.array([30, 30, 30, g_vl, 0], np.float32))
        assert got.spread[0] < 1
        assert (got.levels.v[0, 1:1984] == level).all()


@pytest.mark.parametrize("window", [None, 1500])
def test_a_block_of_larger_values_is_read_more_finely(window):
    """V's gates open by o = 10 - 2 for a block whose values are 2^10 of the others': the mean k is below theirs + 1."""
    n, loud = 2048, np.s_[1024:1088]
    k, v = np.zeros((n, 1, 64), np.float32), rng(10).choice([-1.0, 1.0], (n, 1, 64))
    v[loud] *= 2.0**10
    cache = OracleCache(Layout(1, 64))
    cache.write(k, v)
    q = np.zeros((1, 64), np.float32)
    sees = np.arange(n)[0 if window is None else n - 1 - window :]
    is_loud = (loud.start <= sees) & (sees < loud.stop)
    settled = (sees >= (64 if window is None else 576)) & (sees < 1984)
    spread = np.log2(sees.size)  # equal weights of 2^-spread
    wider = (spread - 4) / 2
    for missing, level in ((8.1, 0), (7.9, 2)):
        gates = [0, 0, spread - missing, spread - wider - missing, -30]
        got = decode_row_group(cache, 0, q, n - 1, window=window, gates=gates)
        assert (got.levels.v[0, is_loud] == level).all()
        assert not got.levels.v[0, settled & ~is_loud].any()


def test_samples_lie_between_key_lo_and_the_newest():
    for lo, n in ((0, 193), (17, 5000), (0, 131072)):
        keys = sample_keys(lo, n)
        assert np.unique(keys).size == 128
        assert keys.min() > lo
        assert keys.max() < lo + n - 63


def test_later_keys_change_nothing():
    """P3: a token's bits do not depend on what was written after it."""
    layout = Layout(1, 64)
    cache, k, v = filled(layout, 1700)
    short = OracleCache(layout)
    short.write(k[:1301], v[:1301])
    q = 2 * rng(13).normal(size=(3, 64)).astype(np.float32)
    late, alone = (decode_row_group(c, 0, q, 1300, gates=NARROW) for c in (cache, short))
    assert (late.kept_fraction < 1).all()
    assert (late.out == alone.out).all()
    assert (late.lse == alone.lse).all()
    assert (late.sums.num == alone.sums.num).all()


def test_a_branch_of_a_draft_tree_is_a_chain():
    layout = Layout(1, 64)
    cache, k, v = filled(layout, 1320)  # 1300 keys and a draft of 20 nodes
    path = [0, 3, 4, 11, 17]
    rows = [*range(1300), *(1300 + i for i in path)]
    chain = OracleCache(layout)
    chain.write(k[rows], v[rows])
    q = 2 * rng(14).normal(size=(3, 64)).astype(np.float32)
    for window in (None, 900):
        tree = decode_row_group(cache, 0, q, 1304, gates=NARROW, window=window, path=path)
        alone = decode_row_group(chain, 0, q, 1304, gates=NARROW, window=window)
        assert (tree.out == alone.out).all()
        assert (tree.sums.num == alone.sums.num).all()


def test_nan_stays_with_the_rows_that_see_it():
    layout = Layout(2, 64)
    k, v = correlated(rng(15), 1400, 2, 64)
    k[700, 0, 1] = np.nan
    cache = OracleCache(layout)
    cache.write(k, v)
    q = rng(16).normal(size=(2, 64)).astype(np.float32)
    seeing = decode_row_group(cache, 0, q, 1399, gates=NARROW)
    assert np.isnan(seeing.out).all()
    assert np.isnan(seeing.lse).all()
    for head, p, window in ((1, 1399, None), (0, 699, None), (0, 1399, 600)):
        assert np.isfinite(decode_row_group(cache, head, q, p, gates=NARROW, window=window).out).all()
    q[1, 9] = np.inf
    half, alone = (decode_row_group(cache, 1, rows, 1399, gates=NARROW) for rows in (q, q[:1]))
    assert np.isnan(half.out[1]).all()
    assert (half.out[0] == alone.out[0]).all()


def test_no_keys():
    got = decode_row_group(OracleCache(Layout(1, 64)), 0, np.ones((2, 64)), -1)
    assert not got.out.any()
    assert np.isneginf(got.lse).all()


def test_gate_table():
    rows = np.array([[8, 8, 4, 9, 8, 3], [12, 12, 8, 13, 12, 7]], np.float32)
    table = GateTable(rows, np.full(5, 20, np.float32))
    assert (table.gates(None) == 20).all()
    assert (table.gates(np.inf) == 20).all()
    assert (table.gates(8) == rows[0, 1:]).all()
    assert (table.gates(10) == [10, 6, 11, 10, 5]).all()
    assert (table.gates(12) == rows[1, 1:]).all()
    assert (table.gates(14.5) == rows[1, 1:] + np.float32(2.5)).all()
    assert (table.gates(5) == rows[0, 1:] - np.float32(3)).all()
