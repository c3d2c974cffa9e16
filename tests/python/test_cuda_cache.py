"""The CUDA backend behind the Python front: the CPU's bytes (P4), graphs (P6), drafts, pages of the caller's.

Needs a GPU that the backend runs on; docs/cuda.md says how these tests are run there.
"""

from typing import Any

import pytest
import torch
from attention_reference import assert_same_bytes, assert_within, attention
from cache_testing import HUGE_PAGE, exact, layer, starts
from cuda_cache_testing import GPU, LENGTHS, both, needs_gpu, same
from torch import Tensor

from fold_attention import (
    FoldKVCache,
    add_partials,
    decode_ops,
    finish,
    fold_attn_varlen_func,
    fold_attn_with_kvcache,
    partial_attention,
)

pytestmark = needs_gpu


@pytest.mark.parametrize("bits", [16, 8, 4, (16, 8), (4, 16)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pages_and_reads_are_the_cpus(dim, bits):
    layers = [layer(n, dim=dim, seed=n, dtype=torch.bfloat16) for n in LENGTHS]
    here, there = both(LENGTHS, layers, bits=bits)
    same(here.storage, there.storage)
    same(here.read(), there.read())


@pytest.mark.parametrize("options", [{}, {"depth": 12.0}, {"depth": 9.0, "tail": False}, {"window_size": (100, 0)}])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (8, 1, 128), (16, 1, 64), (4, 2, 256), (5, 1, 128)])
def test_attention_has_the_cpus_bits(heads, kv_heads, dim, options):
    layers = [layer(n, heads, kv_heads, dim, n) for n in LENGTHS]
    here, there = both(LENGTHS, layers, **options)
    q = torch.stack([x[0][-1] for x in layers])
    sinks = torch.linspace(-3, 9, heads)
    asked: dict[str, Any] = {"return_lse": True, "return_info": True}
    for splits in (0, 1, 7):
        out = here.attend(q, splits=splits, sinks=sinks, **asked)
        same(out, there.attend(q.to(GPU), splits=splits, sinks=sinks.to(GPU), **asked), f"{splits}")


@pytest.mark.parametrize("depth", [None, 11.0])
def test_steps_drafts_and_forks(depth):
    """Appends of one and of several tokens, chains and trees, shared prefixes, truncation."""
    layers = [layer(400, seed=i) for i in range(3)]
    here, there = both((130, 64, 255), layers, room=60, depth=depth)

    def rows(token: int, count: int) -> list[Tensor]:
        return [torch.stack([x[i][token : token + count] for x in layers]) for i in range(3)]

    tree = torch.tensor([[-1, 0, 0, 1]]).expand(3, 4)
    for token, count, options in ((300, 1, {}), (301, 4, {}), (305, 4, {"tree": tree}), (309, 2, {})):
        new = rows(token, count)
        on_gpu = {name: value.to(GPU) for name, value in options.items()}
        expected = here.decode(*new, return_lse=True, **options)
        same(expected, there.decode(*(x.to(GPU) for x in new), return_lse=True, **on_gpu), f"{token}")
    for cache in (here, there):
        cache.truncate([120, 70, 200])
        cache.fork(cache.requests[2], 190)
    new = rows(320, 1)
    new = [torch.cat([x, x[:1]]) for x in new]
    same(here.decode(*new), there.decode(*(x.to(GPU) for x in new)))
    assert here.lengths == there.lengths


def test_prompts_of_equal_length_need_no_starts():
    """Tokens as (batch, tokens, heads, dim), and a token each: the cache makes cu_seqlens where the keys are."""
    layers = [layer(40, seed=i) for i in range(3)]
    here, there = both((130, 64, 255), [layer(300, seed=10 + i) for i in range(3)], room=60)
    k, v = (torch.stack([x[i] for x in layers]) for i in (1, 2))
    for cache, device in ((here, "cpu"), (there, GPU)):
        cache.write_prompt(k[:, :30].to(device), v[:, :30].to(device))
        cache.append(k[:, 30].to(device), v[:, 30].to(device))
        cache.append(k[:, 31:].to(device), v[:, 31:].to(device), ids=cache.requests)
    assert here.lengths == there.lengths == [170, 104, 295]
    same(here.read(), there.read())
    same(here.storage, there.storage)


@pytest.mark.parametrize("tail", [True, False])
def test_steps_in_which_some_tokens_are_padding(tail):
    """q_lens, and slots of the caller's, in pages of the caller's."""
    lengths, tokens = (0, 62, 1021, 300), 4
    layers = [layer(1100, seed=i) for i in range(4)]
    # Prompts that hold the step's tokens too, so that there are pages for them.
    here, there = both([max(1, n) + tokens for n in lengths], layers, depth=12.0, tail=tail)
    q, k, v = (torch.stack([x[i][:tokens] for x in layers]) for i in range(3))
    table, held = here.tables()[0].clone(), torch.tensor(lengths, dtype=torch.int32)
    table[0] = -1  # no keys and no page: padding altogether
    counts = torch.tensor([3, 4, 2, 0], dtype=torch.int32)
    position = held[:, None] + torch.arange(tokens)
    slots = table.gather(1, position // here.page_size).long() * here.page_size + position % here.page_size
    real = (torch.arange(tokens) < counts[:, None]) & (table[:, :1] >= 0)
    for options in ({"q_lens": counts}, {"slot_mapping": slots.where(real, -1).flatten()}, {}):
        results: list[Any] = []
        for cache in (here, there):
            on: dict[str, Any] = {name: value.to(cache.device) for name, value in options.items()}
            arguments = [x.to(cache.device) for x in (q, k, v)]
            on |= {"block_table": table.to(cache.device), "cache_seqlens": held.to(cache.device)}
            results.append(fold_attn_with_kvcache(arguments[0], cache, *arguments[1:], return_lse=True, **on))
        same(results[0], results[1], f"{options.keys()}")
        same(here.storage, there.storage, f"{options.keys()}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_partials_add_and_finish(dim, dtype):
    layers = [layer(1500, 8, 2, dim, i) for i in range(2)]
    here, there = both((1500, 700), layers, depth=12.0)
    q, sinks = torch.stack([x[0][-1:] for x in layers]), torch.linspace(-3, 9, 8)
    finished: list[Any] = []
    for cache in (here, there):
        query, on = q.to(cache.device), sinks.to(cache.device)
        parts = [partial_attention(query, cache, *part) for part in ((0, 640), (640, 704), (704, 2048))]
        total = add_partials(parts[2], parts[0], parts[1])
        out, lse, valid = finish(total, sinks=on, out_dtype=dtype)
        whole, whole_lse = cache.attend(query, return_lse=True, sinks=on, out_dtype=dtype)
        assert bool(valid.any())
        assert_same_bytes(out[valid].cpu(), whole[valid].cpu())
        assert_same_bytes(lse.transpose(1, 2)[valid].cpu(), whole_lse.transpose(1, 2)[valid].cpu())
        finished += [(*total, out, lse, valid, *finish(total, out_dtype=dtype))]
    same(finished[0], finished[1])


def test_partials_of_different_queries_do_not_add():
    """Nobody waits to look at a GPU's grids: their rows become NaN, which says so."""
    layers = [layer(700, seed=0)]
    _, there = both((700,), layers, depth=12.0)
    q = layers[0][0][-1:].to(GPU)[None]
    other = q.clone()
    other[:, :, 1] *= 2
    total = add_partials(partial_attention(q, there, 0, 320), partial_attention(other, there, 320, 700))
    out, lse, valid = finish(total)
    assert not bool(valid[:, :, 1].any())
    assert bool(out[:, :, 1].isnan().all())
    assert bool(lse[:, 1].isnan().all())
    right = [2, 3]  # of the other KV head: what is read of a key is decided by all its rows together
    good = finish(add_partials(partial_attention(q, there, 0, 320), partial_attention(q, there, 320, 700)))
    assert_same_bytes(out[:, :, right].cpu(), good[0][:, :, right].cpu())


def test_partials_and_files(tmp_path):
    layers = [layer(700, seed=i) for i in range(2)]
    here, there = both((700, 513), layers, depth=12.0)
    q = torch.stack([x[0][-1:] for x in layers])
    same(partial_attention(q, here, 64, 448), partial_attention(q.to(GPU), there, 64, 448))
    there.save(tmp_path / "cache.safetensors")
    again = FoldKVCache.load(tmp_path / "cache.safetensors", device=GPU)
    same(here.attend(q), again.attend(q.to(GPU)))
    same(FoldKVCache.load(tmp_path / "cache.safetensors", device="cpu").attend(q), again.attend(q.to(GPU)))


def test_a_captured_step_replays_at_other_lengths():
    """Pages of the caller's: one graph of append and attention, replayed with other lengths, pages and padding."""
    batch, heads, dim = 4, 4, 64
    layers = [layer(900, heads, 2, dim, i, torch.bfloat16) for i in range(batch)]
    lengths = [0, 70, 511, 800]
    cache, there = both([max(1, n) for n in lengths], layers, room=90, depth=12.0)
    table = torch.full((batch, there.tables()[0].shape[1] + 2), HUGE_PAGE, dtype=torch.int32)
    own = cache.tables()[0]
    table[:, : own.shape[1]] = torch.where(own >= 0, own, HUGE_PAGE)
    pool = there.storage
    static: dict[str, Tensor] = {
        "q": torch.zeros(batch, heads, dim, dtype=torch.bfloat16),
        "k": torch.zeros(batch, 2, dim, dtype=torch.bfloat16),
        "v": torch.zeros(batch, 2, dim, dtype=torch.bfloat16),
        "block_table": table,
        "cache_seqlens": torch.zeros(batch, dtype=torch.int32),
    }
    held = {name: value.to(GPU) for name, value in static.items()}
    pages = torch.arange(there.num_pages, dtype=torch.int32).view(batch, -1)
    assert pages.shape[1] * there.page_size >= 900

    def step(arguments: dict[str, Tensor], on: FoldKVCache) -> Any:
        q, k, v = (arguments[name] for name in "qkv")
        table, held_keys = arguments["block_table"], arguments["cache_seqlens"]
        return fold_attn_with_kvcache(q, on, k, v, return_lse=True, block_table=table, cache_seqlens=held_keys)

    held["block_table"][:, : pages.shape[1]] = pages.to(GPU)
    step(held, there)  # outside the graph once: the library is loaded, kernels are
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(held, there)
    for seed, now in enumerate(((800, 70, 511, 3), (0, 1, 64, 899))):
        full = max(now) + 1
        for cached in (cache, there):
            cached.storage.fill_(0xFF)
        arguments = dict(static)
        arguments["block_table"] = static["block_table"].clone()
        arguments["block_table"][:, : pages.shape[1]] = pages.flip(1) if seed else pages
        used = -(-full // there.page_size)
        arguments["block_table"][:, used:] = HUGE_PAGE
        if seed:
            arguments["block_table"][0] = -1  # padding
        arguments["cache_seqlens"] = torch.tensor(now, dtype=torch.int32)
        for i, name in enumerate("qkv"):
            arguments[name] = torch.stack([x[i][n] for x, n in zip(layers, now, strict=True)])
        for b, n in enumerate(now):
            if n == 0:
                continue
            prompt = [layers[b][i][:n] for i in (1, 2)]
            where = (arguments["block_table"][b : b + 1], torch.zeros(1, dtype=torch.int32), starts([n]))
            decode_ops.cache_write(cache.storage, cache.layout, *prompt, *where, None)
        pool.copy_(cache.storage)
        for name, value in arguments.items():
            held[name].copy_(value)
        graph.replay()
        same(step(arguments, cache), result, f"lengths {now}")
        same(cache.storage, pool, f"pages after {now}")


def test_pages_that_do_not_exist_are_no_pages():
    """Ids outside the pool and lengths past the table, which the host never sees: such a request has no keys, writes
    nothing, and its neighbours do not notice."""
    layers = [layer(300, seed=i) for i in range(3)]
    _, there = both((300, 200, 300), layers, room=10)
    table, lengths = (x.clone() for x in there.tables())
    q = torch.stack([x[0][-1] for x in layers]).to(GPU)
    good = there.attend(q)
    for bad_table, bad_lengths in ((torch.tensor([10**6, -7]), 200), (table[1, :2].cpu(), 10**7)):
        table[1, :2], lengths[1] = bad_table.to(GPU), bad_lengths
        before = there.storage.clone()
        out, lse = there.attend(q, block_table=table, cache_seqlens=lengths, return_lse=True)
        assert_same_bytes(out[0].cpu(), good[0].cpu())
        assert_same_bytes(out[2].cpu(), good[2].cpu())
        assert not out[1].any()
        assert bool((lse[1] == -torch.inf).all())
        row = [x[1:2, :2].contiguous().to(GPU) for x in (layers[1][1], layers[1][2])]
        decode_ops.cache_write(there.storage, there.layout, *row, table[1:2], lengths[1:2], starts([1]).to(GPU), None)
        assert torch.equal(there.storage, before)


@pytest.mark.parametrize("window", [(-1, -1), (200, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_prefill_in_chunks(dim, dtype, window):
    """The bits of attention over what is cached and the chunk's own keys, the CPU's pages, and the accuracy rule."""
    lengths, sinks = [900, 0, 517], torch.randn(4)
    layers = [layer(max(n, 1), dim=dim, seed=n, dtype=dtype) for n in lengths]
    options: dict[str, Any] = {"window_size": window, "sinks": sinks}
    here, there = (FoldKVCache(3, 4, 2, dim, 900, device=device, **options) for device in ("cpu", GPU))
    chunks: list[list[Tensor]] = [[], [], []]
    for sizes in ([64, 0, 1], [1, 0, 255], [535, 0, 0], [300, 0, 261]):
        held = there.lengths
        parts = [[x[i][a : a + n] for x, a, n in zip(layers, held, sizes, strict=True)] for i in range(3)]
        q, k, v = map(torch.cat, parts)
        keys, values = (
            torch.cat([rows for pair in zip(cached.split(held), own, strict=True) for rows in pair]).to(GPU)
            for cached, own in zip(here.read(dtype=dtype), parts[1:], strict=True)
        )
        cu_seqlens = starts(sizes).to(GPU)
        out, lse = there.prefill(q.to(GPU), k.to(GPU), v.to(GPU), cu_seqlens, return_lse=True)
        expected = fold_attn_varlen_func(
            q.to(GPU),
            keys,
            values,
            cu_seqlens,
            starts(there.lengths).to(GPU),
            causal=True,
            window_size=window,
            sinks=sinks.to(GPU),
            return_lse=True,
        )
        for got, want in zip((out, lse), expected, strict=True):
            assert_same_bytes(got.cpu(), want.cpu(), f"{sizes}")
        here.write_prompt(k, v, starts(sizes))
        same(here.storage, there.storage, f"{sizes}")
        for chunk, part in zip(chunks, out.cpu().split(sizes), strict=True):
            chunk.append(part)
    assert there.lengths == lengths
    for n, (q, k, v), chunk in zip(lengths, layers, chunks, strict=True):
        if n == 0:
            continue
        reference, _ = exact(q, k, v, window=window, sinks=sinks)
        ordinary, _ = attention(q[None], k[None], v[None], causal=True, window=window, sinks=sinks)
        assert_within(1.1, torch.cat(chunk), ordinary[0], reference, f"{n} keys")


def test_prefill_of_some_requests():
    """In the caller's order, as (batch, tokens, heads, dim), into pages that a fork shares."""
    layers = [layer(200, seed=i, dtype=torch.bfloat16) for i in range(2)]
    here, there = both((200, 150), layers, room=100)
    new = [layer(40, seed=9 + i, dtype=torch.bfloat16) for i in range(2)]
    q, k, v = (torch.stack([x[i] for x in new]) for i in range(3))
    outs = []
    for cache in (here, there):
        child = cache.fork(cache.requests[0], 190)
        rows = [x.to(cache.device) for x in (q, k, v)]
        outs.append(cache.prefill(rows[0], rows[1], rows[2], ids=[child, cache.requests[1]]).cpu())
    assert here.lengths == there.lengths == [200, 190, 230]
    same(here.storage, there.storage)
    same(here.read(), there.read())
    for b, n in enumerate((190, 150)):
        rows = [torch.cat([layers[b][i][:n], new[b][i]]) for i in range(3)]
        ordinary, _ = attention(*(x[None] for x in rows), causal=True)
        reference, _ = exact(rows[0], rows[1], rows[2])
        for out, where in zip(outs, ("CPU", "GPU"), strict=True):
            assert_within(1.1, out[b], ordinary[0, n:], reference[n:], f"request {b}, {where}")


def test_prefills_that_are_not_supported_change_nothing():
    layers = [layer(100, dtype=torch.float32)]
    _, there = both((90,), layers, room=10)
    before = there.storage.clone()
    with pytest.raises(TypeError, match=r"q\.dtype=float32; supported: bfloat16, float16"):
        there.prefill(*(x[None, 90:].to(GPU) for x in layers[0]))
    assert there.lengths == [90]
    assert torch.equal(there.storage, before)
