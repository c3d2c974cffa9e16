"""The oracle against mathematics: fp64 attention, exact rationals and the promises of docs/numerics.md."""

import math
from fractions import Fraction

import numpy as np
import pytest
from oracle import (
    Layout,
    OracleCache,
    Planes,
    fit_tail,
    is_mark,
    largest_mark,
    make_queries,
    page_sections,
    rotate,
    split,
)
from oracle.fit import moments
from oracle.ieee import (
    bf16_nearest,
    bf16_round_up,
    bf16_value,
    ceil_log2,
    exp2_parts,
    f32,
    fix,
    fma,
    log2,
    power_of_two_at_least,
)
from oracle.planes import pack_nibbles, permute_scales, unpack_nibbles
from oracle.reference import factors


def rng(seed=0):
    return np.random.default_rng(seed)


def correlated(r, keys, heads, d, rank=8):
    """Keys with a few strong directions, and V that is partly a linear map of them."""
    basis = r.normal(size=(heads, rank, d))
    latent = r.normal(size=(keys, heads, rank)).cumsum(axis=0) / np.sqrt(np.arange(1, keys + 1))[:, None, None]
    k = np.einsum("thr,hrd->thd", latent, basis) + 0.3 * r.normal(size=(keys, heads, d))
    v = np.einsum("thd,hde->the", k, r.normal(size=(heads, d, d)) / d) + 0.1 * r.normal(size=(keys, heads, d))
    return k.astype(np.float32), v.astype(np.float32)


def filled(layout, keys, seed=0, make=correlated):
    k, v = make(rng(seed), keys, layout.n_kv_heads, layout.head_dim)
    cache = OracleCache(layout)
    cache.write(k, v)
    return cache, k, v


def error(out, want):
    return np.linalg.norm(out - want) / np.linalg.norm(want)


# Arithmetic (conventions, section 4)


def test_fma_rounds_once():
    r = rng()
    a = np.ldexp(r.integers(1 << 23, 1 << 24, 4000), r.integers(-30, 5, 4000)).astype(np.float32)
    b = np.ldexp(r.integers(1 << 23, 1 << 24, 4000), r.integers(-30, 5, 4000)).astype(np.float32)
    near = -(a * b)  # cancels all but the product's rounding error
    far = near * np.ldexp(np.float32(1), r.integers(-60, 60, 4000)).astype(np.float32)
    for c in (near, far, np.float32(1) * near[::-1]):
        got = fma(a, b, c)
        for x, y, z, w in zip(a, b, c, got, strict=True):
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            below, above = np.nextafter(w, np.float32(-np.inf)), np.nextafter(w, np.float32(np.inf))
            miss = abs(Fraction(float(w)) - exact)
            for other in (below, above):
                gap = abs(Fraction(float(other)) - exact)
                assert miss < gap or (miss == gap and w.view(np.uint32) % 2 == 0)


def test_fma_is_not_a_double_rounding():
    """2^-24 (1 + 2^-23)(1 - 2^-23) + 1 = 1 + 2^-24 - 2^-70: rounding to fp64 first would give the tie 1 + 2^-24."""
    a = np.float32(2.0**-24 * (1 + 2.0**-23))
    above, below = np.float32(1 + 2.0**-23), np.float32(1 - 2.0**-23)
    assert fma(a, below, above) == above  # just below the tie; the tie itself goes to 1 + 2^-22
    assert fma(-a, below, -above) == -above
    assert fma(np.float32(2.0**-24), np.float32(1), above) == np.float32(1 + 2.0**-22)
    assert fma(np.float32(2.0**-24), np.float32(1), np.float32(1)) == 1


def test_float_of_an_integer_rounds_once():
    n = (1 << 60) + (1 << 36) + 1  # above a tie of fp32 by less than half an ulp of fp64
    assert f32(np.int64(n)) == np.float32(2.0**60 + 2.0**37)
    assert f32(np.int64(n - 1)) == np.float32(2.0**60)


def test_exp2():
    f = np.linspace(-0.5, 0.5, 100001)
    c = [
        float.fromhex(x) for x in ("0x1.5bda4p-10", "0x1.3ce8acp-7", "0x1.c6b6d8p-5", "0x1.ebf9c2p-3", "0x1.62e42ap-1")
    ]
    assert np.abs(np.polyval([*c, 1.0], f) / np.exp2(f) - 1).max() <= 9.4e-8
    x = rng().uniform(-126, 40, 200000).astype(np.float32)
    p, n = exp2_parts(x)
    relative = np.abs(np.ldexp(p.astype(np.float64), n) / np.exp2(x.astype(np.float64)) - 1)
    assert relative.max() <= 9.4e-8 + 2**-23  # the polynomial's error, then 1 ulp for its last steps
    assert (exp2_parts(np.arange(-126, 41, dtype=np.float32))[0] == 1).all()
    p, n = exp2_parts(np.array([-np.inf, -130, np.nan, 39, 41, np.inf], np.float32))
    assert (p == 1).all()
    assert n.tolist() == [-126, -126, -126, 39, 40, 40]


def test_exp2_of_a_sink_reaches_900():
    x = rng().uniform(-126, 900, 100000).astype(np.float32)
    p, n = exp2_parts(x, 900)
    assert np.abs(np.ldexp(p.astype(np.float64), n) / np.exp2(x.astype(np.float64)) - 1).max() <= 9.4e-8 + 2**-23
    assert int(exp2_parts(np.float32(1e30), 900)[1]) == 900


def test_fix():
    x = rng().uniform(-40, 5.9, 100000).astype(np.float32)
    exact = np.exp2(x.astype(np.float64)) * 2**26
    assert (np.abs(fix(x) - exact) <= 0.5 + exact * 2.5e-7).all()
    assert fix(np.array([6, 40, 1e30, np.inf], np.float32)).tolist() == [2**32 - 1] * 4
    assert fix(np.array([-27.5, -64, -126, -1e30, -np.inf, np.nan], np.float32)).tolist() == [0] * 6
    assert fix(np.float32(0), np.float32(2**-3)) == 2**23
    assert fix(np.float32(0), np.float32(3 * 2**-27)) == 2  # 1.5 to even
    assert fix(np.float32(0), np.float32(2**-27)) == 0
    ends = np.array([-54, -60, -86, -87, -126, -np.inf, np.nan], np.float32)
    assert fix(ends, np.float32(2.0**60)).tolist() == [2**32 - 1, 2**26, 1, 0, 0, 0, 0]
    wide = np.exp2(rng().uniform(-60, 60, 100000)).astype(np.float32)
    exact = np.minimum(np.exp2(x.astype(np.float64)) * wide * 2**26, 2.0**32 - 1)
    assert (np.abs(fix(x, wide) - exact) <= 0.5 + exact * 3.1e-7).all()  # one more rounding: 2^-24


def test_log2():
    y = np.exp2(rng().uniform(-100, 100, 200000)).astype(np.float32)
    exact = np.log2(y.astype(np.float64))
    assert (np.abs(log2(y) - exact) <= 2e-7 + np.abs(exact) * 2**-24).all()
    near_one = rng().uniform(0.9, 1.1, 100000).astype(np.float32)
    exact = np.log2(near_one.astype(np.float64))
    assert (np.abs(log2(near_one) - exact) <= 4e-7 * np.abs(exact)).all()
    powers = np.exp2(np.arange(-120, 121)).astype(np.float32)
    assert (log2(powers) == np.arange(-120, 121)).all()


def test_bf16():
    x = np.abs(rng().normal(size=10000)).astype(np.float32)
    up = bf16_value(bf16_round_up(x))
    assert (up >= x).all()
    assert (bf16_value(bf16_round_up(x) - np.uint16(1)) < x).all()
    assert (np.abs(bf16_value(bf16_nearest(x)) - x) <= np.minimum(up - x, x * 2**-8)).all()
    assert power_of_two_at_least(np.float32(2**-100)) == np.float32(2**-100)
    assert power_of_two_at_least(np.float32(1.0078125)) == 2
    assert ceil_log2(np.array([1, 1.5, 2, 2.0**-100], np.float32)).tolist() == [0, 1, 1, -100]


# Rows and planes (section 1)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_rotation_is_orthonormal_and_its_own_inverse(d):
    hadamard = np.array([[1.0]])
    while len(hadamard) < d:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    assert np.abs(rotate(np.eye(d)) - hadamard / math.sqrt(d)).max() <= 2**-24 / 8
    x = rng().normal(size=(50, d)).astype(np.float32)
    assert error(rotate(x), x.astype(np.float64) @ hadamard / math.sqrt(d)) < 1e-6
    assert error(rotate(rotate(x)), x) < 1e-6


@pytest.mark.parametrize("magnitude", [2.0**-90, 1e-3, 1.0, 1e30])
def test_split_bounds(magnitude):
    x = (rng().standard_t(3, size=(500, 64)) * magnitude).astype(np.float32)
    scale, a, b = split(x)
    e = bf16_value(scale)[:, None].astype(np.float64)
    code, loose = a.astype(np.float64), 1 + 2**-20
    assert (np.abs(x).max(axis=1) <= 127 * e[:, 0] * loose).all()
    assert (np.abs(x - e * code) <= e / 2 * loose).all()
    assert (np.abs(x - e * (code + b / 256.0)) <= e / 512 * loose + e / 512 * (b == 127)).all()
    assert (np.abs(x - e * (16 * np.floor(code / 16) + 7.5)) <= 8 * e * loose).all()


def test_split_of_special_rows():
    x = np.zeros((3, 64), np.float32)
    x[1, 5], x[2, 7] = np.nan, -np.inf
    scale, a, b = split(x)
    assert bf16_value(scale)[0] == np.float32(2**-100)
    assert scale[1:].tolist() == [0x7FC0] * 2
    assert not a.any()
    assert not b.any()


def test_planes_nest():
    rows = rng().normal(size=(200, 64)).astype(np.float32)
    planes = Planes.of_rows(rows, 16)
    rotated, e = rotate(rows).astype(np.float64), planes.e()[:, None] / 256
    errors = [error(e * planes.reading(level), rotated) for level in range(3)]
    assert errors[1] < errors[0] / 8
    assert errors[2] < errors[1] / 128
    assert (Planes.of_rows(rows, 8).reading(1) == planes.reading(1)).all()
    assert (Planes.of_rows(rows, 4).reading(0) == planes.reading(0)).all()


def test_the_coarse_reading_is_the_middle_of_its_codes():
    """Sixteen `a` share an h; their mean is the reading. The rest of a random row then averages to nothing."""
    x = rng(1).normal(size=(4000, 64)).astype(np.float32)
    planes = Planes.of_rows(x, 8)
    for h in range(-8, 8):
        assert set(planes.reading(0)[planes.u() == h + 8].tolist()) == {sum(16 * h + low for low in range(16)) * 16}
    rest = rotate(x) / planes.e()[:, None] - planes.reading(0) / 256
    assert np.abs(rest).max() <= 8 * (1 + 2**-20)
    assert abs(rest.mean()) < 5 * (16 / math.sqrt(12)) / math.sqrt(rest.size) < 0.1


def test_logits_are_products_of_readings():
    """F times e_k in exact arithmetic, up to the few roundings that section 3 writes."""
    k = Planes.of_rows(rng(2).normal(size=(300, 64)), 16)
    q = make_queries(rng(3).normal(size=(4, 64)), 0.3)
    e = q.e.astype(np.float64)[:, None]
    for level, query in ((0, 256 * q.qa), (1, q.q), (2, q.q)):
        reading = k.reading(level).astype(np.float64)
        want, size = (e * a @ b.T / 2**16 for a, b in ((query, reading), (np.abs(query), np.abs(reading))))
        assert (np.abs(factors(q, k, level) - want) <= (2 if level < 2 else 4) * 2**-24 * size).all()


def test_stored_orders():
    codes = rng().integers(0, 16, (3, 64))
    packed = pack_nibbles(codes)
    assert packed[1, 7] == 16 * codes[1, 14] + codes[1, 15]
    assert (unpack_nibbles(packed) == codes).all()
    stored = permute_scales(np.arange(128))
    assert all(stored[64 * (j // 64) + 8 * (j % 8) + (j % 64) // 8] == j for j in range(128))


@pytest.mark.parametrize("page_size", [64, 192, 1024])
@pytest.mark.parametrize(("k_bits", "v_bits", "tail"), [(16, 16, True), (8, 16, False), (4, 8, True)])
def test_page_sections(page_size, k_bits, v_bits, tail):
    layout = Layout(3, 64, page_size, k_bits, v_bits, tail)
    sections = page_sections(layout)
    offsets = [v for k, v in vars(sections).items() if k != "bytes" and v >= 0]
    assert offsets == sorted(set(offsets))
    assert all(v % 128 == 0 for v in (*offsets, sections.bytes))
    per_key = (k_bits + v_bits) // 8 * 64 + 4
    assert sections.bytes >= 3 * page_size * per_key
    assert (sections.k_b >= 0) == (k_bits == 16)
    assert (sections.v_l >= 0) == (v_bits >= 8)
    assert (sections.fit_scale >= 0) == (sections.mean >= 0) == tail


@pytest.mark.parametrize("chunks", [(1, 7, 64, 1000, 300, 228), (1599, 1)])
def test_chunked_writes_leave_the_same_pages(chunks):
    """P3, with marks at 1024, 1280 and 1536."""
    layout = Layout(2, 64, 512)
    whole, k, v = filled(layout, 1600)
    part, at = OracleCache(layout), 0
    for n in chunks:
        part.write(k[at : at + n], v[at : at + n])
        at += n
    data, known = whole.pages()
    other, other_known = part.pages()
    assert data.shape == (4, page_sections(layout).bytes)
    assert (known == other_known).all()
    assert (data == other).all()
    assert not data[~known].any()
    assert list(whole.fits) == [1024, 1280, 1536]
    part.truncate(1100)
    part.write(k[1100:], v[1100:])
    assert (part.pages()[0] == data).all()


def test_block_summaries():
    layout = Layout(2, 64, 64)
    cache, _, _ = filled(layout, 200)
    e, values = cache.v.e()[..., None].astype(np.float64) / 256, cache.v.reading(2)
    want = (e * values)[:, :192].reshape(2, 3, 64, 64).mean(axis=2)
    mean_e = bf16_value(cache.blocks.mean_scale).astype(np.float64)[..., None]
    assert (np.abs(mean_e * cache.blocks.mean - want) <= mean_e * 0.501).all()
    codes = cache.k.u()[:, :192].reshape(2, 3, 64, 64).mean(axis=2) * 16
    assert (np.abs(cache.blocks.ubar - codes) <= 0.5).all()
    assert (cache.bound_value() == cache.v.e()[:, :192].reshape(2, 3, 64).max(axis=2)).all()


# The tail's fit (section 9)


def test_marks():
    marks = [m for m in range(5000) if is_mark(m)]
    assert marks == [1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096]
    assert largest_mark(1023) is None
    assert all(largest_mark(n) == max(m for m in marks if m <= n) for n in range(1024, 5000, 7))


@pytest.mark.parametrize("d", [64, 128])
def test_fit_predicts_like_reduced_rank_least_squares(d):
    k, v = correlated(rng(1), 1280, 1, d, rank=12)
    keys, values = Planes.of_rows(k[:, 0], 16), Planes.of_rows(v[:, 0], 16)
    fit = fit_tail(keys, values)
    u = keys.u().astype(np.float64).reshape(-1, 64, d)
    x = (u - u.mean(axis=1, keepdims=True)).reshape(-1, d)
    y = (values.e()[:, None] / 256.0 * values.reading(2)).reshape(-1, 64, d)
    y = (y - y.mean(axis=1, keepdims=True)).reshape(-1, d)
    gram = x.T @ x
    ridge = np.eye(d) * 1e-3 * np.trace(gram) / d
    full = np.linalg.solve(gram + ridge, x.T @ y)
    directions = np.linalg.svd(x @ full)[2][:16]
    best = x @ full @ directions.T @ directions
    got = x @ fit.p.T.astype(np.float64) @ (fit.u * fit.f[:, None].astype(np.float64))
    residual, floor = np.linalg.norm(y - got), np.linalg.norm(y - best)
    assert floor < 0.9 * np.linalg.norm(y)
    assert residual < 1.02 * floor


def test_fit_sums_are_the_centred_moments():
    k, v = correlated(rng(2), 1024, 1, 64)
    keys, values = Planes.of_rows(k[:, 0], 8), Planes.of_rows(v[:, 0], 8)
    a, b, bound = moments(keys, values)
    u = keys.u().astype(np.float64).reshape(-1, 64, 64)
    u = u - u.mean(axis=1, keepdims=True)
    y = (values.reading(1) * (values.e()[:, None].astype(np.float64) / bound)).reshape(-1, 64, 64)
    assert error(a, 64 * np.einsum("bji,bjk->ik", u, u)) < 1e-12
    assert error(b, 64 * np.einsum("bji,bjk->ik", u, y)) < 1e-3  # y was rounded to integers


def test_fit_leaves_out_rows_far_above_the_usual():
    """A row whose scale is above 4 times the blocks' usual power of two counts as 0, and the grid is the others'."""
    k, v = correlated(rng(4), 1024, 1, 64)
    keys, (zero, loud) = Planes.of_rows(k[:, 0], 16), (v.copy() for _ in range(2))
    zero[500] = 0
    loud[500] *= np.float32(2.0**20)
    usual, without, with_loud = (moments(keys, Planes.of_rows(x[:, 0], 16)) for x in (v, zero, loud))
    assert (with_loud[0] == without[0]).all()
    rounded_y = 2e-3
    assert error(with_loud[1] * float(with_loud[2]), without[1] * float(without[2])) < rounded_y
    assert usual[2] <= with_loud[2] < 2.0**-10 * Planes.of_rows(loud[500], 16).e()
    assert fit_tail(keys, Planes.of_rows(loud[:, 0], 16)).f.any()


def test_fit_of_poisoned_or_constant_keys_adds_nothing():
    k, v = correlated(rng(3), 1024, 1, 64)
    flat = fit_tail(Planes.of_rows(np.ones((1024, 64)), 16), Planes.of_rows(v[:, 0], 16))
    assert not flat.p.any()
    assert not flat.f.any()
    v[7, 0, 3] = np.nan
    bad = fit_tail(Planes.of_rows(k[:, 0], 16), Planes.of_rows(v[:, 0], 16))
    assert not bad.u.any()
    assert not bad.f.any()
