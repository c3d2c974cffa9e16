"""P1: what a decode step returns for a request depends on its own cache, query and options alone."""

import random

import pytest
import torch
from attention_reference import assert_same_bytes
from cache_testing import HUGE_PAGE, ODD_LENGTHS, filled, layer, poisoned, starts

from fold_attention import FoldKVCache, fold_attn_with_kvcache, set_num_threads

DEPTHS = (None, 12.0)


def run(cache: FoldKVCache, q, **options):
    """out, lse and the info of a call, flattened into one list."""
    out, lse, info = cache.attend(q, return_lse=True, return_info=True, **options)
    return [out, lse, *info.values()]


def assert_rows_equal(alone, batched, i, what):
    for name, a, b in zip(("out", "lse", "kept", "dropped", "recomputed", "bytes"), alone, batched, strict=True):
        assert_same_bytes(a[0], b[i], f"{what}: {name}")


@pytest.fixture(scope="module")
def neighbours():
    """Requests of length 0 to 131072 in one pool, and one of 1301 keys; the same for two depths."""
    lengths = [0, 1, 65, 509, 4099, 131072]
    _, k, v = layer(131072, 2, 1, seed=1)
    cache = poisoned(len(lengths) + 1, 131072, 2, 1, num_pages=600)
    keys, values = (torch.cat([x[:n] for n in lengths]) for x in (k, v))
    cache.write_prompt(keys, values, starts(lengths), cache.requests[1:])
    q, k, v = layer(1301, 2, 1, seed=2)
    cache.write_prompt(k, v, starts([1301]), cache.requests[:1])
    return cache, q[-1:], layer(300, 2, 1, seed=3)[0]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("batch", [2, 5, 64, 257])
def test_any_batch_at_every_position(neighbours, batch, depth):
    """FA#1897, FA#2450: alone and among 2, 5, 64, 257 requests of length 0 to 131072, at every position (of 64 and
    257, at five): byte-equal."""
    cache, q, queries = neighbours
    own, *others = cache.requests
    alone = run(cache, q, ids=[own], depth=depth)
    draw = random.Random(batch)
    for position in range(batch) if batch < 6 else (0, 1, batch // 3, batch - 2, batch - 1):
        ids = [draw.choice(others[:-1]) for _ in range(batch)]
        ids[(position + 1) % batch] = others[-1]  # one long neighbour a call keeps the test short
        ids[position] = own
        rows = queries[torch.arange(batch) % 300].clone()
        rows[position] = q[0]
        tables = cache.tables(ids)  # ids of a call are distinct only where something is written
        result = run(cache, rows, block_table=tables[0], cache_seqlens=tables[1], depth=depth)
        assert_rows_equal(alone, result, position, f"position {position} of {batch}")


@pytest.mark.parametrize("depth", DEPTHS)
def test_splits_and_threads(depth):
    """Any split count and number of threads, at odd lengths: byte-equal."""
    layers = [layer(n, seed=n) for n in ODD_LENGTHS]
    cache = filled(ODD_LENGTHS, layers)
    q = torch.stack([x[0][-1] for x in layers])
    expected = run(cache, q, depth=depth)
    for threads in (1, 2, 5):
        set_num_threads(threads)
        for splits in (0, 1, 2, 3, 7, 64, 1000):
            for a, b in zip(expected, run(cache, q, depth=depth, splits=splits), strict=True):
                assert_same_bytes(a, b, f"{threads} threads, {splits} splits")


def test_num_splits_is_splits_and_changes_nothing():
    cache = filled([700], [layer(700)])
    q = layer(700)[0][-1:]
    assert_same_bytes(cache.attend(q), cache.attend(q, num_splits=5))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_page_layout_and_page_size(dim, depth):
    """Pages anywhere in the pool, in any order, of any size, with huge ids behind the length: byte-equal."""
    n = 1301
    q, k, v = layer(n, 4, 2, dim)
    expected = None
    for page_size in (64, 192, 256, 1024):
        pages = -(-n // page_size)
        cache = poisoned(0, n, dim=dim, page_size=page_size, num_pages=3 * pages)
        order = torch.randperm(3 * pages)[:pages]
        table = torch.full((1, pages + 2), HUGE_PAGE, dtype=torch.int32)
        table[0, :pages] = order
        torch.ops.fold_attention.cache_write(
            cache.storage, cache.layout, k, v, table, torch.zeros(1, dtype=torch.int32), starts([n]), None
        )
        result = run(cache, q[-1:], block_table=table, cache_seqlens=n, depth=depth)
        expected = expected or result
        for a, b in zip(expected, result, strict=True):
            assert_same_bytes(a, b, f"pages of {page_size}")


def test_options_of_the_neighbours():
    """Depth is a row's own: one call with a depth for every row equals calls with one depth each."""
    q, k, v = layer(1301)
    cache = filled([1301, 1301], [(q, k, v)] * 2)
    depths = torch.tensor([[8.0, 9.5, 12.0, 16.0], [20.0, 11.0, 10.0, 13.0]])
    rows = q[-2:]
    mixed = run(cache, rows, depth=depths[:, None])
    assert_same_bytes(mixed[0], cache.attend(rows, depth=depths), "(batch, heads)")
    for b in range(2):
        # The rows of a group decide together what is read, so a row alone has its group's depths.
        result = run(cache, rows.flip(0), depth=depths.flip(0)[:, None])
        for a, c in zip(mixed, result, strict=True):
            assert_same_bytes(a[b], c[1 - b], f"row {b}")
    one = cache.attend(rows, depth=torch.tensor(12.0))
    assert_same_bytes(one, cache.attend(rows, depth=12.0))


def test_what_else_the_cache_holds():
    """Requests added, forked, grown and freed around a request change nothing of it."""
    q, k, v = layer(800)
    cache = FoldKVCache(1, 4, 2, 64, 2000, num_pages=40)
    cache.append(k[None, :700], v[None, :700])
    own = cache.requests[0]
    expected = cache.attend(q[-1:], depth=10)
    for step in range(20):
        child = cache.fork(own, 650 - step)
        cache.append(k[None, 700:], v[None, 700:], [child])
        other = cache.add_request()
        cache.append(v[None, : 10 * step + 1], k[None, : 10 * step + 1], [other])
        cache.free_request(child if step % 2 else other)
        if step % 5 == 4:
            for request in cache.requests[1:]:
                cache.free_request(request)
        assert_same_bytes(expected, fold_attn_with_kvcache(q[-1:], cache, ids=[own], depth=10), f"step {step}")
