"""The integer sums of one run over the keys (docs/numerics.md, 7)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from oracle.cache import OracleCache
from oracle.fit import largest_mark
from oracle.ieee import F32, F64, I64, SATURATED, Bool, bf16_value, f32, fix
from oracle.planes import BLOCK
from oracle.reading import Levels
from oracle.reference import VisibleKeys

PHI_LIMIT = 2.0**31 - 1


@dataclass(frozen=True)
class Sums:
    """What the keys add to each of R rows."""

    num: I64  # (R, D) unit E 2^-42, rotated channels
    den: I64  # (R,) unit 2^-26, without the sink
    mass: I64  # (R,) unit E 2^-26
    peak: F32  # (R,) the largest x of a key whose V is read
    dropped: I64  # (R,) the part of den that dropped keys hold

    @classmethod
    def zeros(cls, rows: int, head_dim: int) -> Sums:
        """The sums over no keys."""
        den, mass, dropped = (np.zeros(rows, np.int64) for _ in range(3))
        return cls(np.zeros((rows, head_dim), np.int64), den, mass, np.full(rows, -np.inf, np.float32), dropped)

    def put(self, rows: Bool, other: Sums) -> None:
        """Replaces those of a selection of rows."""
        for name, values in vars(other).items():
            getattr(self, name)[rows] = values


@dataclass(frozen=True)
class Token:
    """Everything about one token on one KV head that its rows share."""

    cache: OracleCache
    head: int
    keys: VisibleKeys
    windowed: bool
    span: tuple[int, int]  # keys that the sums are taken over

    def value_bound(self) -> float:
        """E of section 5, NaN where a visible scale is."""
        return np.nan if self.keys.poisoned() else float(self.keys.value_bound())

    def in_span(self) -> Bool:
        """(n,) visible keys that the sums are taken over."""
        at = np.arange(self.keys.lo, self.keys.position + 1)
        return (self.span[0] <= at) & (at < self.span[1])

    @np.errstate(all="ignore")
    def sums(self, x: F32, levels: Levels, gates: F32, e: F64) -> Sums:
        """Of live rows: x (R, n), what they together read, their gates (R, 5) and their E (R,)."""
        keys, inside = self.keys, self.in_span()
        read = inside & (levels.v > 0)
        d = np.where(inside, fix(x), 0)
        w = np.where(read, fix(x, f32(keys.v.e().astype(np.float64) / e[:, None])), 0)
        values = np.zeros((keys.count, keys.v.h.shape[-1] * 2), np.int64)
        for level in range(keys.v.finest + 1):
            chosen = levels.v == level + 1
            values[chosen] = keys.v[chosen].reading(level)
        lost = np.where(read, 0, d)
        sums = Sums(
            num=(w << 8) @ values,
            den=d.sum(axis=1),
            mass=w.sum(axis=1),
            peak=np.fmax.reduce(np.where(read, x, np.float32(-np.inf)), axis=1),
            dropped=lost.sum(axis=1),
        )
        if self.cache.layout.tail and keys.settled.start < keys.settled.stop:
            weight = self._block_weights(lost, e)
            means = self.cache.blocks.mean[self.head, keys.settled].astype(np.int64)
            sums = replace(sums, num=sums.num + (weight << 16) @ means, mass=sums.mass + weight.sum(axis=1))
            if not self.windowed:
                sums = replace(sums, num=sums.num + self._rank16(inside & ~read, d, gates, e))
        return sums

    def _per_block(self, values: I64) -> I64:
        """(R, n) summed over each settled block: (R, blocks)."""
        return values[:, self.keys.in_settled].reshape(values.shape[0], -1, BLOCK).sum(axis=2)

    def _block_weights(self, lost: I64, e: F64) -> I64:
        """W_b (R, blocks): what dropped keys weigh in units of E."""
        ratio = bf16_value(self.cache.blocks.mean_scale[self.head, self.keys.settled]).astype(np.float64) / e[:, None]
        weight = np.minimum(np.rint(self._per_block(lost) * ratio), float(SATURATED))
        return np.where(np.isnan(ratio), 0.0, weight).astype(np.int64)

    def _rank16(self, dropped: Bool, d: I64, gates: F32, e: F64) -> I64:
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
        phi = np.rint(slope[None] * (np.ldexp(1.0, 12 + sh[:, 0]) / e)[:, None, None])
        phi = np.where(np.abs(phi) <= PHI_LIMIT, phi, 0.0).astype(np.int64)
        return (t[:, :, None] * phi).sum(axis=1)
