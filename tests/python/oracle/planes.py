"""Rows: rotation, the split into a scale and two signed bytes, nibble planes and readings (docs/numerics.md, 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from oracle.ieee import BF16_NAN, F32, I8, I64, U8, U16, bf16_round_up, bf16_value

BLOCK = 64


@np.errstate(all="ignore")
def rotate(x: npt.ArrayLike) -> F32:
    """The last dimension times the orthonormal Hadamard matrix, by butterflies of stride 1, 2, 4, ..."""
    y = np.array(x, dtype=np.float32)
    d = y.shape[-1]
    s = 1
    while s < d:
        pairs = y.reshape(*y.shape[:-1], d // (2 * s), 2, s)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([low + high, low - high], axis=-2).reshape(y.shape)
        s *= 2
    return y * np.float32(1.0 / math.sqrt(d))


class Split(NamedTuple):
    """Rows as x ~ e (a + b / 256)."""

    scale: U16  # (...) bf16 bits of e
    a: I8  # (..., D)
    b: I8  # (..., D)


@np.errstate(all="ignore")
def split(x: F32) -> Split:
    """Splits rotated rows (..., D). A row that is not finite gets a NaN scale and zeros."""
    x = np.asarray(x, dtype=np.float32)
    poisoned = np.asarray(~np.isfinite(x).all(axis=-1))
    x = np.where(poisoned[..., None], np.float32(0), x)
    quotient = np.abs(x).max(axis=-1) / np.float32(127)
    scale = np.maximum(bf16_round_up(quotient), bf16_round_up(np.float32(2.0**-100)))
    e = bf16_value(scale)[..., None]
    a = np.clip(np.rint(x / e), np.float32(-128), np.float32(127))
    rest = (x - a * e) * np.float32(256)
    b = np.clip(np.rint(rest / e), np.float32(-128), np.float32(127))
    return Split(np.where(poisoned, BF16_NAN, scale).astype(np.uint16), a.astype(np.int8), b.astype(np.int8))


def pack_nibbles(codes: npt.NDArray[np.integer]) -> U8:
    """(..., D) codes 0..15 to (..., D/2) bytes: channel 2i in the high nibble of byte i, 2i + 1 in the low one."""
    return ((codes[..., 0::2] << 4) | codes[..., 1::2]).astype(np.uint8)


def unpack_nibbles(plane: U8) -> I64:
    """The inverse of `pack_nibbles`."""
    wide = plane.astype(np.int64)
    return np.stack([wide >> 4, wide & 15], axis=-1).reshape(*plane.shape[:-1], 2 * plane.shape[-1])


def permute_scales(scale: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Scales (..., n), n a multiple of 64, from key order to stored order: key j of 64 stands at 8 (j % 8) + j / 8."""
    tiles = scale.reshape(*scale.shape[:-1], -1, 8, 8)
    return np.swapaxes(tiles, -1, -2).reshape(scale.shape)


@dataclass(frozen=True)
class Planes:
    """Stored rows in key order; leading dimensions are free. Planes that `bits` does not keep are None."""

    h: U8  # (..., D/2): nibbles u = (a >> 4) + 8
    l: U8 | None  # (..., D/2): nibbles a & 15  # noqa: E741
    b: I8 | None  # (..., D)
    scale: U16  # (...) bf16 bits

    @classmethod
    def of_rows(cls, rows: npt.ArrayLike, bits: int) -> Planes:
        """Rotates and splits rows (..., D) and keeps the planes of `bits`."""
        scale, a, b = split(rotate(rows))
        wide = a.astype(np.int64)
        return cls(
            h=pack_nibbles((wide >> 4) + 8),
            l=pack_nibbles(wide & 15) if bits >= 8 else None,
            b=b if bits == 16 else None,
            scale=scale,
        )

    @property
    def finest(self) -> int:
        """The level of the finest reading: 0, 1 or 2."""
        return int(self.l is not None) + int(self.b is not None)

    def __getitem__(self, index: Any) -> Planes:
        """Indexes the leading dimensions of every plane."""
        low, fine = (None if p is None else p[index] for p in (self.l, self.b))
        return Planes(self.h[index], low, fine, self.scale[index])

    def concatenate(self, other: Planes, axis: int) -> Planes:
        """Both along one leading dimension."""

        def join(mine: Any, theirs: Any) -> Any:
            return None if mine is None else np.concatenate([mine, theirs], axis=axis)

        planes = ((self.h, other.h), (self.l, other.l), (self.b, other.b), (self.scale, other.scale))
        return Planes(*(join(*pair) for pair in planes))

    def e(self) -> F32:
        """(...) scales in fp32; NaN for a poisoned row."""
        return bf16_value(self.scale)

    def u(self) -> I64:
        """(..., D) codes of plane h, 0..15."""
        return unpack_nibbles(self.h)

    def doubled_middle(self) -> I64:
        """(..., D) 32 h + 15: twice the middle of the sixteen `a` that share an h."""
        return 32 * (self.u() - 8) + 15

    def a(self) -> I64:
        """(..., D) values of planes h and l."""
        assert self.l is not None
        return 16 * (self.u() - 8) + unpack_nibbles(self.l)

    def reading(self, level: int) -> I64:
        """(..., D) readings in units of e / 256, from planes h (level 0), h and l (1) or h, l and b (2)."""
        if level == 0:
            return 128 * self.doubled_middle()
        if level == 1:
            return 256 * self.a()
        assert self.b is not None
        return 256 * self.a() + self.b.astype(np.int64)
