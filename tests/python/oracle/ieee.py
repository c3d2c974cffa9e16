"""fp32 one rounding at a time; exp2, log2 and fixed-point weights (docs/numerics.md, conventions and 4)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int8]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
Bool = npt.NDArray[np.bool_]

BF16_NAN = np.uint16(0x7FC0)
FRACTION_BITS = 26
SATURATED = 2**32 - 1
LOWEST, HIGHEST = -126, 40  # exponents of exp2

_EXP2 = [
    np.float32(float.fromhex(c))
    for c in ("0x1.62e42ap-1", "0x1.ebf9c2p-3", "0x1.c6b6d8p-5", "0x1.3ce8acp-7", "0x1.5bda4p-10")
]
_LOG2 = [np.float32(float.fromhex(c)) for c in ("0x1.715476p+1", "0x1.ec709cp-1", "0x1.27ac74p-1", "0x1.a1cb2p-2")]
_SQRT_HALF = np.float32(float.fromhex("0x1.6a09e6p-1"))


def f32(x: npt.ArrayLike) -> F32:
    """The argument as fp32: one rounding from fp64 or from an integer."""
    return np.asarray(x).astype(np.float32)


@np.errstate(all="ignore")
def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F32:
    """fp32 a * b + c with one rounding. The product of two fp32 is exact in fp64; the sum is rounded to odd there,
    which loses nothing that the rounding to fp32 needs (53 >= 24 + 2 bits)."""
    product = f32(a).astype(np.float64) * f32(b).astype(np.float64)
    addend = f32(c).astype(np.float64)
    total = np.asarray(product + addend)
    part = total - product  # Knuth's exact sum: total + error == product + addend
    error = (product - (total - part)) + (addend - part)
    even = (total.view(np.int64) & 1) == 0
    away = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    odd = np.where(np.isfinite(total) & (error != 0) & even, away, total)
    return odd.astype(np.float32)


def bf16_value(bits: npt.ArrayLike) -> F32:
    """The fp32 value of bf16 bits."""
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def bf16_round_up(x: F32) -> U16:
    """Bits of the smallest bf16 not below x, for finite x >= 0."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) >> 16).astype(np.uint16)


def bf16_nearest(x: F32) -> U16:
    """Bits of the bf16 nearest to x, ties to even; any NaN becomes 0x7FC0."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), BF16_NAN, rounded)


def ceil_log2(x: npt.ArrayLike) -> I64:
    """k of the smallest power of two 2^k not below fp32 x > 0."""
    mantissa, exponent = np.frexp(np.asarray(x, dtype=np.float64))
    return exponent.astype(np.int64) - (mantissa == 0.5)


def power_of_two_at_least(x: np.float32) -> np.float32:
    """Smallest power of two not below x > 0."""
    return np.float32(np.ldexp(1.0, int(ceil_log2(x))))


@np.errstate(all="ignore")
def exp2_parts(x: F32, highest: int = HIGHEST) -> tuple[F32, I64]:
    """Section 4: (p, n) with 2^x ~ p 2^n, x clamped to -126..highest, a NaN to -126."""
    clamped = np.fmin(np.fmax(np.asarray(x, dtype=np.float32), np.float32(LOWEST)), np.float32(highest))
    whole = np.rint(clamped)
    fraction = clamped - whole
    p = np.broadcast_to(_EXP2[4], fraction.shape).astype(np.float32)
    for c in reversed(_EXP2[:4]):
        p = fma(p, fraction, c)
    return fma(p, fraction, np.float32(1)), whole.astype(np.int64)


@np.errstate(all="ignore")
def fix(x: npt.ArrayLike, r: npt.ArrayLike = 1) -> I64:
    """Section 4: rne((p r) 2^(n + 26)) of fp32 x and r <= 2^60, saturating at 2^32 - 1."""
    p, n = exp2_parts(np.asarray(x, dtype=np.float32))
    scaled = np.ldexp((p * np.asarray(r, dtype=np.float32)).astype(np.float64), (n + FRACTION_BITS).astype(np.int32))
    return np.minimum(np.rint(scaled), np.float64(SATURATED)).astype(np.int64)


def log2(y: npt.ArrayLike) -> F32:
    """Section 4: log2 of a positive finite fp32."""
    m, k = np.frexp(f32(y))  # m in [1/2, 1)
    low = m < _SQRT_HALF
    m = np.where(low, m * np.float32(2), m).astype(np.float32)
    k = k - low
    z = (m - np.float32(1)) / (m + np.float32(1))
    t = z * z
    p = np.broadcast_to(_LOG2[3], t.shape).astype(np.float32)
    for c in (_LOG2[2], _LOG2[1], _LOG2[0]):
        p = fma(p, t, c)
    return fma(p, z, f32(k))
