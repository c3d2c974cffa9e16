"""Queries, logits, visible keys and the declared reference (docs/numerics.md, 3 and 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from oracle.cache import OracleCache
from oracle.ieee import F32, FRACTION_BITS, I64, Bool, bf16_value, ceil_log2, f32, fix, fma, log2, power_of_two_at_least
from oracle.planes import BLOCK, Planes, rotate, split

LOG2_E = math.log2(math.e)
EXACT_KEYS = 192  # a row that sees at most so many scores all of them
RECENT = 63  # newest keys counted exactly otherwise, beside key lo
SAMPLES = 128
LARGEST = 1  # samples that stand for themselves alone
UNCERTAINTY = np.float32(float.fromhex("0x1.279a74p+3"))


@dataclass(frozen=True)
class Queries:
    """The G rows of one token on one KV head."""

    qa: I64  # (G, D)
    q: I64  # (G, D): 256 qa + qb
    e: F32  # (G,), NaN where the row is poisoned
    uncertainty: F32  # (G,): M of section 6

    def __getitem__(self, rows: Bool | I64) -> Queries:
        """A selection of rows."""
        return Queries(self.qa[rows], self.q[rows], self.e[rows], self.uncertainty[rows])


@np.errstate(all="ignore")
def make_queries(q: npt.ArrayLike, softmax_scale: float) -> Queries:
    """Sections 3 and 6 from query rows (G, D)."""
    rows = split(rotate(f32(q) * np.float32(softmax_scale * LOG2_E)))
    qa, e = rows.a.astype(np.int64), bf16_value(rows.scale)
    uncertainty = UNCERTAINTY * (e * np.sqrt(f32((qa * qa).sum(axis=-1))))
    return Queries(qa, 256 * qa + rows.b.astype(np.int64), e, uncertainty)


def block_outliers(bound: F32) -> F32:
    """(blocks,) o of section 6 from the bounds of a token's settled blocks."""
    k = ceil_log2(bound)
    return f32(np.maximum(0, k - 2 - k.sum() // k.size))


@dataclass(frozen=True)
class VisibleKeys:
    """Keys lo..p of one KV head as one token sees them, in logical order, and what belongs to its settled blocks."""

    lo: int
    position: int
    k: Planes  # (n, ...)
    v: Planes  # (n, ...)
    settled: slice  # the settled blocks of the request
    outlier: F32  # (n,) o of section 6: how much further V's gates open for a key, 0 outside settled blocks

    @classmethod
    def of(
        cls, cache: OracleCache, head: int, position: int, window: int | None, path: Sequence[int] | None
    ) -> VisibleKeys:
        """`path` lists the draft nodes that the token sees, its own last; None for a chain."""
        lo = 0 if window is None else max(0, position - window)
        slots = np.arange(lo, position + 1)
        if path is not None:
            prefix = position + 1 - len(path)  # L0
            slots = np.concatenate([np.arange(prefix), prefix + np.asarray(path, dtype=np.int64)])[lo:]
        first = -(-lo // BLOCK)
        end = max(first, (position - BLOCK + 1) // BLOCK)  # last key 64 end - 1 <= p - 64
        settled = slice(first, end)
        outlier = np.zeros(slots.size, np.float32)
        if first < end:
            here = slice(BLOCK * first - lo, BLOCK * end - lo)
            outlier[here] = np.repeat(block_outliers(cache.bound_value()[head, settled]), BLOCK)
        return cls(lo, position, cache.k[head, slots], cache.v[head, slots], settled, outlier)

    @property
    def count(self) -> int:
        """n."""
        return self.position - self.lo + 1

    @property
    def in_settled(self) -> slice:
        """Which of the visible keys lie in settled blocks (they are consecutive)."""
        return slice(BLOCK * self.settled.start - self.lo, BLOCK * self.settled.stop - self.lo)

    def always_read(self) -> Bool:
        """(n,) section 6: key lo and the keys outside settled blocks."""
        always = np.ones(self.count, np.bool_)
        always[self.in_settled] = False
        always[0] = True
        return always

    def poisoned(self) -> bool:
        """Whether a visible scale is NaN."""
        return bool(np.isnan(self.k.e()).any() or np.isnan(self.v.e()).any())

    def value_bound(self) -> np.float32:
        """E."""
        return power_of_two_at_least(self.v.e().max())


@np.errstate(all="ignore")
def factors(queries: Queries, keys: Planes, level: int) -> F32:
    """(G, n) `F` of section 3 at a reading level."""
    e = queries.e[:, None]
    if level == 0:
        return f32(queries.qa @ keys.doubled_middle().T) * (e * np.float32(0.5))
    coarse, small = f32(queries.q @ keys.a().T), np.float32(2.0**-8)
    if level == 1:
        return coarse * (e * small)
    assert keys.b is not None
    fine = f32(queries.q @ keys.b.astype(np.int64).T)
    return (coarse + fine * small) * (e * small)


@np.errstate(all="ignore")
def relative_logits(queries: Queries, keys: Planes, level: int, z: F32) -> F32:
    """(G, n) `x` of section 3: logits against the rows' references (G,)."""
    return fma(factors(queries, keys, level), keys.e()[None, :], -z[:, None])


def sample_keys(lo: int, count: int) -> I64:
    """Section 5: the 128 sampled keys of a row that sees `count` keys from `lo` on."""
    rest = count - RECENT - 1
    return lo + 1 + ((2 * np.arange(SAMPLES, dtype=np.int64) + 1) * rest) // (2 * SAMPLES)


class Reference(NamedTuple):
    """What a row declares before it reads its keys."""

    z: F32  # (G,), not finite where the logits are not
    spread: F32  # (G,) S: log2 of the effective number of keys


@np.errstate(all="ignore")
def reference(queries: Queries, keys: VisibleKeys) -> Reference:
    """Section 5: the sampled reference and the spread."""
    n = keys.count
    sampled = n > EXACT_KEYS
    scored = np.concatenate([[0], np.arange(n - RECENT, n), sample_keys(0, n)]) if sampled else np.arange(n)
    read = keys.k[scored]
    s = factors(queries, read, min(1, read.finest)) * read.e()[None, :]
    m = s.max(axis=1)
    counted, rest = s, s[:, :0]
    if sampled:
        samples = np.sort(s[:, RECENT + 1 :], axis=1)
        counted = np.concatenate([s[:, : RECENT + 1], samples[:, -LARGEST:]], axis=1)
        rest = samples[:, :-LARGEST]

    def estimate(power: int) -> F32:
        """log2 of the estimated sum of w^power over the visible keys, w in fixed point."""
        weights, left = (fix(part - m[:, None]) for part in (counted, rest))
        if power == 2:
            weights, left = ((w * w) >> FRACTION_BITS for w in (weights, left))
        total = f32(weights.sum(axis=1))
        if sampled:
            scale = np.float32(n - RECENT - 1 - LARGEST) / np.float32(SAMPLES - LARGEST)
            total = fma(f32(left.sum(axis=1)), scale, total)
        return log2(total)

    total, unit = estimate(1), np.float32(FRACTION_BITS)
    return Reference(m + (total - unit), ((np.float32(2) * total) - estimate(2)) - unit)
