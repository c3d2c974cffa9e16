"""What is read, the integer sums, finish and recompute (docs/numerics.md, 6 to 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from oracle.cache import OracleCache
from oracle.fit import largest_mark
from oracle.ieee import F32, F64, I64, Bool, bf16_value, f32, fix, fma, log2
from oracle.planes import BLOCK, rotate
from oracle.reference import LOG2_E, Queries, VisibleKeys, make_queries, reference, relative_logits

OPEN = np.full(5, np.inf, np.float32)  # every stored plane of every visible key
LN_2 = np.float32(np.log(2.0))
SAFE = (2**25, 2**32 - 1)  # den' is safe in [first, second)


@dataclass(frozen=True)
class GateTable:
    """Section 6: gates (K.l, K.b, V.h, V.l, V.b) by depth."""

    rows: F32  # (rows, 6): depth ascending, then its gates
    full: F32  # (5,): depth None

    def gates(self, depth: float | None) -> F32:
        """(5,) gates of a depth; None and +inf read every V."""
        if depth is None or np.isposinf(depth):
            return self.full
        d = np.float32(depth)
        first, last = self.rows[0], self.rows[-1]
        if d < first[0]:
            return first[1:] + (d - first[0])
        if d >= last[0]:
            return last[1:] + (d - last[0])
        i = int(np.searchsorted(self.rows[:, 0], d, side="right")) - 1
        low, high = self.rows[i], self.rows[i + 1]
        return fma(high[1:] - low[1:], (d - low[0]) / (high[0] - low[0]), low[1:])


@dataclass(frozen=True)
class Levels:
    """How deeply the G rows of a token together read each of its n visible keys."""

    k: I64  # (n,) 0, 1, 2: planes of K beyond h
    v: I64  # (n,) 0: not read; 1: h; 2: h, l; 3: h, l, b


@dataclass(frozen=True)
class RowGroup:
    """What the G rows of one token on one KV head return. In NaN rows the sums are 0, and z and e NaN."""

    out: F32  # (G, D)
    lse: F32  # (G,) natural logarithm
    z: F32  # (G,) the reference used last, base 2
    e: F32  # (G,) E
    num: I64  # (G, D) unit E 2^-42, rotated channels
    den: I64  # (G,) unit 2^-26, without the sink
    dropped: I64  # (G,) the part of den that dropped keys hold
    dropped_mass: F64  # (G,) its share of the denominator, the sink's part included
    kept_fraction: float  # keys whose V was read / visible keys
    recomputed: Bool  # (G,) rows whose reference was out of range
    levels: Levels


@np.errstate(all="ignore")
def decide(queries: Queries, keys: VisibleKeys, z: F32, gates: F32) -> tuple[Levels, F32]:
    """Section 6 for live rows: levels, and (G, n) `x` at the level of K reached. `gates` (G, 5)."""
    always = keys.always_read()
    e_k, spread = keys.k.e()[None, :], queries.spread[:, None]
    g_kl, g_kb, g_vh, g_vl, g_vb = (gates[:, i, None] for i in range(5))

    def any_row(value: F32, gate: F32) -> Bool:
        return np.asarray((value >= -gate).any(axis=0))

    x = relative_logits(queries, keys.k, 0, z)
    k_level = np.zeros(keys.count, np.int64)
    if keys.k.finest >= 1:
        read = always | any_row(fma(spread, e_k, x), g_kl)
        x = np.where(read, relative_logits(queries, keys.k, 1, z), x)
        k_level += read
        if keys.k.finest == 2:
            read = read & any_row(fma(spread / np.float32(16), e_k, x), g_kb)
            x = np.where(read, relative_logits(queries, keys.k, 2, z), x)
            k_level += read

    read = always | any_row(x, g_vh)
    v_level = read.astype(np.int64)
    if keys.v.finest >= 1:
        read = read & (always | any_row(x, g_vl))
        v_level += read
        if keys.v.finest == 2:
            read = read & any_row(x, g_vb)
            v_level += read
    return Levels(k_level, v_level), x


@dataclass(frozen=True)
class Token:
    """Everything about one token on one KV head that its rows share."""

    cache: OracleCache
    head: int
    keys: VisibleKeys
    windowed: bool
    span: tuple[int, int]  # keys that the sums are taken over
    e: np.float32  # E

    @np.errstate(all="ignore")
    def sums(self, x: F32, levels: Levels, gates: F32) -> tuple[I64, I64, I64]:
        """Section 7 for live rows: num (G, D), den (G,), dropped (G,)."""
        keys = self.keys
        at = np.arange(keys.lo, keys.position + 1)
        inside = (self.span[0] <= at) & (at < self.span[1])
        read = levels.v > 0
        d = np.where(inside, fix(x), 0)
        w = np.where(inside & read, fix(x, (keys.v.e() / self.e)[None, :]), 0)
        values = np.zeros((keys.count, keys.v.h.shape[-1] * 2), np.int64)
        for level in range(keys.v.finest + 1):
            chosen = levels.v == level + 1
            values[chosen] = keys.v[chosen].reading(level)
        num = (w << 8) @ values
        lost = np.where(read, 0, d)
        if self.cache.layout.tail and keys.settled.start < keys.settled.stop:
            num = num + self._means(lost)
            if not self.windowed:
                num = num + self._rank16(np.where(read, 0, 1) * inside, d, gates)
        return num, d.sum(axis=1), lost.sum(axis=1)

    def _per_block(self, values: I64) -> I64:
        """(G, n) summed over each settled block: (G, blocks)."""
        return values[:, self.keys.in_settled].reshape(values.shape[0], -1, BLOCK).sum(axis=2)

    def _means(self, lost: I64) -> I64:
        """What block means contribute for dropped keys."""
        blocks = self.cache.blocks
        ratio = bf16_value(blocks.mean_scale[self.head, self.keys.settled]) / self.e
        weight = np.rint(self._per_block(lost).astype(np.float64) * ratio.astype(np.float64))
        weight = np.where(np.isnan(weight), 0.0, weight)
        return (weight.astype(np.int64) << 16) @ blocks.mean[self.head, self.keys.settled].astype(np.int64)

    def _rank16(self, dropped: I64, d: I64, gates: F32) -> I64:
        """The correction predicted from dropped keys' K codes."""
        mark = largest_mark(self.keys.position - 63)
        if mark is None:
            return np.zeros((d.shape[0], 2 * self.keys.v.h.shape[-1]), np.int64)
        fit, here = self.cache.fits[mark][self.head], self.keys.in_settled
        sh = np.clip(np.ceil(np.float32(18) - gates[:, 2]), 0, 24).astype(np.int64)[:, None]
        c = np.minimum(255, (d + ((1 << sh) >> 1)) >> sh) * dropped
        ubar = self.cache.blocks.ubar[self.head, self.keys.settled].astype(np.int64)
        s = 16 * (c[:, here] @ self.keys.k[here].u()) - self._per_block(c) @ ubar
        t = s @ fit.p.astype(np.int64).T
        slope = fit.u.astype(np.float64) * fit.f.astype(np.float64)[:, None]
        scale = np.ldexp(1.0, 12 + sh[:, 0]) / np.float64(self.e)
        phi = np.clip(np.rint(slope[None] * scale[:, None, None]), -(2.0**31), 2.0**31 - 1).astype(np.int64)
        return (t[:, :, None] * phi).sum(axis=1)


@np.errstate(all="ignore")
def with_sinks(den: I64, z: F32, sinks: F32 | None) -> I64:
    """Section 8: den' (G,); `sinks` (G,) in base 2."""
    return den if sinks is None else den + fix(sinks - z)


@np.errstate(all="ignore")
def finish(num: I64, den: I64, z: F32, e: F32, sinks: F32 | None) -> tuple[F32, F32, Bool]:
    """Section 8: out (G, D), LSE (G,) and whether the denominator is in range. `sinks` (G,) in base 2."""
    den = with_sinks(den, z, sinks)
    quotient = f32(num.astype(np.float64) / den.astype(np.float64)[:, None])
    out = rotate(quotient * (e * np.float32(2.0**-16))[:, None])
    lse = (z + (log2(f32(den)) - np.float32(26))) * LN_2
    return out, lse, (den >= SAFE[0]) & (den < SAFE[1])


def _prepare(
    cache: OracleCache, head: int, q: npt.ArrayLike, position: int, softmax_scale: float | None,
    window: int | None, path: Sequence[int] | None, span: tuple[int, int] | None,
) -> tuple[Queries, Token]:  # fmt: skip
    queries = make_queries(q, softmax_scale or cache.layout.head_dim**-0.5)
    keys = VisibleKeys.of(cache, head, position, window, path)
    e = np.float32(np.nan) if keys.poisoned() else keys.value_bound()
    return queries, Token(cache, head, keys, window is not None, span or (0, position + 1), e)


@np.errstate(all="ignore")
def _base2(sinks: npt.ArrayLike | None) -> F32 | None:
    return None if sinks is None else f32(sinks) * np.float32(LOG2_E)


def _run(token: Token, queries: Queries, z: F32, gates: F32) -> RowGroup:
    """One pass over all rows; those that are NaN ask for nothing and have zero sums. out and LSE stay NaN."""
    g, d = queries.qa.shape
    live = np.isfinite(z) & np.isfinite(queries.e) & np.isfinite(token.e)
    num, den, dropped = np.zeros((g, d), np.int64), np.zeros(g, np.int64), np.zeros(g, np.int64)
    levels, x = decide(queries[live], token.keys, z[live], gates[live])
    if live.any():
        num[live], den[live], dropped[live] = token.sums(x, levels, gates[live])
    nan = np.full(g, np.nan, np.float32)
    return RowGroup(
        out=np.full((g, d), np.nan, np.float32),
        lse=nan,
        z=np.where(live, z, nan),
        e=np.where(live, token.e, nan),
        num=num,
        den=den,
        dropped=dropped,
        dropped_mass=nan.astype(np.float64),
        kept_fraction=float((levels.v > 0).mean()),
        recomputed=np.zeros(g, np.bool_),
        levels=levels,
    )


def _empty(g: int, d: int) -> RowGroup:
    """A token that sees no key."""
    zeros, none = np.zeros(g, np.int64), np.zeros(0, np.int64)
    low = np.full(g, -np.inf, np.float32)
    return RowGroup(
        out=np.zeros((g, d), np.float32),
        lse=low,
        z=low,
        e=np.zeros(g, np.float32),
        num=np.zeros((g, d), np.int64),
        den=zeros,
        dropped=zeros,
        dropped_mass=np.zeros(g),
        kept_fraction=0.0,
        recomputed=np.zeros(g, np.bool_),
        levels=Levels(none, none),
    )


def _gates(gates: npt.ArrayLike, g: int) -> F32:
    return np.broadcast_to(np.asarray(gates, dtype=np.float32), (g, 5))


@np.errstate(all="ignore")
def decode_row_group(
    cache: OracleCache, head: int, q: npt.ArrayLike, position: int, *, gates: npt.ArrayLike = OPEN,
    softmax_scale: float | None = None, window: int | None = None, sinks: npt.ArrayLike | None = None,
    path: Sequence[int] | None = None, reference_shift: float = 0.0,
) -> RowGroup:  # fmt: skip
    """Decodes the rows q (G, D) of the token at `position` on one KV head. `gates` (5,) or (G, 5); `sinks` (G,) natural
    logits; `window` keys before its own that the token sees; `path` the draft nodes that it sees, its own last;
    `reference_shift` is added to sampled references."""
    rows = np.asarray(q, dtype=np.float32)
    if position < 0:
        return _empty(*rows.shape)
    queries, token = _prepare(cache, head, rows, position, softmax_scale, window, path, None)
    sinks2, by_row = _base2(sinks), _gates(gates, rows.shape[0])
    z = reference(queries, token.keys, sinks2, exact=False) + np.float32(reference_shift)
    recomputed = np.zeros(rows.shape[0], np.bool_)
    for attempt in range(3):
        result = _run(token, queries, z, by_row)
        live = np.isfinite(result.z)
        out, lse, safe = finish(result.num, result.den, result.z, result.e, sinks2)
        wrong = live & ~safe
        recomputed |= wrong
        if not wrong.any():
            break
        if attempt == 0:
            z = np.where(wrong, reference(queries, token.keys, sinks2, exact=True), z)
        else:
            by_row = _gates(OPEN, rows.shape[0])
    good = live & safe
    return replace(
        result,
        out=np.where(good[:, None], out, np.float32(np.nan)),
        lse=np.where(good, lse, np.float32(np.nan)),
        dropped_mass=np.where(good, result.dropped / with_sinks(result.den, result.z, sinks2), np.nan),
        recomputed=recomputed,
    )


def partial_row_group(
    cache: OracleCache, head: int, q: npt.ArrayLike, position: int, span: tuple[int, int], *,
    gates: npt.ArrayLike = OPEN, softmax_scale: float | None = None, window: int | None = None,
    sinks: npt.ArrayLike | None = None, path: Sequence[int] | None = None, reference_shift: float = 0.0,
) -> RowGroup:  # fmt: skip
    """The sums of one pass over the keys of `span` (block-aligned, or its end past the token): num, den, z and e; no
    output. Sinks enter the reference only."""
    rows = np.asarray(q, dtype=np.float32)
    if position < 0:
        return _empty(*rows.shape)
    queries, token = _prepare(cache, head, rows, position, softmax_scale, window, path, span)
    z = reference(queries, token.keys, _base2(sinks), exact=False) + np.float32(reference_shift)
    return _run(token, queries, z, _gates(gates, rows.shape[0]))
