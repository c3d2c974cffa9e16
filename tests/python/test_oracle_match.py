"""P4: the library and the NumPy oracle, two implementations of docs/numerics.md, agree on every byte: pages,
references, kept keys, sums, outputs. The oracle imports nothing of the library."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_testing import HUGE_PAGE
from oracle.cache import Layout, OracleCache, page_sections
from oracle.decode import decode_row_group, partial_row_group
from oracle.reading import GateTable

from fold_attention import FoldKVCache, partial_attention
from fold_attention._lib import lib

SEEDS = range(16)
GATES_FILE = Path(__file__).parents[2] / "src/numerics/gates.inc"


def gate_table() -> GateTable:
    rows, full = [], None
    for kind, values in re.findall(r"^FOLD_(GATES|DENSE_GATES)\((.*)\)$", GATES_FILE.read_text(), re.M):
        numbers = [math.inf if text == "kOpen" else float(text.rstrip("f")) for text in values.split(", ")]
        if kind == "GATES":
            rows.append(numbers)
        else:
            full = numbers
    return GateTable(np.array(rows, np.float32), np.array(full, np.float32))


def made_up(rng: np.random.Generator, keys: int, heads: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V whose rows depend on one another, so that the tail has something to predict; at times a few values are
    far larger than the others."""
    mix = rng.normal(size=(8, dim))
    hidden = rng.normal(size=(keys, heads, 8))
    k = hidden @ mix + 0.3 * rng.normal(size=(keys, heads, dim))
    v = hidden @ rng.normal(size=(8, dim)) + 0.3 * rng.normal(size=(keys, heads, dim))
    if rng.random() < 0.4:
        v[rng.integers(0, keys, 3)] *= 2.0 ** int(rng.choice([8, 16, 30, 60]))
    return k.astype(np.float32), v.astype(np.float32)


def same_bytes(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    """Equal bytes; any NaN equals any NaN."""
    mine, other = ours.contiguous().numpy().copy(), np.ascontiguousarray(theirs).astype(ours.numpy().dtype)
    if mine.dtype.kind == "f":
        both = np.isnan(mine) & np.isnan(other)
        mine[both] = other[both] = 0
    return mine.tobytes() == other.tobytes()


def random_layout(rng: np.random.Generator) -> Layout:
    k_bits, v_bits = (int(rng.choice([4, 8, 16, 16])) for _ in range(2))
    dim, page = int(rng.choice([64, 64, 128, 256])), int(rng.choice([64, 192, 256, 320, 512]))
    return Layout(int(rng.integers(1, 3)), dim, page, k_bits, v_bits, bool(rng.random() < 0.8))


def new_cache(layout: Layout, heads: int, keys: int) -> FoldKVCache:
    cache = FoldKVCache(
        1, heads, layout.n_kv_heads, layout.head_dim, keys, page_size=layout.page_size,
        bits=(layout.k_bits, layout.v_bits), tail=layout.tail,
    )  # fmt: skip
    cache.storage.fill_(0xA5)
    return cache


@pytest.mark.parametrize("seed", SEEDS)
def test_pages_written_in_chunks_are_the_oracles(seed: int) -> None:
    """Cache bytes, the tail's fits included, however the tokens arrive; nothing else is written."""
    rng = np.random.default_rng(seed)
    layout = random_layout(rng)
    keys = int(rng.choice([1, 63, 64, 65, 257, 1023, 1024, 1300, 1601]))
    k, v = made_up(rng, keys, layout.n_kv_heads, layout.head_dim)
    if rng.random() < 0.3:
        v[rng.integers(keys), 0, 0] = np.nan
    oracle = OracleCache(layout)
    oracle.write(k, v)
    expected, defined = oracle.pages()

    cache = new_cache(layout, layout.n_kv_heads, keys)
    start = 0
    while start < keys:
        end = min(keys, start + int(rng.choice([1, 7, 64, 300, 5000])))
        chunk = torch.tensor([0, end - start], dtype=torch.int32)
        cache.write_prompt(torch.from_numpy(k[start:end]), torch.from_numpy(v[start:end]), chunk)
        start = end
    assert page_sections(layout).bytes == cache.storage.shape[1]
    pages = cache.tables()[0][0, : len(expected)].long()
    actual = cache.storage[pages].numpy()
    wrong = np.argwhere(defined & (actual != expected))
    assert wrong.size == 0, f"first differing (page, byte): {wrong[0]}"


@pytest.mark.parametrize("seed", SEEDS)
def test_decode_is_the_oracles(seed: int) -> None:
    """Outputs, LSE, kept and dropped keys, recomputed rows: depths, windows, sinks, drafts, wrong references, values of
    very different sizes."""
    rng = np.random.default_rng(1000 + seed)
    layout = random_layout(rng)
    group, dim = int(rng.integers(1, 6)), layout.head_dim
    heads = group * layout.n_kv_heads
    keys = int(rng.choice([1, 64, 150, 192, 193, 255, 700, 1090, 1500])) + int(rng.integers(0, 70))
    tokens = int(rng.integers(1, 5)) if keys > 5 else 1
    window = None if rng.random() < 0.6 else int(rng.choice([0, 1, 63, 100, 500]))
    sinks = None if rng.random() < 0.6 else (rng.choice([3, 40]) * rng.normal(size=heads)).astype(np.float32)
    if sinks is not None:
        sinks[rng.random(heads) < 0.25] = rng.choice([-np.inf, np.inf, np.nan, 3e38])
    shift = float(rng.choice([0, 0, 0, 0, -9, 5.5, 40, -200, 1e5]))
    k, v = made_up(rng, keys, layout.n_kv_heads, dim)
    if rng.random() < 0.2:
        k[keys * 2 // 3] *= np.float32(20)
    if rng.random() < 0.1:
        v[rng.integers(keys), 0, 0] = np.nan
    q = (rng.choice([0.3, 1, 2]) * rng.normal(size=(1, tokens, heads, dim))).astype(np.float32)
    dense = rng.random() < 0.2
    depth = rng.choice([8.5, 10, 12, 13.25, 16, 23], size=(1, tokens, heads)).astype(np.float32)

    oracle = OracleCache(layout)
    oracle.write(k, v)
    cache = new_cache(layout, heads, keys)
    cache.write_prompt(torch.from_numpy(k), torch.from_numpy(v), torch.tensor([0, keys], dtype=torch.int32))
    own = cache.tables()[0]
    tables = torch.full((1, own.shape[1] + 2), HUGE_PAGE, dtype=torch.int32)
    tables[:, : own.shape[1]] = own
    masks, paths = chain_or_tree(rng, tokens)
    tree = None if masks is None else torch.tensor([masks])

    shape = (1, tokens, heads)
    out, lse = torch.empty(*shape, dim), torch.empty(1, heads, tokens)
    kept, dropped, again = torch.empty(shape), torch.empty(shape), torch.empty(shape, dtype=torch.uint8)
    args = (torch.from_numpy(q), cache.storage, cache.layout)
    lengths = torch.tensor([keys], dtype=torch.int32)
    sink_rows = None if sinks is None else torch.from_numpy(sinks)
    depths = None if dense else torch.from_numpy(depth)
    options = (None, tree, depths, sink_rows, 0.0, -1 if window is None else window)
    splits = int(rng.integers(0, 5))
    lib.decode(
        *args, None, None, None, tables, lengths, *options, splits, None, shift,
        out, lse, kept, dropped, again, None, None,
    )  # fmt: skip

    table = gate_table()
    for t in range(tokens):
        path = paths[t]
        position = keys - tokens + (t if path is None else len(path) - 1)
        for h in range(layout.n_kv_heads):
            rows = np.s_[h * group : (h + 1) * group]
            expected = decode_row_group(
                oracle, h, q[0, t, rows], position, window=window, path=path, reference_shift=shift,
                sinks=None if sinks is None else sinks[rows],
                gates=np.stack([table.gates(None if dense else float(value)) for value in depth[0, t, rows]]),
            )  # fmt: skip
            assert same_bytes(out[0, t, rows], expected.out)
            assert same_bytes(lse[0, rows, t], expected.lse)
            assert again[0, t, rows].bool().tolist() == expected.recomputed.tolist()
            done = ~np.isnan(expected.lse)  # a row that never is has no share
            assert np.array_equal(kept[0, t, rows].numpy()[done], expected.kept_fraction[done].astype(np.float32))
            np.testing.assert_array_equal(dropped[0, t, rows].numpy(), expected.dropped_mass.astype(np.float32))


@pytest.mark.parametrize("seed", SEEDS)
def test_partials_are_the_oracles(seed: int) -> None:
    """Numerators, denominators and grids of a block-aligned key range; NaN rows are sums of 0."""
    rng = np.random.default_rng(2000 + seed)
    layout = random_layout(rng)
    group = int(rng.integers(1, 4))
    heads = group * layout.n_kv_heads
    keys = int(rng.choice([64, 193, 700, 1344]))
    k, v = made_up(rng, keys, layout.n_kv_heads, layout.head_dim)
    q = rng.normal(size=(1, heads, layout.head_dim)).astype(np.float32)
    if rng.random() < 0.3:
        q[0, 0, 0] = np.nan
    oracle = OracleCache(layout)
    oracle.write(k, v)
    cache = new_cache(layout, heads, keys)
    cache.write_prompt(torch.from_numpy(k), torch.from_numpy(v), torch.tensor([0, keys], dtype=torch.int32))
    begin = 64 * int(rng.integers(0, keys // 64))
    end = keys if rng.random() < 0.5 else 64 * int(rng.integers(begin // 64, keys // 64 + 1))
    result = partial_attention(torch.from_numpy(q), cache, begin, end, depth=12.0)
    gates = gate_table().gates(12.0)
    for h in range(layout.n_kv_heads):
        rows = np.s_[h * group : (h + 1) * group]
        expected = partial_row_group(oracle, h, q[0, rows], keys - 1, (begin, end), gates=gates)
        sums, counts = expected.sums, expected.visible
        assert same_bytes(result.numerator.view(heads, -1)[rows], sums.num)
        assert same_bytes(result.denominator.view(heads, 3)[rows], np.stack([sums.den, sums.mass, counts], -1))
        assert same_bytes(result.grid.view(heads, 3)[rows], np.stack([expected.z, expected.e, expected.spread], -1))


def chain_or_tree(rng: np.random.Generator, tokens: int) -> tuple[list[int] | None, list[list[int] | None]]:
    """Bit masks of a random draft tree and each node's path; or None for a chain."""
    if tokens == 1 or rng.random() < 0.5:
        return None, [None] * tokens
    masks: list[int] = []
    for node in range(tokens):
        parent = int(rng.integers(-1, node)) if node else -1
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    return masks, [[j for j in range(tokens) if mask >> j & 1] for mask in masks]


@pytest.mark.parametrize("below", [2**22, 2**23 + 2**20])
def test_codes_of_the_largest_weights(below: int) -> None:
    """A dropped key may weigh almost 2^32, just less than what makes its row run again: its code is 255."""
    layout, keys, gates = Layout(1, 64), 1200, np.full(5, -10, np.float32)
    rng = np.random.default_rng(5)
    q = rng.normal(size=(1, 64)).astype(np.float32)
    k, v = 0.05 * rng.normal(size=(keys, 1, 64)).astype(np.float32), rng.normal(size=(keys, 1, 64)).astype(np.float32)
    k[1 + 141 * (keys - 64) // 256, 0] = 2 * q[0]  # sampled, so that the reference is right before it is shifted
    oracle = OracleCache(layout)
    oracle.write(k, v)
    right = partial_row_group(oracle, 0, q, keys - 1, (0, keys), gates=gates)
    shift = float(np.log2(right.sums.den[0] / (2**32 - below)))
    expected = decode_row_group(oracle, 0, q, keys - 1, gates=gates, reference_shift=shift)
    assert 2**32 - 2 * below < expected.sums.den[0] < 2**32 - 1
    assert not expected.recomputed[0]

    cache = new_cache(layout, 1, keys)
    cache.write_prompt(torch.from_numpy(k), torch.from_numpy(v), torch.tensor([0, keys], dtype=torch.int32))
    out, lse = torch.empty(1, 1, 1, 64), torch.empty(1, 1, 1)
    where = (torch.from_numpy(q[None, None]), cache.storage, cache.layout, None, None, None, *cache.tables())
    options = (None, None, None, None, 0.0, -1, 0, torch.from_numpy(gates), shift)
    lib.decode(*where, *options, out, lse, None, None, None, None, None)
    assert same_bytes(out[0, 0], expected.out)
