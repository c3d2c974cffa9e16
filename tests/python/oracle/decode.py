"""Rows from their first run to their output: finish and recompute (docs/numerics.md, 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oracle.cache import OracleCache
from oracle.ieee import F32, F64, FRACTION_BITS, I64, SATURATED, Bool, exp2_parts, f32, log2
from oracle.planes import rotate
from oracle.reading import CONCENTRATED, OPEN, Levels, decide, widen
from oracle.reference import LOG2_E, Queries, VisibleKeys, make_queries, reference
from oracle.sums import Sums, Token

LN_2 = np.float32(np.log(2.0))
RERUNS = 7
SINK_HIGHEST = 900  # exp2 of a sink
SINK_ALONE = np.float32(64)  # above it the LSE is the sink's
FINER_AT_MOST = 60  # bits, in all reruns of a row
E_LOWEST = 100  # minus log2 of the smallest E
FINER_AT_LEAST = 3  # bits, or a row does not run again for them


@dataclass(frozen=True)
class RowGroup:
    """What the G rows of one token on one KV head return. In NaN rows sums and levels are 0, all else is NaN."""

    out: F32  # (G, D)
    lse: F32  # (G,) natural logarithm
    z: F32  # (G,) the reference used last, base 2
    e: F64  # (G,) E used last
    spread: F32  # (G,) S
    visible: I64  # (G,) visible keys that the sums are taken over
    sums: Sums
    dropped_mass: F64  # (G,) share of the denominator that dropped keys hold, the sink's part included
    kept_fraction: F64  # (G,) keys whose V was read / visible keys, 0 in NaN rows
    recomputed: Bool  # (G,) rows that ran again
    levels: Levels  # (G, n)


def holds(den: I64, spread: F32) -> Bool:
    """Whether the references of rows hold."""
    high = np.float32(26) - log2(f32(den))
    concentrated = ~(spread - np.float32(2) * high > CONCENTRATED)
    return np.asarray((den >= np.where(concentrated, 2**24, 2**25)) & (den < SATURATED))


def mass_holds(den: I64, mass: I64, count: int) -> Bool:
    """Whether no weight of the mass can have saturated."""
    return np.asarray(mass <= den + count)


@np.errstate(all="ignore")
def is_fine(mass: I64, count: int, spread: F32) -> Bool:
    """Whether the grids of rows are fine."""
    keys = log2(np.full_like(spread, np.float32(count)))
    floor = np.maximum(np.float32(7) + (keys + spread) / np.float32(2), np.float32(5) + keys)
    return np.asarray((mass > 0) & (log2(f32(mass)) >= floor))


def _bits(numbers: I64) -> I64:
    return np.asarray([int(n).bit_length() for n in numbers], np.int64)


def finer_bits(den: I64, mass: I64, count: int, spread: F32, e: F64, so_far: I64) -> I64:
    """k: by how many bits rows' grids want to be finer, of rows whose reference holds."""
    finer = np.minimum(_bits(den) - _bits(mass + count) - 1, FINER_AT_MOST - so_far)
    finer = np.minimum(finer, np.frexp(e)[1] - 1 + E_LOWEST)
    finer = np.where(is_fine(mass, count, spread) | (finer < FINER_AT_LEAST), 0, finer)
    coarser = np.maximum(_bits(den) - _bits(mass) - 1, -so_far)
    return np.where(mass_holds(den, mass, count), finer, coarser)


@np.errstate(all="ignore")
def next_reference(z: F32, sums: Sums) -> F32:
    """Z of the next run of rows whose reference does not hold."""
    exact = (sums.den >= 2**10) & ((sums.den < SATURATED) | (sums.peak < np.float32(6)))
    return np.where(exact, z + (log2(f32(sums.den)) - np.float32(27)), z + sums.peak)


@np.errstate(all="ignore")
def with_sinks(den: I64, z: F32, sinks: F32 | None) -> tuple[F64, F32]:
    """den' (G,) and x (G,) of the sinks; `sinks` (G,) natural logits."""
    x = np.full_like(z, -np.inf) if sinks is None else sinks * np.float32(LOG2_E) - z
    p, n = exp2_parts(x, SINK_HIGHEST)
    return den.astype(np.float64) + np.ldexp(p.astype(np.float64), (n + FRACTION_BITS).astype(np.int32)), x


@np.errstate(all="ignore")
def finish(num: I64, den: I64, z: F32, e: F64, sinks: F32 | None) -> tuple[F32, F32]:
    """out (G, D) and LSE (G,) of rows that are done; `sinks` (G,) natural logits."""
    total, x = with_sinks(den, z, sinks)
    out = rotate(f32((num.astype(np.float64) / total[:, None]) * (e * 2.0**-16)[:, None]))
    y = np.where(x > SINK_ALONE, x, log2(f32(total)) - np.float32(26))
    return out, (z + y) * LN_2


class _Rows:
    """The rows of one token on one KV head between runs."""

    def __init__(
        self, token: Token, queries: Queries, gates: npt.ArrayLike, sinks: F32 | None, reference_shift: float
    ) -> None:
        g, d = queries.qa.shape
        self.token, self.queries, self.sinks = token, queries, sinks
        declared = reference(queries, token.keys)
        self.z = declared.z + np.float32(reference_shift)
        self.spread = declared.spread
        self.gates = widen(np.broadcast_to(np.asarray(gates, dtype=np.float32), (g, 5)), self.spread)
        self.e = np.full(g, token.value_bound())
        self.finer = np.zeros(g, np.int64)  # K
        self.sums = Sums.zeros(g, d)
        self.levels = Levels(*(np.zeros((g, token.keys.count), np.int64) for _ in range(2)))
        self.again = np.zeros(g, np.bool_)
        self.valid = np.isfinite(self.z) & np.isfinite(queries.e) & np.isfinite(self.e)

    @np.errstate(all="ignore")
    def run(self, rows: Bool) -> None:
        """One run of a selection of rows, which decide together what is read."""
        if not rows.any():
            return
        levels, x = decide(self.queries[rows], self.token.keys, self.z[rows], self.gates[rows])
        self.sums.put(rows, self.token.sums(x, levels, self.gates[rows], self.e[rows]))
        self.levels.k[rows], self.levels.v[rows] = levels.k, levels.v

    def run_until_done(self) -> None:
        """The first run and the reruns."""
        pending = self.valid.copy()
        for attempt in range(RERUNS + 1):
            self.run(pending)
            held = holds(self.sums.den, self.spread)
            k = finer_bits(*self._masses(), self.spread, self.e, self.finer)
            pending &= ~(held & (k == 0))
            if attempt == RERUNS:
                break
            self.again |= pending
            wrong, coarse = pending & ~held, pending & held
            self.z = np.where(wrong, next_reference(self.z, self.sums), self.z)
            self.e = np.where(coarse, np.ldexp(self.e, np.where(coarse, -k, 0).astype(np.int32)), self.e)
            self.finer += np.where(coarse, k, 0)
            self.valid &= np.isfinite(self.z)
            pending &= self.valid
        # Sums may be finished whose reference only a row that spreads would have run again for.
        self.valid &= holds(self.sums.den, np.zeros_like(self.spread)) & mass_holds(*self._masses())

    def _masses(self) -> tuple[I64, I64, int]:
        return self.sums.den, self.sums.mass, self.token.keys.count

    @np.errstate(all="ignore")
    def result(self) -> RowGroup:
        """What is returned of the rows as they are, out and LSE included."""
        nan, valid = np.float32(np.nan), self.valid
        z, spread = (np.where(valid, x, nan) for x in (self.z, self.spread))
        e = np.where(valid, self.e, np.nan)
        self.sums.put(~valid, Sums.zeros(int((~valid).sum()), self.sums.num.shape[1]))
        self.levels.k[~valid], self.levels.v[~valid] = 0, 0
        out, lse = finish(self.sums.num, self.sums.den, z, e, self.sinks)
        shown = valid if self.sinks is None else valid & ~np.isnan(self.sinks)
        return RowGroup(
            out=np.where(shown[:, None], out, nan),
            lse=np.where(shown, lse, nan),
            z=z,
            e=e,
            spread=spread,
            visible=np.where(valid, self.token.in_span().sum(), 0),
            sums=self.sums,
            dropped_mass=np.where(shown, self.sums.dropped / with_sinks(self.sums.den, z, self.sinks)[0], np.nan),
            kept_fraction=(self.levels.v > 0).mean(axis=1),
            recomputed=self.again,
            levels=self.levels,
        )


def _empty(g: int, d: int) -> RowGroup:
    """A token that sees no key."""
    zeros, low = np.zeros(g, np.float32), np.full(g, -np.inf, np.float32)
    return RowGroup(
        out=np.zeros((g, d), np.float32),
        lse=low,
        z=low,
        e=np.zeros(g),
        spread=zeros,
        visible=np.zeros(g, np.int64),
        sums=Sums.zeros(g, d),
        dropped_mass=np.zeros(g),
        kept_fraction=np.zeros(g),
        recomputed=np.zeros(g, np.bool_),
        levels=Levels(np.zeros((g, 0), np.int64), np.zeros((g, 0), np.int64)),
    )


def _rows(
    cache: OracleCache, head: int, q: F32, position: int, span: tuple[int, int], gates: npt.ArrayLike,
    softmax_scale: float | None, window: int | None, sinks: npt.ArrayLike | None, path: Sequence[int] | None,
    reference_shift: float,
) -> _Rows:  # fmt: skip
    queries = make_queries(q, softmax_scale or cache.layout.head_dim**-0.5)
    keys = VisibleKeys.of(cache, head, position, window, path)
    token = Token(cache, head, keys, window is not None, span)
    return _Rows(token, queries, gates, None if sinks is None else f32(sinks), reference_shift)


def decode_row_group(
    cache: OracleCache, head: int, q: npt.ArrayLike, position: int, *, gates: npt.ArrayLike = OPEN,
    softmax_scale: float | None = None, window: int | None = None, sinks: npt.ArrayLike | None = None,
    path: Sequence[int] | None = None, reference_shift: float = 0.0,
) -> RowGroup:  # fmt: skip
    """Decodes the rows q (G, D) of the token at `position` on one KV head. `gates` (5,) or (G, 5); `sinks` (G,) natural
    logits; `window` keys before its own that the token sees; `path` the draft nodes that it sees, its own last;
    `reference_shift` is added to sampled references."""
    rows = f32(q)
    if position < 0:
        return _empty(*rows.shape)
    options = (gates, softmax_scale, window, sinks, path, reference_shift)
    state = _rows(cache, head, rows, position, (0, position + 1), *options)
    state.run_until_done()
    return state.result()


def partial_row_group(
    cache: OracleCache, head: int, q: npt.ArrayLike, position: int, span: tuple[int, int], *,
    gates: npt.ArrayLike = OPEN, softmax_scale: float | None = None, window: int | None = None,
    sinks: npt.ArrayLike | None = None, path: Sequence[int] | None = None, reference_shift: float = 0.0,
) -> RowGroup:  # fmt: skip
    """The first run alone, over the keys of `span` (block-aligned, or its end past the token): sums, z, e and spread
    are the partial; out and LSE are what these keys alone would give."""
    rows = f32(q)
    if position < 0:
        return _empty(*rows.shape)
    options = (gates, softmax_scale, window, sinks, path, reference_shift)
    state = _rows(cache, head, rows, position, span, *options)
    state.run(state.valid)
    return state.result()
