"""The oracle's references, sums, reruns and finish (docs/numerics.md, 5, 7 and 8) against fp64."""

from dataclasses import replace

import numpy as np
import pytest
from oracle import (
    OPEN,
    Layout,
    OracleCache,
    VisibleKeys,
    decode_row_group,
    make_queries,
    partial_row_group,
    reference,
    sample_keys,
)
from oracle.ieee import bf16_value
from test_oracle_self import correlated, error, filled, rng
from test_oracle_self_decode import NARROW, attention64

SATURATED = 2**32 - 1


def cache_of(k, v, **layout):
    """One KV head's cache of k, v (n, 1, 64)."""
    cache = OracleCache(Layout(1, 64, **layout))
    cache.write(k, v)
    return cache


def key_of_logit(q, logit):
    """A key whose logit (natural) with q (64,) is `logit`."""
    return q * (8 * logit / (q @ q))


def unsampled(keys):
    """A key in the middle that the reference of the newest token does not see."""
    return next(j for j in range(keys // 2, keys) if j not in sample_keys(0, keys))


def log_weights(cache, q, position, k_level):
    """(G, n) fp64 base-2 logits of the stored readings at levels k_level (G, n)."""
    queries, keys = make_queries(q, 64**-0.5), VisibleKeys.of(cache, 0, position, None, None)
    by_level = []
    for level in range(keys.k.finest + 1):
        query = 256 * queries.qa if level == 0 else queries.q
        by_level.append(query.astype(np.float64) @ keys.k.reading(level).T.astype(np.float64))
    e = queries.e.astype(np.float64)[:, None] * keys.k.e() / 2**16
    return np.take_along_axis(np.array(by_level), k_level[None], axis=0)[0] * e


def read_values(cache, position, v_level):
    """(n, D) readings in units of e, 0 for dropped keys, and (n,) e; v_level (n,)."""
    v = cache.v[0, : position + 1]
    readings = np.array([np.zeros_like(v.reading(0)), *(v.reading(level) for level in range(v.finest + 1))])
    return readings[v_level, np.arange(position + 1)] / 256, v.e().astype(np.float64)


# The reference and the spread (section 5)


@pytest.mark.parametrize("keys", [1, 2, 100, 192])
def test_few_keys_give_the_exact_reference_and_spread(keys):
    cache, _, _ = filled(Layout(1, 64), keys)
    q = 2 * rng(20).normal(size=(3, 64)).astype(np.float32)
    got = reference(make_queries(q, 64**-0.5), VisibleKeys.of(cache, 0, keys - 1, None, None))
    s = log_weights(cache, q, keys - 1, np.ones((3, keys), np.int64))
    p = np.exp2(s - s.max(axis=1, keepdims=True))
    # n weights of 2^-26 at most each are lost, logits are rounded to fp32, log2 to a few units of its last place.
    close = keys * 2**-25 + (np.abs(s).max() + 64) * 2**-22
    assert np.abs(got.z - s.max(axis=1) - np.log2(p.sum(axis=1))).max() < close
    assert np.abs(got.spread - np.log2(p.sum(axis=1) ** 2 / (p * p).sum(axis=1))).max() < 4 * close


@pytest.mark.parametrize("keys", [193, 4096, 20000])
def test_equal_weights_spread_over_all_keys(keys):
    cache = cache_of(np.zeros((keys, 1, 64)), np.zeros((keys, 1, 64)), k_bits=4, v_bits=4, tail=False)
    queries = make_queries(np.ones((1, 64)), 1.0)
    got = reference(queries, VisibleKeys.of(cache, 0, keys - 1, None, None))
    assert abs(got.spread[0] - np.log2(keys)) < 1e-4
    assert abs(got.z[0] - np.log2(keys)) < 1e-4  # logits of the middle of h = 0 at the smallest e: 2^-90


def test_a_sampled_spread_is_an_estimate():
    """Of n keys a fraction f, a different one per row, shares all weight: S = log2(n f)."""
    n, fractions = 5000, np.array([1, 1 / 2, 1 / 4, 1 / 8])
    q = np.eye(64)[:4]
    hot = rng(21).random((n, 4)) < fractions
    k = np.zeros((n, 1, 64), np.float32)
    k[:, 0, :4] = 8 * 20 * hot
    got = decode_row_group(cache_of(k, k), 0, q, n - 1)
    close = 4 * np.sqrt((1 - fractions) / fractions / 128) / np.log(2) + 0.05  # 4 sigma of log2 of hot samples
    assert (np.abs(got.spread - np.log2(n * fractions)) < close).all()


def test_the_largest_sample_stands_for_itself_and_the_others_for_all_keys():
    n, q = 5000, np.eye(64)[:1]
    k = np.zeros((n, 1, 64), np.float32)
    k[sample_keys(0, n)[[10, 50, 90]], 0, 0] = 8 * 30  # beside which logits of 0 are nothing
    cache = cache_of(k, k)
    got = partial_row_group(cache, 0, q, n - 1, (0, n))
    s = log_weights(cache, q, n - 1, np.ones((1, n), np.int64)).max()
    keys = 1 + 2 * (n - 64 - 1) / 127  # that seem to have the logit s
    assert abs(got.z[0] - s - np.log2(keys)) < 1e-4
    assert abs(got.spread[0] - np.log2(keys)) < 1e-4


# The sums (section 7)


@pytest.mark.parametrize("gates", [OPEN, NARROW])
def test_the_sums_are_the_weights_in_fixed_point(gates):
    """den, mass, num and peak of what was read, each weight off by half a unit and a few roundings."""
    n, relative = 2000, 2e-5  # of weights: 4 roundings of logits below 32
    k, v = correlated(rng(22), n, 1, 64)
    v *= np.exp2(rng(23).integers(-6, 1, (n, 1, 1))).astype(np.float32)
    cache = cache_of(k, v, tail=False)
    q = 2 * rng(24).normal(size=(2, 64)).astype(np.float32)
    got = decode_row_group(cache, 0, q, n - 1, gates=gates)
    x = log_weights(cache, q, n - 1, got.levels.k) - got.z[:, None].astype(np.float64)
    d = np.exp2(x + 26)
    values, e = read_values(cache, n - 1, got.levels.v[0])
    read = got.levels.v > 0
    w = d * e / got.e[:, None].astype(np.float64) * read
    assert read.all() == (gates is OPEN)
    assert (np.abs(got.sums.den - d.sum(axis=1)) < n / 2 + relative * d.sum(axis=1)).all()
    assert (np.abs(got.sums.mass - w.sum(axis=1)) < n / 2 + relative * w.sum(axis=1)).all()
    close = 0.5 * np.abs(values).sum(axis=0) + relative * w @ np.abs(values)
    assert (np.abs(got.sums.num * 2.0**-16 - w @ values) < close).all()
    assert np.abs(got.sums.peak - np.where(read, x, -np.inf).max(axis=1)).max() < relative
    assert (np.abs(got.sums.dropped - (d * ~read).sum(axis=1)) < n / 2 + relative * d.sum(axis=1)).all()


def test_the_peak_is_that_of_keys_whose_v_is_read():
    """With a reference 60 too high nothing is read but the newest keys and key 0."""
    n, q = 1200, rng(43).normal(size=(1, 64)).astype(np.float32)
    k, v = correlated(rng(44), n, 1, 64)
    k[unsampled(n), 0] = key_of_logit(q[0], 30)
    cache = cache_of(k, v)
    got = partial_row_group(cache, 0, q, n - 1, (0, n), gates=NARROW, reference_shift=60)
    x = log_weights(cache, q, n - 1, got.levels.k) - got.z[:, None].astype(np.float64)
    read = got.levels.v > 0
    assert x[~read].max() > got.sums.peak[0] + 1
    assert abs(got.sums.peak[0] - x[read].max()) < 1e-4


def test_block_means_enter_the_mass():
    """W_b per block: mass and num of dropped keys, with the rank-16 correction off."""
    n = 2000
    full, k, v = filled(Layout(1, 64), n)
    bare = cache_of(k, v, tail=False)
    fit = full.fits[1792][0]
    full.fits[1792] = [replace(fit, p=np.zeros_like(fit.p))]
    q = 2 * rng(25).normal(size=(2, 64)).astype(np.float32)
    whole, part = (decode_row_group(c, 0, q, n - 1, gates=NARROW) for c in (full, bare))
    assert (whole.levels.v == part.levels.v).all()
    x = log_weights(full, q, n - 1, whole.levels.k) - whole.z[:, None].astype(np.float64)
    blocks = (n - 64) // 64
    lost = np.where(whole.levels.v == 0, np.exp2(x + 26), 0)[:, : 64 * blocks].reshape(2, blocks, 64).sum(axis=2)
    ratio = bf16_value(full.blocks.mean_scale[0, :blocks]).astype(np.float64) / whole.e[:, None].astype(np.float64)
    weight, mean = lost * ratio, full.blocks.mean[0, :blocks].astype(np.float64)
    loose = 32 * ratio + 0.5 + 2e-5 * weight  # a block's roundings, each key's and W_b's own
    assert (weight.sum(axis=1) > 10 * loose.sum(axis=1)).all()
    assert (np.abs(whole.sums.mass - part.sums.mass - weight.sum(axis=1)) < loose.sum(axis=1)).all()
    assert (np.abs((whole.sums.num - part.sums.num) * 2.0**-16 - weight @ mean) < loose @ np.abs(mean)).all()


def test_block_weights_saturate():
    """Far too low a reference: every block's W_b is 2^32 - 1, as a single key's weight is."""
    n, closed = 1200, np.full(5, -1e4, np.float32)
    full, k, v = filled(Layout(1, 64), n)
    q = rng(26).normal(size=(2, 64)).astype(np.float32)
    args = (0, q, n - 1, (0, n))
    sums = [
        partial_row_group(c, *args, gates=closed, reference_shift=-60).sums for c in (full, cache_of(k, v, tail=False))
    ]
    assert (sums[0].mass - sums[1].mass == (n - 64) // 64 * SATURATED).all()
    assert (sums[1].den == n * SATURATED).all()


def test_a_correction_beyond_32_bits_is_left_out():
    n, q = 1200, rng(27).normal(size=(2, 64)).astype(np.float32)
    cache, _, _ = filled(Layout(1, 64), n)
    fit = cache.fits[1024][0]
    sums = []
    for factor in (1, 0, 2.0**60):
        cache.fits[1024] = [replace(fit, f=(fit.f * np.float32(factor)))]
        sums.append(decode_row_group(cache, 0, q, n - 1, gates=NARROW).sums)
    assert (sums[0].num != sums[1].num).any()
    assert (sums[2].num == sums[1].num).all()


# Reruns (section 8)


@pytest.mark.parametrize("gates", [OPEN, NARROW])
@pytest.mark.parametrize("peak", [30.0, 300.0, 2000.0])
def test_a_missed_peak_is_recomputed(peak, gates):
    """One unsampled key far above the rest: the sampled reference is useless, the row is right all the same."""
    k, v = correlated(rng(10), 2000, 1, 64)
    q = rng(11).normal(size=(2, 64)).astype(np.float32)
    k[unsampled(2000), 0] = key_of_logit(q[0], peak)
    got = decode_row_group(cache_of(k, v), 0, q, 1999, gates=gates)
    out, lse = attention64(q, k[:, 0], v[:, 0])
    assert got.recomputed[0]
    assert error(got.out[0], out[0]) < 1e-3
    assert abs(got.lse[0] - lse[0]) < 2e-3 + 1e-4 * peak


@pytest.mark.parametrize("shift", [-1e5, -200, -60, -12, -5, 0.9, 8, 60, 200, 1e5])
def test_a_wrong_reference_changes_little(shift):
    cache, k, v = filled(Layout(1, 64), 1000)
    q = rng(12).normal(size=(3, 64)).astype(np.float32)
    got = decode_row_group(cache, 0, q, 999, reference_shift=shift)
    out, lse = attention64(q, k[:, 0], v[:, 0])
    assert error(got.out, out) < 2e-4
    assert np.abs(got.lse - lse).max() < 1e-3
    assert got.recomputed.all() == got.recomputed.any() == (abs(shift) > 6)
    assert ((got.sums.den >= 2**24) & (got.sums.den < SATURATED)).all()


@pytest.mark.parametrize(("shift", "again"), [(0.9, [False, False]), (1.5, [True, False]), (2.5, [True, True])])
def test_how_high_a_reference_may_be_follows_from_the_spread(shift, again):
    """Rows of two queries: one sees all keys alike, the other one key above all."""
    cache, k, v = filled(Layout(1, 64), 1000)
    q = np.zeros((2, 64), np.float32)
    q[1] = 8 * k[990, 0]
    got = decode_row_group(cache, 0, q, 999, reference_shift=shift)
    assert got.recomputed.tolist() == again
    assert error(got.out, attention64(q, k[:, 0], v[:, 0])[0]) < 2e-4


@pytest.mark.parametrize("shift", [-60, 60, 1e5])
def test_a_wrong_reference_does_not_change_what_depth_means(shift):
    """What is dropped follows the new reference, which lies where `den` says."""
    cache, k, v = filled(Layout(1, 64), 3000)
    q = 3 * rng(13).normal(size=(3, 64)).astype(np.float32)
    want = attention64(q, k[:, 0], v[:, 0])[0]
    right, wrong = (decode_row_group(cache, 0, q, 2999, gates=NARROW, reference_shift=s) for s in (0, shift))
    assert wrong.recomputed.all()
    assert wrong.kept_fraction.min() < 0.9
    higher = max(0.0, np.log2(right.sums.den / wrong.sums.den).max())
    assert error(wrong.out, want) < 2 * 2**higher * error(right.out, want)


def test_rows_that_are_done_keep_their_sums():
    """A mate's reruns change neither bits nor what was read; the first run is the partial over all keys."""
    n, q = 2000, rng(28).normal(size=(3, 64)).astype(np.float32)
    k, v = correlated(rng(29), n, 1, 64)
    k[unsampled(n), 0] = key_of_logit(q[1], 200)
    k -= k @ q[[0, 2]].T @ np.linalg.inv(q[[0, 2]] @ q[[0, 2]].T) @ q[[0, 2]]  # the others see equal weights
    cache = cache_of(k, v)
    got = decode_row_group(cache, 0, q, n - 1, gates=NARROW)
    first = partial_row_group(cache, 0, q, n - 1, (0, n), gates=NARROW)
    assert got.recomputed.tolist() == [False, True, False]
    for name in ("num", "den", "mass", "peak", "dropped"):
        same = getattr(got.sums, name) == getattr(first.sums, name)
        assert same[[0, 2]].all()
        assert not same[1].all()
    assert (got.out[[0, 2]] == first.out[[0, 2]]).all()
    assert (got.levels.v[[0, 2]] == first.levels.v[[0, 2]]).all()
    assert got.kept_fraction[1] < 0.1 < got.kept_fraction[0]  # and the mate, alone by then, reads for itself


def test_rows_that_run_again_decide_among_themselves():
    """All of K is read either way, so a row's first run says the same of it in a group and alone, and so do reruns."""
    n, q = 2000, rng(30).normal(size=(3, 64)).astype(np.float32)
    k, v = correlated(rng(31), n, 1, 64)
    peak = unsampled(n)
    k[peak] = key_of_logit(q[1], 200)
    gates = np.array([np.inf, np.inf, 8, 7, 5], np.float32)
    q[2] = -q[1]
    group, alone = (decode_row_group(cache_of(k, v), 0, rows, n - 1, gates=gates) for rows in (q, q[1:2]))
    assert group.recomputed[1]
    assert not group.recomputed[2]
    assert (group.levels.v[1] < group.levels.v[2]).any()
    for name in ("num", "den", "mass"):
        assert (getattr(group.sums, name)[1] == getattr(alone.sums, name)[0]).all()
    assert (group.out[1] == alone.out[0]).all()


# The grid


def outlier_case(bits, logit=-40.0, n=2000, seed=32):
    """Ordinary keys and, in the middle, a value 2^bits times as large at `logit` for row 0."""
    k, v = correlated(rng(seed), n, 1, 64)
    q = rng(seed + 1).normal(size=(2, 64)).astype(np.float32)
    at = unsampled(n)
    k[at, 0] = key_of_logit(q[0], logit)
    v[at] = rng(seed + 2).normal(size=64) * 2.0**bits
    return q, k, v


@pytest.mark.parametrize("bits", [10, 16, 30, 45])
def test_a_large_value_that_hardly_counts_costs_no_accuracy(bits):
    """It sets E, on whose grid the others would vanish; the row runs again on its own grid."""
    q, k, v = outlier_case(bits)
    got = decode_row_group(cache_of(k, v), 0, q[:1], 1999)
    _, _, ordinary = outlier_case(0)
    usual = decode_row_group(cache_of(k, ordinary), 0, q[:1], 1999)
    want, exact = (attention64(q[:1], k[:, 0], x[:, 0])[0] for x in (v, ordinary))
    assert error(want, exact) < 1e-3
    assert got.recomputed.all()
    assert not usual.recomputed.any()
    assert error(got.out, want) < 2 * error(usual.out, exact) < 1e-4
    assert got.e[0] <= 16 * usual.e[0]
    assert got.sums.mass[0] <= got.sums.den[0]


@pytest.mark.parametrize("bits", [16, 30, 45])
def test_a_large_value_that_counts(bits):
    """Row 0 consists of it and is done at once, row 1 does not see it."""
    q, k, v = outlier_case(bits, logit=5.0)
    q[1] -= q[0] * (q[0] @ q[1] / (q[0] @ q[0]) + 6)  # a logit of -6 * 5
    got = decode_row_group(cache_of(k, v), 0, q, 1999)
    want = attention64(q, k[:, 0], v[:, 0])[0]
    assert got.recomputed.tolist() == [False, True]
    assert got.e[0] > 2.0 ** (bits // 2) * got.e[1]
    assert error(got.out[0], want[0]) < 1e-3
    assert error(got.out[1], want[1]) < 1e-3


def test_a_grid_becomes_finer_by_60_bits_at_most():
    q, k, v = outlier_case(100)
    k[:, 0] += q[0] / 4  # keeps the large value's weight below 2^-64
    cache = cache_of(k, v)
    got, first = decode_row_group(cache, 0, q[:1], 1999), partial_row_group(cache, 0, q[:1], 1999, (0, 2000))
    assert np.isfinite(got.out).all()
    assert first.e[0] == 2.0**60 * got.e[0]


@pytest.mark.parametrize(
    ("logit", "sink_value", "again"), [(0, 1, 0), (9, 1, 0), (12, 2.0**-9, 0), (18, 2.0**-9, 1), (18, 2.0**-14, 1)]
)
def test_a_fine_grid_keeps_its_promise(logit, sink_value, again):
    """Roundings stay below 2^-8.8 of a random sum of `mass` over 2^S keys: for equal weights, and for a key of tiny V
    that holds almost everything beside keys whose weights are a few units."""
    n, r = 8192, rng(36)
    q = rng(35).normal(size=(1, 64)).astype(np.float32)
    k, v = (r.normal(size=(n, 1, 64)).astype(np.float32) for _ in range(2))
    k *= np.float32(0.02)
    k[0, 0] = key_of_logit(q[0], logit)
    v[0] *= np.float32(sink_value)
    cache = cache_of(k, v, tail=False)
    got = decode_row_group(cache, 0, q, n - 1)
    x = log_weights(cache, q, n - 1, got.levels.k) - got.z[:, None].astype(np.float64)
    values, e = read_values(cache, n - 1, got.levels.v[0])
    rounding = got.sums.num * 2.0**-16 - (np.exp2(x + 26) * e / got.e[:, None].astype(np.float64)) @ values
    random_sum = got.sums.mass * 2.0 ** (-got.spread / 2) * np.sqrt((values * values).mean() * 64)
    assert (np.linalg.norm(rounding, axis=1) < 2**-8.8 * random_sum).all()
    assert got.recomputed[0] == again


# Rows that cannot be done


def test_logits_beyond_fp32_are_nan():
    """A logit of 1e31 is rounded by far more than a weight's range; a row without a finite reference is not run."""
    n, q = 1200, rng(37).normal(size=(3, 64)).astype(np.float32)
    k, v = correlated(rng(41), n, 1, 64)
    k[n - 3, 0] = key_of_logit(q[1], 2000)
    q[:2] *= np.array([[1e30], [1e36]], np.float32)
    cache = cache_of(k, v)
    got, alone = (decode_row_group(cache, 0, rows, n - 1, gates=NARROW) for rows in (q, q[2:]))
    for x in (got.out, got.lse, got.z, got.e, got.spread, got.dropped_mass):
        assert np.isnan(x[:2]).all()
        assert np.isfinite(x[2]).all()
    assert not got.sums.num[:2].any()
    assert not got.sums.den[:2].any()
    assert not got.kept_fraction[:2].any()
    assert got.recomputed[0]
    assert not got.recomputed[1]
    assert (got.levels.v[2] >= alone.levels.v[0]).all()


def test_a_reference_at_the_end_of_fp32_still_recovers():
    cache, k, v = filled(Layout(1, 64), 500)
    q = rng(38).normal(size=(2, 64)).astype(np.float32)
    want = attention64(q, k[:, 0], v[:, 0])[0]
    for shift in (-1e38, 1e38):
        assert error(decode_row_group(cache, 0, q, 499, reference_shift=shift).out, want) < 2e-4


# The sink


@pytest.mark.parametrize("sink", [-30.0, 0.0, 9.0, 25.0, 40.0, 60.0])
def test_a_sink_is_added_at_the_finish(sink):
    """It scales the output, however much of the denominator it holds, and changes nothing else."""
    cache, _, _ = filled(Layout(1, 64), 1500)
    q = rng(39).normal(size=(2, 64)).astype(np.float32)
    sinks = np.full(2, sink, np.float32)
    got, bare = (decode_row_group(cache, 0, q, 1499, gates=NARROW, sinks=s) for s in (sinks, None))
    for name in ("num", "den", "mass", "dropped"):
        assert (getattr(got.sums, name) == getattr(bare.sums, name)).all()
    assert (got.z == bare.z).all()
    assert not got.recomputed.any()
    weight = np.exp(sink - bare.lse.astype(np.float64))[:, None]
    assert error(got.out * (1 + weight), bare.out) < 1e-5  # fp32 exponents up to 2^7
    assert error(got.dropped_mass * (1 + weight[:, 0]), bare.dropped_mass) < 1e-5
    assert np.abs(got.lse - np.logaddexp(sink, bare.lse.astype(np.float64))).max() < 1e-5 * max(10.0, sink)


def test_sinks_at_the_ends():
    cache, _, _ = filled(Layout(1, 64), 1500)
    q = rng(40).normal(size=(6, 64)).astype(np.float32)
    sinks = np.array([-np.inf, np.inf, np.nan, 3e38, 500, 0], np.float32)
    got = decode_row_group(cache, 0, q, 1499, gates=NARROW, sinks=sinks)
    without = decode_row_group(cache, 0, q, 1499, gates=NARROW)
    assert (got.levels.v == without.levels.v).all()
    assert (got.sums.num == without.sums.num).all()  # even a NaN acts at the finish alone
    assert (got.out[0] == without.out[0]).all()
    assert got.lse[0] == without.lse[0]
    assert not got.out[[1, 3, 4]].any()  # below 2^-149, or nothing at all
    assert np.isposinf(got.lse[[1, 3]]).all()  # 3e38 in base 2 is infinite
    assert abs(got.lse[4] - 500) < 1e-4
    assert np.isnan(got.out[2]).all()
    assert np.isnan(got.lse[2])
    assert not got.recomputed.any()
