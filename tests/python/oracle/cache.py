"""A request's cache at the level of bytes, keys in logical order, and its pages (docs/numerics.md, 1, 2 and 9)."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from oracle.fit import RANK, Fit, fit_tail, is_mark
from oracle.ieee import BF16_NAN, F32, I8, U8, U16, Bool, bf16_value
from oracle.planes import BLOCK, Planes, permute_scales, split


@dataclass(frozen=True)
class Layout:
    """include/fold/cache_layout.h: CacheLayout."""

    n_kv_heads: int
    head_dim: int
    page_size: int = 256
    k_bits: int = 16
    v_bits: int = 16
    tail: bool = True


@dataclass(frozen=True)
class PageSections:
    """Byte offsets of a page's sections in the order they are stored; -1 for one that the layout does not keep."""

    k_h: int
    k_l: int
    k_b: int
    k_scale: int
    v_h: int
    v_l: int
    v_b: int
    v_scale: int
    bound: int
    mean_scale: int
    mean: int
    ubar: int
    fit_in: int
    fit_out: int
    fit_scale: int
    bytes: int


def fit_slots(layout: Layout) -> int:
    """Fits that a page has room for, per KV head."""
    return -(-layout.page_size // 256)


def page_sections(layout: Layout) -> PageSections:
    """Lays out a page: every kept section starts at the next multiple of 128 bytes."""
    keys, d, blocks = layout.page_size, layout.head_dim, layout.page_size // BLOCK
    fits = fit_slots(layout) * RANK
    sizes = {
        "k_h": keys * d // 2,
        "k_l": keys * d // 2 * (layout.k_bits >= 8),
        "k_b": keys * d * (layout.k_bits == 16),
        "k_scale": keys * 2,
        "v_h": keys * d // 2,
        "v_l": keys * d // 2 * (layout.v_bits >= 8),
        "v_b": keys * d * (layout.v_bits == 16),
        "v_scale": keys * 2,
        "bound": blocks * 2,
        "mean_scale": blocks * 2 * layout.tail,
        "mean": blocks * d * layout.tail,
        "ubar": blocks * d * layout.tail,
        "fit_in": fits * d * layout.tail,
        "fit_out": fits * d * layout.tail,
        "fit_scale": fits * 4 * layout.tail,
    }
    end, offsets = 0, {}
    for name, size in sizes.items():
        offsets[name] = end if size else -1
        end = (end + layout.n_kv_heads * size + 127) // 128 * 128
    return PageSections(**offsets, bytes=end)


@dataclass(frozen=True)
class Summary:
    """Section 2: what is stored for complete blocks, (HK, blocks, ...). Without the tail model only `bound` is."""

    bound: U16  # (HK, blocks) bf16 bits
    ubar: U8  # (HK, blocks, D)
    mean: I8  # (HK, blocks, D)
    mean_scale: U16  # (HK, blocks) bf16 bits


@np.errstate(all="ignore")
def summarise(k: Planes, v: Planes) -> Summary:
    """Section 2, from the planes of whole blocks (HK, 64 * blocks, ...)."""
    heads, blocks = k.scale.shape[0], k.scale.shape[1] // BLOCK
    shape, d = (heads, blocks, BLOCK), 2 * k.h.shape[-1]
    e_k, e_v = k.e().reshape(shape), v.e().reshape(shape)
    poisoned = (np.isnan(e_k) | np.isnan(e_v)).any(axis=-1)
    bound = np.where(poisoned, BF16_NAN, v.scale.reshape(shape).max(axis=-1)).astype(np.uint16)

    codes = k.u().reshape(*shape, d).sum(axis=2)
    ubar = ((16 * codes + 32) // 64).astype(np.uint8)

    terms = (e_v * np.float32(2.0**-14))[..., None] * v.reading(v.finest).reshape(*shape, d).astype(np.float32)
    total = np.zeros_like(terms[:, :, 0])
    for j in range(BLOCK):
        total = total + terms[:, :, j]
    mean = split(total)
    return Summary(bound, ubar, mean.a, mean.scale)


class OracleCache:
    """One request's cache. Logical key j is row j of every plane; `pages` lays the bytes out as pages store them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        empty = np.zeros((layout.n_kv_heads, 0, layout.head_dim), np.float32)
        self.k = Planes.of_rows(empty, layout.k_bits)  # (HK, length, ...)
        self.v = Planes.of_rows(empty, layout.v_bits)
        self.blocks = summarise(self.k, self.v)
        self.fits: dict[int, list[Fit]] = {}  # mark: one fit per KV head

    @property
    def length(self) -> int:
        """Keys written."""
        return int(self.k.scale.shape[1])

    def write(self, k: npt.ArrayLike, v: npt.ArrayLike) -> None:
        """Appends tokens (T, HK, D), and the summaries and fits of the blocks and marks that they complete."""
        before = self.length
        rows_k, rows_v = (np.swapaxes(np.asarray(x, dtype=np.float32), 0, 1) for x in (k, v))
        self.k = self.k.concatenate(Planes.of_rows(rows_k, self.layout.k_bits), axis=1)
        self.v = self.v.concatenate(Planes.of_rows(rows_v, self.layout.v_bits), axis=1)

        new = np.s_[:, before // BLOCK * BLOCK : self.length // BLOCK * BLOCK]
        added = summarise(self.k[new], self.v[new])
        self.blocks = Summary(
            *(np.concatenate([getattr(self.blocks, f.name), getattr(added, f.name)], axis=1) for f in fields(Summary))
        )
        if not self.layout.tail:
            return
        for mark in range((before // BLOCK + 1) * BLOCK, self.length + 1, BLOCK):
            if is_mark(mark):
                heads = range(self.layout.n_kv_heads)
                self.fits[mark] = [fit_tail(self.k[h, :mark], self.v[h, :mark]) for h in heads]

    def truncate(self, length: int) -> None:
        """Forgets the keys from `length` on."""
        self.k, self.v = self.k[:, :length], self.v[:, :length]
        kept = length // BLOCK
        self.blocks = Summary(*(getattr(self.blocks, f.name)[:, :kept] for f in fields(Summary)))
        self.fits = {mark: fit for mark, fit in self.fits.items() if mark <= length}

    def bound_value(self) -> F32:
        """(HK, blocks) stored bounds in fp32."""
        return bf16_value(self.blocks.bound)

    def pages(self) -> tuple[U8, Bool]:
        """The request's pages (pages, page bytes) and which of their bytes this format defines: not the padding between
        sections, not the slots behind the length, not the summaries of unfinished blocks nor fits not yet due."""
        at, size = page_sections(self.layout), self.layout.page_size
        count = -(-self.length // size)
        data = np.zeros((count, at.bytes), np.uint8)
        known = np.zeros((count, at.bytes), np.bool_)

        def put(offset: int, values: npt.NDArray[np.generic], valid: Bool) -> None:
            """Places (pages, HK, rows, ...) values, of which the rows with `valid` (pages, HK, rows) are defined."""
            if offset < 0:
                return
            raw = np.ascontiguousarray(values).view(np.uint8).reshape(count, -1)
            data[:, offset : offset + raw.shape[1]] = raw
            known[:, offset : offset + raw.shape[1]] = np.repeat(
                valid.reshape(count, -1), raw.shape[1] // (valid.size // count), axis=1
            )

        def paged(rows: npt.NDArray[np.generic], per_page: int) -> tuple[npt.NDArray[np.generic], Bool]:
            """(HK, n, ...) as (pages, HK, per_page, ...), padded, and which rows are there."""
            n = rows.shape[1]
            padding = [(0, 0), (0, count * per_page - n)] + [(0, 0)] * (rows.ndim - 2)
            out = np.pad(rows, padding).reshape(rows.shape[0], count, per_page, *rows.shape[2:])
            valid = np.broadcast_to(np.arange(count * per_page) < n, (*rows.shape[:1], count * per_page))
            return np.swapaxes(out, 0, 1), np.swapaxes(valid.reshape(-1, count, per_page), 0, 1)

        if count == 0:
            return data, known
        for name, planes in (("k", self.k), ("v", self.v)):
            for plane in ("h", "l", "b"):
                rows = getattr(planes, plane)
                if rows is not None:
                    put(getattr(at, f"{name}_{plane}"), *paged(rows, size))
            scale, valid = paged(planes.scale, size)
            put(getattr(at, f"{name}_scale"), permute_scales(scale), permute_scales(valid).astype(np.bool_))
        for name in ("bound", "mean_scale", "mean", "ubar"):
            put(getattr(at, name), *paged(getattr(self.blocks, name), size // BLOCK))
        for name, values, valid in self._paged_fits(count):
            put(getattr(at, name), values, valid)
        return data, known

    def _paged_fits(self, count: int) -> list[tuple[str, npt.NDArray[np.generic], Bool]]:
        """Section 9: fits at the page and slot of their mark's last key."""
        layout = self.layout
        shape = (count, layout.n_kv_heads, fit_slots(layout))
        valid = np.zeros(shape, np.bool_)
        p = np.zeros((*shape, RANK, layout.head_dim), np.int8)
        u = np.zeros_like(p)
        f = np.zeros((*shape, RANK), np.float32)
        for mark, heads in self.fits.items():
            page, slot = (mark - 1) // layout.page_size, (mark - 1) % layout.page_size // 256
            valid[page, :, slot] = True
            for h, fit in enumerate(heads):
                p[page, h, slot], u[page, h, slot], f[page, h, slot] = fit.p, fit.u, fit.f
        return [("fit_in", p, valid), ("fit_out", u, valid), ("fit_scale", f, valid)]
