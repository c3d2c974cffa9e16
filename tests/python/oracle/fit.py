"""The tail's fit: centred V on centred K, reduced to 16 directions (docs/numerics.md, 9).

Everything in fp64 is element-wise NumPy, one rounding per operation; sums that have a stated order are loops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oracle.ieee import F32, F64, I8, I64, ceil_log2
from oracle.planes import BLOCK, Planes

RANK = 16
FIRST_MARK = 1024
ITERATIONS = 6


@dataclass(frozen=True)
class Fit:
    """One KV head's rank-16 map from K codes to V."""

    p: I8  # (16, D)
    u: I8  # (16, D)
    f: F32  # (16,)


def is_mark(length: int) -> bool:
    """Whether `length` is 2^k (4 + i) / 4 with k >= 10 and i in 0..3."""
    return length >= FIRST_MARK and length % (1 << (length.bit_length() - 3)) == 0


def largest_mark(length: int) -> int | None:
    """The largest mark not above `length`."""
    if length < FIRST_MARK:
        return None
    step = 1 << (length.bit_length() - 3)
    return length // step * step


def zero_fit(head_dim: int) -> Fit:
    """A fit that adds nothing."""
    zeros = np.zeros((RANK, head_dim), np.int8)
    return Fit(zeros, zeros, np.zeros(RANK, np.float32))


def moments(k: Planes, v: Planes) -> tuple[I64, I64, np.float32]:
    """A (D, D) over K codes, B (K channel, V channel), and E_M, of whole blocks without a NaN scale."""
    e = v.e()
    u = k.u()
    blocks, d = u.shape[0] // BLOCK, u.shape[1]
    ceilings = ceil_log2(e.reshape(blocks, BLOCK).max(axis=1))
    bound = np.float32(np.ldexp(1.0, int(min(ceilings.max(), 2 + ceilings.sum() // blocks))))
    usum = u.reshape(blocks, BLOCK, d).sum(axis=1)
    y = np.rint(v.reading(v.finest).astype(np.float32) * (e / bound)[:, None])
    y = np.where((e <= bound)[:, None], y, 0).astype(np.int64)
    a = 64 * (u.T @ u) - usum.T @ usum
    b = (64 * u - np.repeat(usum, BLOCK, axis=0)).T @ y
    return a, b, bound


def cholesky(a: F64) -> F64:
    """Step 2: the lower factor, column by column."""
    a = a.copy()
    d = a.shape[0]
    lower = np.zeros_like(a)
    for k in range(d):
        lower[k, k] = np.sqrt(a[k, k])
        lower[k + 1 :, k] = a[k + 1 :, k] / lower[k, k]
        column = lower[k + 1 :, k]
        a[k + 1 :, k + 1 :] -= column[:, None] * column[None, :]
    return lower


def solve_lower(lower: F64, b: F64) -> F64:
    """Step 3: L^-1 b, rows ascending."""
    b = b.copy()
    for k in range(b.shape[0]):
        b[k] = b[k] / lower[k, k]
        b[k + 1 :] -= lower[k + 1 :, k, None] * b[None, k]
    return b


def solve_lower_transposed(lower: F64, v: F64) -> F64:
    """Step 6: L^-T v, rows descending."""
    v = v.copy()
    for k in reversed(range(v.shape[0])):
        v[k] = v[k] / lower[k, k]
        v[:k] -= lower[k, :k, None] * v[None, k]
    return v


def product(a: F64, b: F64) -> F64:
    """a b, each element's sum over the inner index ascending from 0."""
    total = np.zeros((a.shape[0], b.shape[1]))
    for k in range(a.shape[1]):
        total = total + a[:, k, None] * b[None, k, :]
    return total


def sum_ascending(terms: F64) -> F64:
    """Sum over the first index, ascending from 0."""
    total = np.zeros(terms.shape[1:])
    for term in terms:
        total = total + term
    return total


def top_directions(c: F64) -> F64:
    """Step 5: six rounds of subspace iteration with Gram-Schmidt, from Walsh columns."""
    d = c.shape[0]
    x = np.array([[-1.0 if (i & r).bit_count() % 2 else 1.0 for r in range(RANK)] for i in range(d)])
    for _ in range(ITERATIONS):
        x = product(c, x)
        before = np.sqrt(sum_ascending(x * x))
        for r in range(RANK):
            norm = np.sqrt(sum_ascending(x[:, r] * x[:, r]))
            if norm <= 1e-8 * before[r]:
                x[:, r] = 0.0
            else:
                x[:, r] = x[:, r] / norm
            dots = sum_ascending(x[:, r, None] * x[:, r + 1 :])
            x[:, r + 1 :] -= dots[None, :] * x[:, r, None]
    return x


@np.errstate(all="ignore")
def fit_tail(k: Planes, v: Planes) -> Fit:
    """The fit of one KV head's keys 0..M-1, (M, ...), M a mark."""
    d = 2 * k.h.shape[-1]
    if np.isnan(k.e()).any() or np.isnan(v.e()).any():
        return zero_fit(d)
    sums_a, sums_b, bound = moments(k, v)
    a, b = sums_a.astype(np.float64), sums_b.astype(np.float64)
    ridge = (np.float64(np.trace(sums_a)) * 1e-3) / d + 1.0
    a[np.arange(d), np.arange(d)] += ridge
    lower = cholesky(a)
    y = solve_lower(lower, b)
    u = top_directions(product(y.T, y))
    p = solve_lower_transposed(lower, product(y, u))

    su = np.abs(u).max(axis=0) / 127.0
    sp = np.abs(p).max(axis=0) / 127.0
    f = ((su * sp) * np.float64(bound * np.float32(2.0**-8))).astype(np.float32)
    finite = np.isfinite(u).all(axis=0) & np.isfinite(p).all(axis=0) & np.isfinite(f)
    usable = finite & (su != 0) & (sp != 0)
    return Fit(
        p=np.where(usable, np.rint(p / sp), 0.0).astype(np.int8).T,
        u=np.where(usable, np.rint(u / su), 0.0).astype(np.int8).T,
        f=np.where(usable, f, np.float32(0)),
    )
