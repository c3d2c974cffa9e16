"""FoldKVCache and fold_attn_with_kvcache: what they take, what they return, and that it is attention."""

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_reference import assert_same_bytes
from cache_testing import ODD_LENGTHS, bf16_error, exact, filled, layer, starts

from fold_attention import FoldKVCache, fold_attn_with_kvcache, supports


def test_the_published_signatures():
    """The names and the order that users of the published package know."""
    names = list(inspect.signature(FoldKVCache.__init__).parameters)[1:10]
    assert names == ["batch", "n_heads", "n_kv_heads", "head_dim", "max_len", "depth", "v8", "page_size", "tail"]
    assert list(inspect.signature(FoldKVCache.prefill).parameters)[1:5] == ["q", "k", "v", "cu_seqlens"]
    assert list(inspect.signature(FoldKVCache.write_prompt).parameters)[1:4] == ["k", "v", "cu_seqlens"]
    assert list(inspect.signature(fold_attn_with_kvcache).parameters)[:4] == ["q", "cache", "k", "v"]
    cache = FoldKVCache(2, 8, 2, 128, 512, 14.0, True, 128, False)
    assert (cache.depth, cache.bits, cache.page_size, cache.tail) == (14.0, (16, 8), 128, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_generation(dtype):
    """prefill, append, attend and decode as a model calls them: each step is attention over all that came before."""
    lengths, steps = [100, 1, 257], 5
    layers = [layer(n + steps, seed=n, dtype=dtype) for n in lengths]
    cache = FoldKVCache(3, 4, 2, 64, 300)
    prompt = [torch.cat([x[i][:n] for x, n in zip(layers, lengths, strict=True)]) for i in range(3)]
    out = cache.prefill(prompt[0], prompt[1], prompt[2], starts(lengths))
    assert out.dtype == dtype
    for t in range(steps):
        q, k, v = (torch.stack([x[i][n + t] for x, n in zip(layers, lengths, strict=True)]) for i in range(3))
        if t % 2:
            cache.append(k, v)
            result = cache.attend(q, out_dtype=torch.float32)
        else:
            result = cache.decode(q, k, v, out_dtype=torch.float32)
        assert cache.lengths == [n + t + 1 for n in lengths]
        for b, (n, x) in enumerate(zip(lengths, layers, strict=True)):
            rows = x[0][n + t : n + t + 1], x[1][: n + t + 1], x[2][: n + t + 1]
            reference, _ = exact(*rows)
            # A softmax that is one key has no error at all in bf16; 2e-4 is what a 16-bit cache promises.
            allowed = max(0.5 * bf16_error(*rows, reference), 2e-4 * reference.norm())
            assert (result[b] - reference[0]).norm() < allowed


@pytest.mark.parametrize("length", ODD_LENGTHS)
@pytest.mark.parametrize("bits", [16, 8])
def test_dense_decode_is_as_good_as_bf16(length, bits):
    """Error beside an ordinary bf16 implementation's: a 16-bit cache far below it. Half a step of an 8-bit row is
    amax / 254, of a bf16 number 2^-9: 4 times, for rows whose amax is 2 deviations. The lse is the softmax's."""
    q, k, v = layer(length, seed=length)
    cache = filled([length], [(q, k, v)], bits=bits)
    out, lse = cache.attend(q[-1:], return_lse=True)
    reference, expected = exact(q[-1:], k, v)
    assert (out - reference).norm() <= (0.2 if bits == 16 else 4) * bf16_error(q[-1:], k, v, reference)
    assert (lse - expected.T).abs().max() < (1e-3 if bits == 16 else 5e-2)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_groups_and_head_dims(group, dim):
    """FI#996, #2684, #4316: H/Hk in {1..8, 12, 16, 32, 64}, head dims 64, 128, 256: right."""
    q, k, v = layer(130, 2 * group, 2, dim)
    cache = filled([130], [(q, k, v)])
    reference, _ = exact(q[-2:], k, v)
    out = cache.attend(q[None, -2:])
    assert (out[0] - reference).norm() < 0.2 * bf16_error(q[-2:], k, v, reference)


def test_what_is_returned():
    q, k, v = layer(300)
    cache = filled([300] * 2, [(q, k, v)] * 2)
    rows = q[-2:].bfloat16()
    out = cache.attend(rows)
    assert (out.shape, out.dtype) == (rows.shape, torch.bfloat16)
    out, lse = cache.attend(rows, return_lse=True)
    assert (lse.shape, lse.dtype) == ((2, 4), torch.float32)
    assert_same_bytes(lse, cache.attend(rows, return_softmax_lse=True)[1])
    out, info = cache.attend(rows, return_info=True)
    assert list(info) == ["kept_fraction", "dropped_mass", "recomputed", "bytes_read"]
    assert [tuple(x.shape) for x in info.values()] == [(2, 4), (2, 4), (2, 4), (2, 2)]
    assert info["recomputed"].dtype == torch.bool
    tokens = q[None, -3:].expand(2, -1, -1, -1)
    out, lse, info = cache.attend(tokens, return_lse=True, return_info=True)
    assert (out.shape, lse.shape) == (tokens.shape, (2, 4, 3))
    assert [tuple(x.shape) for x in info.values()] == [(2, 3, 4)] * 3 + [(2, 3, 2)]
    assert_same_bytes(out[:, -1], cache.attend(tokens[:, -1]), "the newest token")


def test_output_dtypes():
    """out= decides, then out_dtype=, then the cache's dtype, then q's; a 16-bit output is the fp32 one, rounded."""
    q, k, v = layer(200)
    cache = FoldKVCache(1, 4, 2, 64, 200, dtype=torch.float16)
    cache.append(k[None], v[None])
    full = cache.attend(q[-1:], out_dtype=torch.float32)
    assert_same_bytes(cache.attend(q[-1:]), full.half(), "the cache's")
    assert_same_bytes(cache.attend(q[-1:], out_dtype=torch.bfloat16), full.bfloat16(), "the call's")
    pool = torch.full((3, 4, 2, 64), torch.nan, dtype=torch.bfloat16)
    out = pool[1:2, :, 0]
    assert cache.attend(q[-1:], out=out) is out
    assert_same_bytes(out, full.bfloat16(), "strided out")
    assert int(pool.isnan().sum()) == pool.numel() - out.numel()


def test_output_into_memory_of_the_callers():
    """Any strides, q itself, with and without the append; autograd is told."""
    q, k, v = layer(200)
    cache = FoldKVCache(1, 4, 2, 64, 201)
    cache.append(k[None], v[None])
    table, held = cache.tables()
    tables: dict[str, Any] = {"block_table": table, "cache_seqlens": held - 1}
    for new in ({}, {"k": k[-1:], "v": v[-1:]}):
        want = fold_attn_with_kvcache(q[-1:], cache, **new, **tables)
        for out in (torch.empty_like(want), torch.empty(1, 4, 64, 2, dtype=q.dtype)[..., 0], q[-1:].clone()):
            rows = out if out.equal(q[-1:]) else q[-1:]
            version = out._version
            assert fold_attn_with_kvcache(rows, cache, **new, **tables, out=out) is out
            assert out._version > version
            assert_same_bytes(out, want)
        with torch.inference_mode():
            out = torch.empty_like(want)
            assert_same_bytes(fold_attn_with_kvcache(q[-1:], cache, **new, **tables, out=out), want)


def test_depth_of_the_cache_of_a_call_and_of_a_row():
    q, k, v = layer(1300)
    cache = filled([1300], [(q, k, v)], depth=6.0)
    rows = q[-1:]
    six, dense = cache.attend(rows, return_info=True), cache.attend(rows, depth=None, return_info=True)
    assert_same_bytes(six[0], cache.attend(rows, depth=6))
    assert bool((six[1]["kept_fraction"] < 0.5).all())
    assert bool((dense[1]["kept_fraction"] == 1).all())
    assert not dense[1]["dropped_mass"].any()
    assert bool((six[1]["bytes_read"] < dense[1]["bytes_read"]).all())
    assert_same_bytes(six[0], cache.attend(rows, depth=torch.full((1, 1, 4), 6.0, dtype=torch.float64)))
    per_head = cache.attend(rows, depth=torch.tensor([[20.0, 20, 6, 6]]))
    assert_same_bytes(per_head[:, 2:], six[0][:, 2:], "heads of the second KV head")
    assert not torch.equal(per_head[:, :2], six[0][:, :2])


def test_deeper_is_closer_and_reads_more():
    """The error falls and the bytes rise with depth, on every layer."""
    for seed in range(3):
        q, k, v = layer(3000, seed=seed)
        cache = filled([3000], [(q, k, v)])
        dense = cache.attend(q[-1:])
        errors, read = [], []
        for depth in (6.0, 9.0, 12.0, 16.0, 20.0, None):
            out, info = cache.attend(q[-1:], depth=depth, return_info=True)
            errors.append(float((out - dense).norm()))
            read.append(int(info["bytes_read"].sum()))
        assert errors == sorted(errors, reverse=True)
        assert read == sorted(read)


def test_bits_and_memory():
    """Nested planes: 8 and 4 bits take a half and a quarter of 16; v8 is V without its last plane."""

    def page_bytes(**options):
        return FoldKVCache(1, 8, 8, 128, 256, tail=False, **options).storage.shape[1]

    rows = 8 * 256
    for bits in (16, 8, 4):
        planes = rows * 128 * 2 * bits // 8
        assert planes < page_bytes(bits=bits) <= planes + rows * 2 * 2 + 4 * 128
    assert page_bytes(v8=True) == page_bytes(bits=(16, 8)) == page_bytes(bits=(16, 16), v8=True)
    assert page_bytes(bits=4, v8=True) == page_bytes(bits=4)
    with_tail = FoldKVCache(1, 8, 8, 128, 256).storage.shape[1]
    assert page_bytes(bits=16) < with_tail < 1.1 * page_bytes(bits=16)


@pytest.mark.parametrize("window", [0, 1, 63, 64, 128, 1000])
def test_window(window):
    """Keys before its own that a row sees, its own included."""
    q, k, v = layer(700)
    cache = filled([700], [(q, k, v)], window_size=(window, 0))
    out, lse = cache.attend(q[None, -3:], return_lse=True)
    reference, expected = exact(q[-3:], k, v, window=(window, 0))
    assert (out[0] - reference).norm() < 0.2 * bf16_error(q[-3:], k, v, reference, window=(window, 0)) + 1e-5
    assert (lse[0] - expected).abs().max() < 1e-3
    assert_same_bytes(out, cache.attend(q[None, -3:], window_size=(window, None)))
    whole = filled([700], [(q, k, v)])
    assert_same_bytes(out, whole.attend(q[None, -3:], window_size=(window, 0)), "given per call")


def test_softmax_scale():
    q, k, v = layer(300)
    cache = filled([300], [(q, k, v)], softmax_scale=0.05)
    reference, _ = exact(q[-1:], k, v, scale=0.05)
    out = cache.attend(q[-1:])
    assert (out - reference).norm() < 0.2 * bf16_error(q[-1:], k, v, reference, scale=0.05)
    assert_same_bytes(out, filled([300], [(q, k, v)]).attend(q[-1:], softmax_scale=0.05))


def test_requests_come_and_go():
    q, k, v = layer(100)
    cache = FoldKVCache(2, 4, 2, 64, 128, num_pages=4, page_size=64)
    first, second = cache.requests
    cache.append(k[None, :10].expand(2, -1, -1, -1), v[None, :10].expand(2, -1, -1, -1))
    third = cache.add_request()
    assert cache.requests == [first, second, third]
    cache.append(k[None], v[None], [third])
    assert (cache.lengths, cache.free_pages) == ([10, 10, 100], 0)
    expected = cache.attend(q[-1:], ids=[third])
    cache.free_request(first)
    assert (cache.requests, cache.lengths, cache.free_pages) == ([second, third], [10, 100], 1)
    rows = q[[9, 99]]
    both = cache.attend(rows)
    assert_same_bytes(both[1:], expected)
    assert_same_bytes(cache.attend(rows.flip(0), ids=[third, second]).flip(0), both, "in the order of ids")
    cache.truncate([64], [third])
    assert (cache.lengths, cache.free_pages) == ([10, 64], 2)
    cache.truncate(0)
    assert (cache.lengths, cache.free_pages) == ([0, 0], 4)
    fork = cache.fork(second)
    assert fork not in (first, second, third)


def test_rows_without_keys():
    """mlx#2608, pytorch#103749: a row without a visible key: out 0, lse -inf."""
    cache = FoldKVCache(2, 4, 2, 64, 64, sinks=torch.zeros(4))
    out, lse, info = cache.attend(torch.randn(2, 4, 64), return_lse=True, return_info=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert bool((lse == -torch.inf).all())
    assert not info["recomputed"].any()
    empty = FoldKVCache(0, 4, 2, 64, 64)
    assert empty.attend(torch.randn(0, 4, 64)).shape == (0, 4, 64)


def test_no_gradient_is_made_up():
    """Decode has no gradient: asking for one raises, and what is cached never asks."""
    q, k, v = (x[:2].requires_grad_() for x in layer(3))
    cache = FoldKVCache(2, 4, 2, 64, 64)
    out = cache.decode(q, k, v)
    assert not cache.storage.requires_grad
    with pytest.raises(RuntimeError, match=r"backward through fold_attention\.decode_step"):
        out.sum().backward()


def test_reading_back():
    """`read` returns what was written, within the stored bits."""
    lengths = [0, 1, 65, 300]
    layers = [layer(max(n, 1), seed=n) for n in lengths]
    written = [torch.cat([x[i][:n] for x, n in zip(layers, lengths, strict=True)]) for i in (1, 2)]
    for bits in (16, 8, 4):
        for x, y in zip(filled(lengths, layers, bits=bits).read(), written, strict=True):
            amax = y.norm(dim=-1, keepdim=True)  # of the rotated row, at most
            step = amax / 127 * {16: 2**-8, 8: 1, 4: 16}[bits] * (1 + 2**-7)
            assert bool(((x - y).norm(dim=-1, keepdim=True) <= step * 64**0.5).all())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's account of resident memory")
def test_a_pool_costs_what_is_used_of_it():
    """A pool of over 4 GB is made at once, and takes the memory of its used pages."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    cache = FoldKVCache(8, 8, 8, 128, 2**19, num_pages=2**12)
    assert cache.storage.numel() > 2**32
    cache.append(torch.randn(8, 1, 8, 128), torch.randn(8, 1, 8, 128))
    cache.attend(torch.randn(8, 8, 128))
    assert resident() - before < 2**26


def test_supports_says_what_the_constructor_says():
    wrong: list[dict[str, Any]] = [{"head_dim": 80}, {"page_size": 100}, {"bits": (16, 5)}, {"n_heads": 6}]
    for options in wrong:
        yes, reason = supports("cache", n_kv_heads=4, **options)
        assert not yes
        n_heads, n_kv_heads = options.pop("n_heads", 4), 4
        head_dim = options.pop("head_dim", 64)
        with pytest.raises(ValueError, match=f"^{re.escape(reason or '')}$"):
            FoldKVCache(1, n_heads, n_kv_heads, head_dim, 64, **options)
    assert supports("cache", head_dim=128, n_heads=32, n_kv_heads=8, bits=8, dtype=torch.bfloat16) == (True, None)
    assert supports("attention", head_dim=80, dtype="float16", device="cpu") == (True, None)
    assert supports("cache", device="cuda")[0] is False
    with pytest.raises(ValueError, match="op=backward; allowed"):
        supports("backward")
    with pytest.raises(ValueError, match="what=softcap; allowed"):
        supports("attention", softcap=3)
