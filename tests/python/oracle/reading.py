"""Gates, and what is read of each key (docs/numerics.md, 6)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oracle.ieee import F32, I64, Bool, fma
from oracle.reference import Queries, VisibleKeys, relative_logits

OPEN = np.full(5, np.inf, np.float32)  # every stored plane of every visible key
CONCENTRATED = np.float32(4)  # a spread up to which the gates are what depth says
CROWD = np.float32(12)  # and those of K


@dataclass(frozen=True)
class GateTable:
    """Gates (K.l, K.b, V.h, V.l, V.b) by depth."""

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


def widen(gates: F32, spread: F32) -> F32:
    """(G, 5) gates of rows whose spread is S (G,): V.l and V.b open as it grows, and from a crowd on K.l and K.b."""
    zero = np.float32(0)
    k, v = np.maximum(zero, spread - CROWD), np.maximum(zero, spread - CONCENTRATED) / np.float32(2)
    return gates + np.stack([k, k, np.zeros_like(k), v, v], axis=1)


@dataclass(frozen=True)
class Levels:
    """How deeply each of the n visible keys is read: (n,) by rows that decide together, (G, n) as rows report it."""

    k: I64  # 0, 1, 2: planes of K beyond h
    v: I64  # 0: not read; 1: h; 2: h, l; 3: h, l, b


@np.errstate(all="ignore")
def decide(queries: Queries, keys: VisibleKeys, z: F32, gates: F32) -> tuple[Levels, F32]:
    """Levels (n,), and (G, n) `x` at the level of K reached, of rows that decide together. `gates` (G, 5)."""
    always = keys.always_read()
    e_k, uncertainty = keys.k.e()[None, :], queries.uncertainty[:, None]
    g_kl, g_kb = (gates[:, i, None] for i in range(2))
    g_vh, g_vl, g_vb = (gates[:, i, None] + keys.outlier[None, :] for i in range(2, 5))

    def any_row(value: F32, gate: F32) -> Bool:
        return np.asarray((value >= -gate).any(axis=0))

    x = relative_logits(queries, keys.k, 0, z)
    k_level = np.zeros(keys.count, np.int64)
    if keys.k.finest >= 1:
        read = always | any_row(fma(uncertainty, e_k, x), g_kl)
        x = np.where(read, relative_logits(queries, keys.k, 1, z), x)
        k_level += read
        if keys.k.finest == 2:
            read = read & any_row(fma(uncertainty / np.float32(16), e_k, x), g_kb)
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
