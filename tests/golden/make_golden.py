"""Writes the golden vectors beside it: inputs as bytes, and what docs/numerics.md makes of them.

The outputs come from the NumPy oracle (tests/python/oracle), never from the library, so that any backend can be tested
against the files. tests/cpp/test_golden.cpp says what each tensor means.

    python tests/golden/make_golden.py
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

from oracle.cache import Layout, OracleCache  # noqa: E402
from oracle.decode import SINK_HIGHEST  # noqa: E402
from oracle.ieee import bf16_nearest, bf16_value, exp2_parts, fix, log2  # noqa: E402
from oracle.planes import pack_nibbles, rotate, split  # noqa: E402

F32 = npt.NDArray[np.float32]
Tensors = dict[str, npt.NDArray[Any]]

# layout, keys, dtype of the input
CACHES = {
    "fit": (Layout(1, 64, 64, 16, 16), 1090, "bfloat16"),
    "mixed": (Layout(2, 128, 128, 8, 4), 140, "bfloat16"),
    "narrow": (Layout(1, 256, 64, 4, 8, tail=False), 66, "float32"),
}


def rows(rng: np.random.Generator, head_dim: int) -> F32:
    """Ordinary rows over many magnitudes, then rows at the edges of the format."""
    ordinary = rng.standard_normal((24, head_dim)) * np.exp2(rng.integers(-40, 40, (24, 1)))
    x = np.zeros((34, head_dim), np.float32)
    x[:24] = ordinary
    x[25] = -1.0
    x[26, 3] = 1e-42  # subnormal
    x[27] = np.float32(2.0**-100) * rng.standard_normal(head_dim)
    x[28, 5] = np.nan
    x[29, 6] = np.inf
    x[30] = np.float32(3e38)  # overflows in the rotation
    x[31] = 2e36 * rng.standard_normal(head_dim)
    x[32] = rng.integers(-127, 128, head_dim)
    x[33, 0] = 127.0
    return x


def row_tensors(rng: np.random.Generator) -> Tensors:
    tensors: Tensors = {}
    for d in (64, 128, 256):
        x = rows(rng, d)
        scale, a, b = split(rotate(x))
        wide = a.astype(np.int64)
        tensors |= {
            f"rows.{d}.x": x,
            f"rows.{d}.rotated": rotate(x),
            f"rows.{d}.scale": scale.astype(np.int32),
            f"rows.{d}.a": a,
            f"rows.{d}.b": b,
            f"rows.{d}.h": pack_nibbles((wide >> 4) + 8),
            f"rows.{d}.l": pack_nibbles(wide & 15),
        }
    return tensors


def function_tensors(rng: np.random.Generator) -> Tensors:
    """exp2 as mantissa and exponent, for a weight and for a sink; fix, with ratios that reach 2^60; log2."""
    edges = [-1e30, -126.5, -126.0, -64.0, -27.0, -26.5, -1.5, -0.5, -0.0, 0.5, 1.5, 5.9999995, 6.0, 40.0, 41.0, 1e30]
    wide = np.concatenate([edges, [-np.inf, np.inf, np.nan], rng.uniform(-126, 40, 1500)])
    x = np.concatenate([wide, rng.uniform(-1, 1, 1500)]).astype(np.float32)
    ratio = rng.uniform(-12, 0, x.shape)
    # Weights of 2^-28 to 2^7, as far as a ratio reaches.
    ratio[: wide.size] = np.clip(rng.uniform(-28, 7, wide.shape) - np.nan_to_num(wide, posinf=40, neginf=-126), -60, 60)
    ratio = np.exp2(ratio).astype(np.float32)
    mantissa, exponent = exp2_parts(x)
    sink = np.concatenate([x, rng.uniform(40, 900, 500), [899.5, 900.0, 901.0]]).astype(np.float32)
    sink_mantissa, sink_exponent = exp2_parts(sink, SINK_HIGHEST)
    y = np.concatenate(
        [
            np.exp2(rng.uniform(-126, 127.9, 1000)),
            rng.uniform(0.5, 2, 1000),
            [1.0, 2.0, 0.5, float.fromhex("0x1.6a09e6p-1"), float.fromhex("0x1.6a09e4p-1"), 2.0**-126, 2.0**32],
        ]
    ).astype(np.float32)
    return {
        "exp2.x": x,
        "exp2.mantissa": mantissa,
        "exp2.exponent": exponent.astype(np.int32),
        "exp2.sink.x": sink,
        "exp2.sink.mantissa": sink_mantissa,
        "exp2.sink.exponent": sink_exponent.astype(np.int32),
        "fix.ratio": ratio,
        "fix.one": fix(x),
        "fix.scaled": fix(x, ratio),
        "log2.x": y,
        "log2.y": log2(y),
    }


def cache_inputs(rng: np.random.Generator, layout: Layout, keys: int) -> tuple[F32, F32]:
    """K and V (keys, HK, D) with a linear part of V that K explains, and scales that vary over keys."""
    shape = (keys, layout.n_kv_heads, layout.head_dim)
    k = rng.standard_normal(shape)
    mix = rng.standard_normal((layout.head_dim, layout.head_dim)) / np.sqrt(layout.head_dim)
    v = k @ mix + 0.3 * rng.standard_normal(shape)
    return (k * np.exp2(rng.uniform(-2, 2, (keys, 1, 1)))).astype(np.float32), (
        v * np.exp2(rng.uniform(-1, 1, (keys, 1, 1)))
    ).astype(np.float32)


def cache_tensors(rng: np.random.Generator) -> Tensors:
    tensors: Tensors = {}
    for name, (layout, keys, dtype) in CACHES.items():
        k, v = cache_inputs(rng, layout, keys)
        if name == "fit":
            v[500] *= np.float32(2.0**12)  # far above the others: the fit leaves it out
        if name == "mixed":
            k[70, 1, 5] = np.nan  # poisons a block of one head
            v[3, 0, 9] = -np.inf
        stored: list[npt.NDArray[Any]] = [k, v]
        if dtype == "bfloat16":
            stored = [bf16_nearest(x) for x in (k, v)]
            k, v = (bf16_value(x) for x in stored)
        cache = OracleCache(layout)
        cache.write(k, v)
        pages, _ = cache.pages()  # what the format does not define is 0
        tensors |= {f"cache.{name}.k": stored[0], f"cache.{name}.v": stored[1], f"cache.{name}.pages": pages}
    return tensors


DTYPES = {"float32": "F32", "int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64", "uint16": "BF16"}


def save(path: Path, tensors: Tensors) -> None:
    """A safetensors file; uint16 arrays are bf16 bits."""
    header, end = {}, 0
    for name, x in tensors.items():
        begin, end = end, end + x.nbytes
        header[name] = {"dtype": DTYPES[str(x.dtype)], "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(x).tobytes() for x in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def main() -> None:
    rng = np.random.default_rng(20)
    save(HERE / "rows.safetensors", row_tensors(rng))
    save(HERE / "functions.safetensors", function_tensors(rng))
    save(HERE / "cache.safetensors", cache_tensors(rng))


if __name__ == "__main__":
    main()
