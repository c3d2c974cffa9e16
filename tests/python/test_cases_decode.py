"""Public reports of today's decode kernels and caches, and what this one does in each case."""

import itertools

import pytest
import torch
from attention_reference import assert_same_bytes
from cache_testing import bf16_error, exact, filled, layer, starts

from fold_attention import FoldKVCache, Partial, add_partials, finish, fold_attn_with_kvcache, partial_attention


@pytest.mark.parametrize("depth", [None, 10.0])
def test_512_steps_of_append_and_decode(depth):
    """torchtitan#3235: 512 steps, B8: no NaN; the last row is attention over all of them."""
    cache = FoldKVCache(8, 4, 2, 64, 512, depth=depth)
    layers = [layer(512, seed=i, dtype=torch.bfloat16) for i in range(8)]
    q, k, v = (torch.stack([x[i] for x in layers]) for i in range(3))
    for t in range(512):
        out, lse = cache.decode(q[:, t], k[:, t], v[:, t], return_lse=True)
        assert bool(out.isfinite().all())
        assert bool(lse.isfinite().all())
    if depth is None:
        for b in range(8):
            rows = q[b, -1:], k[b], v[b]
            reference, _ = exact(*rows)
            rounding = reference.norm() * 2**-8  # of the bf16 output
            assert (out[b] - reference[0]).norm() < bf16_error(*rows, reference) + rounding


def cut(cache, q, edges, **options):
    return [partial_attention(q, cache, a, b, **options) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("depth", [None, 10.0])
@pytest.mark.parametrize("length", [1, 64, 193, 500, 1301])
def test_partials_in_any_order_some_of_them_empty(length, depth):
    """FI#4051, vllm#39148: 0, 1, ... all of 8 partials empty: adding an empty one changes no byte; any order."""
    q, k, v = layer(length)
    sinks = torch.randn(4)
    cache = filled([length], [(q, k, v)], depth=depth, sinks=sinks)
    rows = q[None, -min(length, 3) :]
    expected, expected_lse = cache.attend(rows, return_lse=True)
    blocks = -(-length // 64)
    for kinds in range(9):
        # `kinds` of the eight ranges are empty; the others share the blocks.
        full = max(1, 8 - kinds)
        edges = [64 * (blocks * i // full) for i in range(full)] + [1 << 20] * (9 - full)
        parts = cut(cache, rows, edges)
        for order in (parts, parts[::-1], parts[3:] + parts[:3]):
            out, lse, valid = finish(add_partials(*order), sinks=sinks)
            assert bool(valid.all())
            assert_same_bytes(out, expected, f"{kinds} empty")
            assert_same_bytes(lse, expected_lse, f"{kinds} empty: lse")
    empty = partial_attention(rows, cache, 1 << 20, 1 << 21)
    assert not empty.numerator.any()
    assert not empty.denominator.any()


def test_partials_of_requests_without_keys():
    """All of 8 partials empty: out 0, lse -inf."""
    q = torch.randn(2, 4, 64)
    cache = FoldKVCache(2, 4, 2, 64, 64)
    total = add_partials(*cut(cache, q, range(0, 9 * 64, 64)))
    out, lse, _ = finish(total)
    assert torch.equal(out, torch.zeros_like(out))
    assert bool((lse == -torch.inf).all())


def test_sums_of_partials_leave_their_terms_alone():
    q, k, v = layer(200)
    parts = cut(filled([200], [(q, k, v)]), q[-1:], [0, 128, 256])
    before = [Partial(*(t.clone() for t in p)) for p in parts]
    add_partials(*parts)
    for part, copy in zip(parts, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(part, copy, strict=True))


def layouts(x, batch_first):
    """The same numbers as slices of fused projections, transposes, part of a pool, and broadcast where they can be."""
    fused = torch.cat([torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)], dim=-2)
    yield "a slice of fused heads", fused[..., x.shape[-2] : 2 * x.shape[-2], :]
    yield "heads before tokens", x.transpose(-2, -3).contiguous().transpose(-2, -3)
    wide = torch.cat([x, torch.full_like(x, torch.nan)], dim=-1)
    yield "half of wide rows", wide[..., : x.shape[-1]]
    pool = torch.full((2 * x.shape[0], *x.shape[1:]), torch.nan, dtype=x.dtype)
    pool[::2] = x
    yield "every second row", pool[::2]
    if batch_first:
        yield "batch last", x.movedim(0, 1).contiguous().movedim(1, 0)


def test_strides_of_new_keys_and_queries():
    """pytorch#187506: views of any strides give the bytes of contiguous tensors."""
    lengths = [130, 70]
    q, k, v = layer(sum(lengths))
    expected = FoldKVCache(2, 4, 2, 64, 200)
    expected.write_prompt(k, v, starts(lengths))
    step = [x[: 2 * 3].unflatten(0, (2, 3)) for x in (q, k, v)]
    expected_out = expected.decode(*step)
    prompts = zip(layouts(k, False), layouts(v, False), strict=True)
    for (name, k_view), (_, v_view) in prompts:
        for (step_name, q_step), (_, k_step), (_, v_step) in zip(*(layouts(x, True) for x in step), strict=True):
            cache = FoldKVCache(2, 4, 2, 64, 200)
            cache.write_prompt(k_view, v_view, starts(lengths))
            out = cache.decode(q_step, k_step, v_step)
            assert_same_bytes(cache.storage, expected.storage, f"{name}, {step_name}")
            assert_same_bytes(out, expected_out, f"{name}, {step_name}")


def test_heads_expanded_with_stride_0():
    """pytorch#187506: one head's keys and one row's query, broadcast: the same bytes as copies."""
    q, k, v = layer(100, 1, 1)
    wide = [x.expand(-1, h, -1) for x, h in ((q, 4), (k, 2), (v, 2))]
    assert wide[1].stride(1) == 0
    outs = []
    for rows in (wide, [x.contiguous() for x in wide]):
        cache = FoldKVCache(1, 4, 2, 64, 100)
        cache.write_prompt(rows[1], rows[2], starts([100]))
        outs.append((cache.attend(rows[0][-1:]), cache.storage))
    for a, b in zip(*outs, strict=True):
        assert_same_bytes(a, b)


def test_pages_that_are_a_slice_of_a_larger_pool():
    """A pool with another page stride (one layer of many, interleaved): the same bytes."""
    q, k, v = layer(300)
    plain = FoldKVCache(1, 4, 2, 64, 300)
    sliced = FoldKVCache(1, 4, 2, 64, 300)
    many = torch.full((sliced.num_pages, 3, plain.storage.shape[1]), 0xFF, dtype=torch.uint8)
    sliced.storage = many[:, 1]
    for cache in (plain, sliced):
        cache.append(k[None], v[None])
    assert_same_bytes(plain.attend(q[-1:]), sliced.attend(q[-1:]))
    assert bool((many[:, ::2] == 0xFF).all())


@pytest.mark.parametrize("page_size", [64, 128, 192, 256, 320, 512, 1024])
def test_page_sizes(page_size):
    """FA#828: every page size of the documented table is right at its edges."""
    for length in (page_size - 1, page_size, page_size + 1, 2 * page_size):
        q, k, v = layer(length)
        cache = filled([length], [(q, k, v)], page_size=page_size)
        reference, _ = exact(q[-1:], k, v)
        assert (cache.attend(q[-1:]) - reference).norm() < 0.2 * bf16_error(q[-1:], k, v, reference)


@pytest.mark.parametrize("options", [{}, {"window_size": (127, 0)}, {"depth": 14.0}], ids=str)
def test_sinks(options):
    """FA#1797, vllm#30919: a sink per head equals a softmax with one more logit, dropped; also window 128, GQA 8."""
    q, k, v = layer(700, 16, 2)
    sinks = torch.linspace(-4, 9, 16)
    cache = filled([700], [(q, k, v)], sinks=sinks, **options)
    out, lse, info = cache.attend(q[None, -2:], return_lse=True, return_info=True)
    window = options.get("window_size", (-1, -1))
    reference, expected = exact(q[-2:], k, v, sinks=sinks, window=window)
    allowed = bf16_error(q[-2:], k, v, reference, sinks=sinks, window=window)
    cut_off = 2 * (info["dropped_mass"][..., None] * v.abs().max()).expand_as(out).norm()
    assert (out[0] - reference).norm() < 0.5 * allowed + cut_off
    assert (lse[0] - expected).abs().max() < 1e-3 + info["dropped_mass"].max()
    assert_same_bytes(out, filled([700], [(q, k, v)], **options).attend(q[None, -2:], sinks=sinks), "given per call")


@pytest.mark.parametrize("length", [1000, 8192, 131072])
def test_one_relevant_key_of_many(length):
    """vllm#23813: S up to 131072 with one relevant key: the error is flat in S."""
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(length, 1, 64, generator=g) for _ in range(2))
    q = torch.randn(1, 1, 64, generator=g)
    k[length * 2 // 3, 0] = q[0, 0] * 40 / q.norm() * 8 / q.norm()  # 40 nats, over at most 20 of the others
    cache = filled([length], [(q, k, v)])
    reference, _ = exact(q, k, v)
    for depth in (None, 16.0, 10.0):
        error = (cache.attend(q, depth=depth) - reference).norm() / reference.norm()
        assert error < 2e-4


@pytest.mark.parametrize("depth", [6.0, 9.0, 12.0])
def test_dropped_mass_is_within_its_promise(depth):
    """HKUSTDial/flash-sparse-attention#343: a dropped key weighs less than 2^-depth of its row; the mass reported
    is that of the dropped keys in fp64, and without the tail's model it bounds the error."""
    n = 4000
    q, k, v = layer(n, 2, 2)  # one row a group: nobody else asks for a key
    cache = filled([n], [(q, k, v)], tail=False, bits=4)  # one reading of every key, so that fp64 can see it
    out, info = cache.attend(q[-1:], depth=depth, return_info=True)
    stored_k, stored_v = cache.read()
    weights = torch.einsum("hd,khd->hk", q[-1].double() / 8, stored_k.double()).softmax(-1)
    dropped = ((1 - info["kept_fraction"].double()) * n).round().long()[0]
    always = torch.zeros(n, dtype=torch.bool)
    always[0] = always[(n - 64) // 64 * 64 :] = True  # key 0 and what follows the last settled block
    reference, _ = exact(q[-1:], stored_k, stored_v)
    for h in range(2):
        lightest = weights[h][~always].sort().values[: dropped[h]]
        assert len(lightest) > 100
        # The reference lies below twice the mass, or the row would have been computed again.
        assert lightest[-1] < 2 ** (1 - depth)
        reported = float(info["dropped_mass"][0, h])
        assert reported == pytest.approx(float(lightest.sum()), rel=2**-8)  # a logit's rounding
        worst = 2 * reported * stored_v[:, h].abs().max()
        assert (out[0, h] - reference[0, h]).abs().max() < worst


def test_slots_and_pages_of_a_serving_engine():
    """The tables of vLLM and SGLang: slot = page * page_size + offset, int32 page tables with what other requests left
    behind the length: equal to the cache's own tables."""
    lengths = [5, 64, 130]
    layers = [layer(n + 1, seed=n) for n in lengths]
    own = filled(lengths, layers, room=1, page_size=64, depth=9.0)
    pool = FoldKVCache(0, 4, 2, 64, 200, num_pages=20, page_size=64, depth=9.0)
    pages = torch.randperm(20, generator=torch.Generator().manual_seed(0)).int()
    table = torch.randint(-(2**31), 2**31 - 1, (3, 8), dtype=torch.int64).int()
    table[0, :1], table[1, :2], table[2, :3] = pages[:1], pages[1:3], pages[3:6]
    before = torch.zeros(3, dtype=torch.int32)
    keys, values = (torch.cat([x[i][:n] for x, n in zip(layers, lengths, strict=True)]) for i in (1, 2))
    positions = torch.cat([torch.arange(n) for n in lengths])
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    slots = table[owner, positions // 64].long() * 64 + positions % 64
    torch.ops.fold_attention.cache_write(pool.storage, pool.layout, keys, values, table, before, starts(lengths), slots)
    q, k, v = (torch.stack([x[i][n] for x, n in zip(layers, lengths, strict=True)]) for i in range(3))
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    expected = own.decode(q, k, v)
    out = fold_attn_with_kvcache(q, pool, k, v, page_table=table, cache_seqlens=seqlens)
    assert_same_bytes(out, expected)
    assert_same_bytes(fold_attn_with_kvcache(q, pool, block_table=table, cache_seqlens=seqlens + 1), expected)
