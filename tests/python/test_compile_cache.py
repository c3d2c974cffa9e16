"""Custom operators of the cache: schema, fake kernels; torch.compile without a graph break or a compile per length."""

import pytest
import torch
from attention_reference import assert_same_bytes
from cache_testing import filled, layer, poisoned

from fold_attention import FoldKVCache, fold_attn_with_kvcache

ops = torch.ops.fold_attention
I32 = torch.int32


def pool(**options):
    """A pool with two requests of 70 and 300 keys on pages of the caller's, and one of padding."""
    cache = FoldKVCache(0, 4, 2, 64, 640, num_pages=12, **options)
    cache.storage.zero_()
    table = torch.tensor([[3, 1, -1], [7, 2, 9], [-1, -1, -1]], dtype=I32)
    lengths = torch.tensor([70, 300, 0], dtype=I32)
    _, k, v = layer(370)
    ops.cache_write(
        cache.storage,
        cache.layout,
        k,
        v,
        table[:2],
        torch.zeros(2, dtype=I32),
        torch.tensor([0, 70, 370], dtype=I32),
        None,
    )
    return cache, table, lengths


STEP = torch.randn(3, 1, 4, 64), torch.randn(3, 2, 64), torch.randn(3, 2, 64)
OPTIONS = {
    "dense": (None, None, None, None, 0.0, -1, 0, torch.float32, False),
    "everything": (
        torch.ones(3, dtype=I32),
        torch.ones(3, 1, dtype=torch.int64),
        torch.full((1, 1, 4), 9.0),
        torch.randn(4),
        0.2,
        50,
        3,
        torch.bfloat16,
        True,
    ),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_opcheck_decode(kind):
    """FA#2013: torch.library.opcheck: schema, fake kernel, dynamic shapes."""
    cache, table, lengths = pool()
    torch.library.opcheck(ops.decode.default, (STEP[0], cache.storage, cache.layout, table, lengths, *OPTIONS[kind]))


@pytest.mark.parametrize("kind", OPTIONS)
def test_opcheck_decode_step(kind):
    cache, table, lengths = pool()
    slots = torch.tensor([3 * 256 + 70, 2 * 256 + 44, -1]) if kind == "everything" else None
    arguments = (STEP[0], cache.storage, cache.layout, *STEP[1:], slots, table, lengths, *OPTIONS[kind])
    torch.library.opcheck(ops.decode_step.default, arguments)


def test_opcheck_cache_write():
    cache, table, lengths = pool()
    rows = [x[:2] for x in STEP[1:]]
    arguments = (cache.storage, cache.layout, *rows, table[:2], lengths[:2], torch.tensor([0, 1, 2], dtype=I32), None)
    torch.library.opcheck(ops.cache_write.default, arguments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_steps_equal_eager_without_a_compile_per_length(backend):
    """vllm#20301, sglang#22800: compiled once at B 8 and max_len 4096, run with lengths from 1 to 4096 and padding:
    equal to eager, cache included."""
    torch._dynamo.reset()
    b, pages = 8, 16

    def step(q, k, v, storage_of, table, lengths, slots):
        return fold_attn_with_kvcache(
            q,
            storage_of,
            k,
            v,
            block_table=table,
            cache_seqlens=lengths,
            slot_mapping=slots,
            depth=11.0,
            return_lse=True,
            return_info=True,
        )

    layers = [layer(4096, 2, 1, seed=i) for i in range(b)]
    caches = [filled([4096] * b, layers) for _ in range(2)]
    table = caches[0].tables()[0]
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    draw = torch.Generator().manual_seed(0)
    for n in range(4):
        lengths = torch.randint(0, 4096, (b,), generator=draw, dtype=I32)
        lengths[0], lengths[1] = (0, 4095) if n else (4095, 0)
        padding = torch.zeros(b, dtype=torch.bool)
        padding[2 + n] = n > 0
        lengths = torch.where(padding, 0, lengths).int()
        position = lengths.long()
        slots = table.gather(1, (position // 256)[:, None])[:, 0].long() * 256 + position % 256
        slots = torch.where(padding, -1, slots)
        rows = torch.where(padding[:, None], -1, table).int()
        q, k, v = torch.randn(b, 2, 64), torch.randn(b, 1, 64), torch.randn(b, 1, 64)
        assert rows.shape == (b, pages)
        with torch._dynamo.config.patch(error_on_recompile=n > 0):  # all that varies is in tensors
            out, lse, info = compiled(q, k, v, caches[0], rows, lengths, slots)
        expected, expected_lse, expected_info = step(q, k, v, caches[1], rows, lengths, slots)
        assert_same_bytes(out, expected, f"step {n}: out")
        assert_same_bytes(lse, expected_lse, f"step {n}: lse")
        for name, value in info.items():
            assert_same_bytes(value, expected_info[name], f"step {n}: {name}")
        assert_same_bytes(caches[0].storage, caches[1].storage, f"step {n}: cache")
        assert torch.equal(out[padding], torch.zeros_like(out[padding]))


def test_compiled_attend_on_the_caches_own_requests():
    """attend compiles too; the tables are updated in place, so a longer cache needs no new compile."""
    torch._dynamo.reset()
    q, k, v = layer(400)
    cache = poisoned(2, 400, depth=10.0)
    compiled = torch.compile(lambda rows: cache.attend(rows), fullgraph=True, backend="aot_eager")
    for n, length in enumerate((1, 64, 200)):
        cache.truncate(0)
        cache.append(*(x[None, :length].expand(2, -1, -1, -1) for x in (k, v)))
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            out = compiled(q[:2])
        assert_same_bytes(out, cache.attend(q[:2]), f"{length} keys")


def test_compiled_tree_and_out_dtype():
    torch._dynamo.reset()
    q, k, v = layer(100)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[3, 2] = False
    cache = filled([100], [(q, k, v)])
    table, lengths = cache.tables()

    def verify(rows, tree):
        return fold_attn_with_kvcache(
            rows, cache, block_table=table, cache_seqlens=lengths, tree=tree, out_dtype=torch.float16
        )

    rows = q[None, -4:]
    compiled = torch.compile(verify, fullgraph=True, backend="aot_eager")
    assert_same_bytes(compiled(rows, mask), verify(rows, mask))
