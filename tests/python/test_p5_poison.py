"""P5: nothing behind a request's length, outside its page table, or masked can influence a result."""

import pytest
import torch
from attention_reference import assert_same_bytes
from cache_testing import HUGE_PAGE, ODD_LENGTHS, filled, layer, poisoned, starts

from fold_attention import FoldKVCache, fold_attn_with_kvcache, partial_attention

NAN = torch.nan


def clean(length, x, **options):
    """The first keys of a layer in storage of zeros."""
    cache = FoldKVCache(1, x[0].shape[1], x[1].shape[1], x[0].shape[2], max(length, 1), **options)
    cache.write_prompt(x[1][:length], x[2][:length], starts([length]))
    return cache


@pytest.mark.parametrize("page_size", [64, 192, 256, 1024])
@pytest.mark.parametrize("depth", [None, 10.0])
def test_storage_that_was_never_written(depth, page_size):
    """FA#1745, FA#2374, FI#941: NaN in every byte behind the lengths and in free pages; unused page ids 2147480000."""
    layers = [layer(n, seed=n) for n in ODD_LENGTHS]
    cache = filled(ODD_LENGTHS, layers, page_size=page_size, depth=depth)
    table, lengths = cache.tables()
    table = torch.where(table < 0, HUGE_PAGE, table)
    q = torch.stack([x[0][-1] for x in layers])
    out, lse, info = cache.attend(q, block_table=table, cache_seqlens=lengths, return_lse=True, return_info=True)
    for i, (n, x) in enumerate(zip(ODD_LENGTHS, layers, strict=True)):
        expected = clean(n, x, page_size=page_size, depth=depth).attend(q[i : i + 1], return_lse=True, return_info=True)
        assert_same_bytes(out[i], expected[0][0], f"{n} keys")
        assert_same_bytes(lse[i], expected[1][0], f"lse, {n} keys")
        for name, value in info.items():
            assert_same_bytes(value[i], expected[2][name][0], f"{name}, {n} keys")
    assert bool(out.isfinite().all())


def test_storage_is_not_read_by_writes_either():
    """Summaries and fits are made of the request's own keys: the same bytes on poisoned and on zeroed storage."""
    n = 2100
    x = layer(n, seed=1)
    a, b = filled([n], [x]), clean(n, x)
    full = n // 64 * 64  # an unfinished block has no summary yet
    for cache in (a, b):
        cache.truncate(full)
    q = x[0][None, full - 2 : full]
    for depth in (None, 9.0):
        assert_same_bytes(a.attend(q, depth=depth), b.attend(q, depth=depth))
    for cache in (a, b):
        cache.append(x[1][None, full:], x[2][None, full:])
    assert_same_bytes(a.attend(x[0][-1:], depth=9.0), b.attend(x[0][-1:], depth=9.0))


@pytest.mark.parametrize("depth", [None, 9.0])
@pytest.mark.parametrize("n", [1, 64, 65, 300, 1500])
def test_keys_outside_a_window(n, depth):
    """Keys that lie before every row's window may hold NaN."""
    window = 100
    x = layer(n, seed=n)
    bad = tuple(t.clone() for t in x)
    first = max(0, n - 1 - window)
    bad[1][:first] = bad[2][:first] = NAN
    options = {"depth": depth, "window_size": (window, 0)}
    assert_same_bytes(clean(n, x, **options).attend(x[0][-1:]), clean(n, bad, **options).attend(x[0][-1:]))


def test_partials_of_other_ranges():
    """NaN keys outside the range of a partial sum change the grid (NaN), never silently the sums of clean rows."""
    x = layer(640)
    bad = tuple(t.clone() for t in x)
    bad[1][600, 0] = NAN  # KV head 0 alone
    a, b = (partial_attention(x[0][-1:], clean(640, y), 0, 256) for y in (x, bad))
    assert bool(b.grid[:, :, :2].isnan().all()), "its own KV head's rows see the key"
    for name, first, second in zip(a._fields, a, b, strict=True):
        assert_same_bytes(first[:, :, 2:], second[:, :, 2:], name)


@pytest.mark.parametrize("depth", [None, 9.0])
def test_nan_in_a_visible_key(depth):
    """A NaN in a visible key or value gives NaN in the rows that see it, and changes no byte of the others."""
    n, at = 700, 650
    x = layer(n)
    for which in (1, 2):
        bad = tuple(t.clone() for t in x)
        bad[which][at, 1, 5] = NAN if which == 1 else torch.inf
        good, broken = clean(n, x, depth=depth), clean(n, bad, depth=depth)
        q = x[0][None, at - 3 :]
        (out, lse), (expected, expected_lse) = (c.attend(q, return_lse=True) for c in (broken, good))
        sees = torch.zeros(1, n - at + 3, 4, dtype=torch.bool)
        sees[:, 3:, 2:] = True  # tokens from the key's own on, heads of KV head 1
        assert torch.equal(out.isnan().all(-1), sees)
        assert torch.equal(out.isnan().any(-1), sees)
        assert torch.equal(lse.isnan(), sees.transpose(1, 2))
        assert_same_bytes(out[~sees], expected[~sees])
        assert_same_bytes(lse.transpose(1, 2)[~sees], expected_lse.transpose(1, 2)[~sees])


def test_nan_in_one_request_or_row():
    """NaN in a query row, or in another request, changes no byte of the rest; rows of one KV head decide together what
    is read, so a row's neighbours there are not the rest."""
    layers = [layer(300, seed=i) for i in range(3)]
    q = torch.stack([x[0][-1] for x in layers])
    expected = filled([300] * 3, layers).attend(q)
    layers[1][1][200] = NAN
    cache = filled([300] * 3, layers)
    q[2, 3, 9] = NAN
    out = cache.attend(q)
    bad = torch.zeros(3, 4, dtype=torch.bool)
    bad[1] = True
    bad[2, 3] = True
    assert torch.equal(out.isnan().any(-1), bad)
    rest = ~bad
    rest[2, 2] = False
    assert_same_bytes(out[rest], expected[rest])


def test_siblings_of_a_tree():
    """A node's NaN reaches its descendants alone, though it lies between their keys in the cache."""
    prefix, nodes = 61, 9
    x = layer(prefix + nodes)
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 2, 3, 5])
    outs = []
    for broken in (False, True):
        k = x[1].clone()
        k[prefix + 1] = NAN if broken else k[prefix + 1]
        cache = poisoned(1, prefix + nodes)
        cache.append(k[None, :prefix], x[2][None, :prefix])
        outs.append(cache.decode(x[0][None, prefix:], k[None, prefix:], x[2][None, prefix:], tree=parents)[0])
    below = [1, 3, 4, 7]
    others = [i for i in range(nodes) if i not in below]
    assert bool(outs[1][below].isnan().all())
    assert_same_bytes(outs[0][others], outs[1][others])


@pytest.mark.parametrize("with_slots", [False, True])
def test_padding_of_a_batch(with_slots):
    """vllm#35969, #28579: padding (length 0, page -1, slot -1): no access, rows 0, lse -inf; what it brings is NaN."""
    q, k, v = layer(5 * 2)
    cache = poisoned(0, 256, num_pages=3)
    table = torch.tensor([[2, -1], [-1, -1], [0, HUGE_PAGE], [-1, HUGE_PAGE], [1, 1]], dtype=torch.int32)
    lengths = torch.zeros(5, dtype=torch.int32)
    pad = torch.tensor([False, True, False, True, False])
    seen = []
    for step in range(2):
        rows = [x[step::2].clone() for x in (q, k, v)]
        for x in rows:
            x[pad] = NAN
        slots = torch.where(pad, -1, table[:, 0].long() * 256 + step) if with_slots else None
        before = torch.where(pad, 0, lengths + step).int()
        out, lse = fold_attn_with_kvcache(
            rows[0], cache, *rows[1:], block_table=table, cache_seqlens=before, slot_mapping=slots, return_lse=True
        )
        assert torch.equal(out[pad], torch.zeros_like(out[pad]))
        assert bool((lse[pad] == -torch.inf).all())
        assert bool(out[~pad].isfinite().all())
        seen.append(out)
    again = cache.attend(q[1::2], block_table=table, cache_seqlens=torch.where(pad, 0, 2).int())
    assert_same_bytes(again[~pad], seen[1][~pad])
    assert torch.equal(again[pad], torch.zeros_like(again[pad]))


def test_a_batch_of_padding_alone():
    cache = FoldKVCache(0, 4, 2, 64, 64)
    q, k, v = (torch.full((3, h, 64), NAN) for h in (4, 2, 2))
    table, lengths = torch.full((3, 1), -1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    for rows in ((), (k, v)):
        out, lse, info = fold_attn_with_kvcache(
            q, cache, *rows, block_table=table, cache_seqlens=lengths, return_lse=True, return_info=True
        )
        assert torch.equal(out, torch.zeros_like(out))
        assert bool((lse == -torch.inf).all())
        assert not any(value.bool().any() for name, value in info.items() if name != "kept_fraction")


def test_pages_past_2_to_the_32():
    """vllm#50427, vllm#47671, FI#3136: the same pages past 2^31 and 2^32 bytes of a sparse pool: byte-equal."""
    x = layer(700)
    cache = FoldKVCache(0, 4, 2, 64, 700, num_pages=40000, depth=11.0)
    assert cache.storage.numel() > 2**32 + 2**30
    expected = clean(700, x, depth=11.0).attend(x[0][-1:])
    page_31, page_32 = (-(-(2**n) // cache.storage.shape[1]) for n in (31, 32))
    for pages in ([0, 1, 2], [page_31 - 2, page_31, page_31 - 1], [page_32, 39999, page_32 - 1], [39998, 0, 39999]):
        table = torch.tensor([pages], dtype=torch.int32)
        torch.ops.fold_attention.cache_write(
            cache.storage, cache.layout, *x[1:], table, torch.zeros(1, dtype=torch.int32), starts([700]), None
        )
        out = cache.attend(x[0][-1:], block_table=table, cache_seqlens=700)
        assert_same_bytes(out, expected, f"pages {pages}")
