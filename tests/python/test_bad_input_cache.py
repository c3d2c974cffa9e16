"""Bad input to the cache: an error that names what, got and allowed, and a cache that is as it was."""

import re
from typing import Any

import pytest
import torch
from cache_testing import assert_unchanged, layer, snapshot, starts

from fold_attention import FoldKVCache, add_partials, finish, fold_attn_with_kvcache, partial_attention


def make(**options):
    cache = FoldKVCache(2, 4, 2, 64, 300, page_size=64, num_pages=8, **options)
    _, k, v = layer(200)
    cache.write_prompt(k, v, starts([130, 70]))
    return cache


Q, K, V = torch.randn(2, 4, 64), torch.randn(2, 2, 64), torch.randn(2, 2, 64)
PROMPT = torch.randn(3, 2, 64)
I32 = torch.int32
TABLE = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=I32)
LENGTHS = torch.tensor([130, 70], dtype=I32)


def strided(x):
    """The same numbers with a last stride of 2."""
    return torch.stack([x, x], -1)[..., 0]


# What is called, and a part of the message.
CALLS: dict[str, Any] = {
    "q rank": (lambda c: c.decode(Q[0], K, V), ValueError, "q.ndim=2; allowed: 3"),
    "q heads": (lambda c: c.decode(Q[:, :3], K, V), ValueError, "q.shape=(2, 3, 64); allowed: 4 heads, as the cache's"),
    "more q heads": (lambda c: c.attend(Q.repeat(1, 2, 1)), ValueError, "q.shape=(2, 8, 64); allowed: 4 heads"),
    "depth flags": (lambda c: c.attend(Q, depth=torch.tensor([True])), TypeError, "depth.dtype=torch.bool; allowed"),
    "depth complex": (
        lambda c: c.attend(Q, depth=torch.tensor([8j])),
        TypeError,
        "depth.dtype=torch.complex64; allowed",
    ),
    "q head_dim": (lambda c: c.decode(Q[..., :32], K, V), ValueError, "q.shape=(2, 1, 4, 32); dimension 3 must be 64"),
    "q batch": (lambda c: c.decode(Q[:1], K[:1], V[:1]), ValueError, "block_table.shape=(2, "),
    "q dtype": (lambda c: c.decode(Q.double(), K, V), TypeError, "q.dtype=float64; supported: float32"),
    "q integer": (lambda c: c.decode(Q.int(), K, V), TypeError, "q.dtype=int32; supported: float32, bfloat16, float16"),
    "q stride": (lambda c: c.decode(strided(Q), K, V), ValueError, "q.stride(-1)=2; must be 1"),
    "q list": (lambda c: c.decode(Q.tolist(), K, V), TypeError, "q=list; allowed: torch.Tensor"),
    "k alone": (lambda c: fold_attn_with_kvcache(Q, c, K), ValueError, "v=None; k and v come together"),
    "k batch": (lambda c: c.decode(Q, K[:1], V), ValueError, "k.shape=(1, 1, 2, 64); allowed: (2, 1, n_kv_heads"),
    "k tokens": (lambda c: c.decode(Q[:, None], K[:, None].expand(-1, 2, -1, -1), V), ValueError, "k.shape=(2, 2, 2"),
    "k heads": (lambda c: c.decode(Q, K[:, :1], V), ValueError, "k.shape=(2, 1, 64); dimension 1 must be 2"),
    "v head_dim": (lambda c: c.decode(Q, K, V[..., :32]), ValueError, "v.shape=(2, 2, 32); dimension 2 must be 64"),
    "k dtype": (lambda c: c.decode(Q, K.int(), V), TypeError, "k.dtype=int32; supported"),
    "v stride": (lambda c: c.decode(Q, K, strided(V)), ValueError, "v.stride(-1)=2; must be 1"),
    "depth nan": (lambda c: c.decode(Q, K, V, depth=float("nan")), ValueError, "depth=nan; allowed: None or a finite"),
    "depth inf": (lambda c: c.decode(Q, K, V, depth=float("inf")), ValueError, "depth=inf; allowed: None or a finite"),
    "depth row nan": (
        lambda c: c.decode(Q, K, V, depth=torch.tensor([[9.0, 9, 9, torch.nan]])),
        ValueError,
        "depth=nan; allowed: None or finite numbers",
    ),
    "depth row inf": (
        lambda c: c.decode(Q, K, V, depth=torch.full((2, 1, 4), -torch.inf)),
        ValueError,
        "depth=-inf; allowed: None or finite numbers",
    ),
    "depth shape": (lambda c: c.decode(Q, K, V, depth=torch.ones(3)), ValueError, "depth.shape=(3); broadcastable"),
    "depth rank": (lambda c: c.decode(Q, K, V, depth=torch.ones(1, 2, 1, 4)), ValueError, "depth.ndim=4; at most 3"),
    "depth text": (lambda c: c.decode(Q, K, V, depth="deep"), TypeError, "depth=str; allowed: None or a number"),
    "out shape": (lambda c: c.decode(Q, K, V, out=torch.empty(2, 4, 32)), ValueError, "out.shape=(2, 4, 32); allowed"),
    "out dtype": (lambda c: c.decode(Q, K, V, out=Q.int()), TypeError, "out.dtype=int32; supported"),
    "out and out_dtype": (
        lambda c: c.decode(Q, K, V, out=Q.clone(), out_dtype=torch.half),
        TypeError,
        "out.dtype=torch.float32; allowed: torch.float16",
    ),
    "out_dtype": (lambda c: c.decode(Q, K, V, out_dtype=torch.int64), TypeError, "out.dtype=int64; supported"),
    "splits": (lambda c: c.decode(Q, K, V, splits=-1), ValueError, "splits=-1; allowed: 0 to"),
    "scale 0": (lambda c: c.decode(Q, K, V, softmax_scale=0.0), ValueError, "softmax_scale=0.0; allowed"),
    "scale nan": (
        lambda c: c.decode(Q, K, V, softmax_scale=float("nan")),
        ValueError,
        "softmax_scale=nan; allowed: None or a finite",
    ),
    "window": (lambda c: c.decode(Q, K, V, window_size=(-2, 0)), ValueError, "window_left=-2; -1 (all keys) or more"),
    "window number": (lambda c: c.decode(Q, K, V, window_size=5), ValueError, "window_size=5; allowed: (left, right)"),
    "sinks shape": (
        lambda c: c.decode(Q, K, V, sinks=torch.ones(3)),
        ValueError,
        "sinks.shape=(3); dimension 0 must be 4",
    ),
    "sinks dtype": (lambda c: c.decode(Q, K, V, sinks=torch.ones(4).int()), TypeError, "sinks.dtype=int32; supported"),
    "softcap": (lambda c: c.decode(Q, K, V, softcap=3.0), ValueError, "softcap=3.0; supported: 0.0"),
    "not causal": (
        lambda c: c.attend(Q[:, None].expand(-1, 2, -1, -1), causal=False),
        ValueError,
        "causal=False; supported: True",
    ),
    "q_lens": (lambda c: c.decode(Q, K, V, q_lens=torch.tensor([1, 2], dtype=I32)), ValueError, "q_lens[1]=2; 0..1"),
    "q_lens negative": (lambda c: c.decode(Q, K, V, q_lens=torch.tensor([-1, 1], dtype=I32)), ValueError, "=-1; "),
    "q_lens dtype": (lambda c: c.decode(Q, K, V, q_lens=torch.tensor([1, 1])), TypeError, "q_lens.dtype=torch.int64; "),
    "tree shape": (
        lambda c: c.decode(Q, K, V, tree=torch.ones(2, 2, dtype=torch.bool)),
        ValueError,
        "tree.shape=(2, 2)",
    ),
    "tree blind": (
        lambda c: c.decode(Q, K, V, tree=torch.zeros(1, 1, dtype=torch.bool)),
        ValueError,
        "tree[0][0]=0; a",
    ),
    "tree parents": (lambda c: c.decode(Q, K, V, tree=torch.zeros(1, dtype=I32)), ValueError, "parents come before"),
    "tree floats": (lambda c: c.decode(Q, K, V, tree=torch.ones(1)), ValueError, "tree=torch.float32 (1,); allowed"),
    "tree of 65": (
        lambda c: c.decode(
            Q[:, None].expand(-1, 65, -1, -1),
            K[:, None].expand(-1, 65, -1, -1),
            V[:, None].expand(-1, 65, -1, -1),
            tree=torch.ones(65, 65, dtype=torch.bool).tril(),
        ),
        ValueError,
        "tree nodes=65; at most 64",
    ),
    "q_lens floats": (lambda c: c.decode(Q, K, V, q_lens=torch.ones(2)), TypeError, "q_lens.dtype=torch.float32; "),
    "q_lens rank": (
        lambda c: c.decode(Q, K, V, q_lens=torch.ones(2, 1, dtype=I32)),
        ValueError,
        "q_lens.shape=(2, 1); allowed: (2,)",
    ),
    "out broadcast": (
        lambda c: c.decode(Q, K, V, out=torch.empty(1, 1, 64).expand(2, 4, 64)),
        ValueError,
        "out.stride=(0, 0, 1); must not be 0",
    ),
    "out with gradient": (
        lambda c: c.decode(Q, K, V, out=torch.empty(2, 4, 64, requires_grad=True)),
        ValueError,
        "out.requires_grad=True; allowed: False",
    ),
    "depth beyond float32": (lambda c: c.decode(Q, K, V, depth=1e300), ValueError, "depth=1e+300; allowed: None or a"),
    "scale beyond float32": (
        lambda c: c.decode(Q, K, V, softmax_scale=1e300),
        ValueError,
        "softmax_scale=1e+300; allowed: None or a finite",
    ),
    "scale text": (lambda c: c.decode(Q, K, V, softmax_scale="1"), TypeError, "softmax_scale=str; allowed"),
    "splits fraction": (lambda c: c.decode(Q, K, V, splits=1.5), TypeError, "splits=float; allowed: an integer"),
    "splits beyond": (lambda c: c.decode(Q, K, V, splits=2**70), ValueError, "; allowed: 64-bit integers"),
    "window fraction": (lambda c: c.decode(Q, K, V, window_size=(1.5, 0)), TypeError, "window_left=float; allowed"),
    "sinks list": (lambda c: c.decode(Q, K, V, sinks=[0.0] * 4), TypeError, "sinks=list; allowed: torch.Tensor"),
    "out_dtype text": (lambda c: c.decode(Q, K, V, out_dtype="half"), TypeError, "out_dtype=str; allowed"),
    "ids floats": (lambda c: c.decode(Q, K, V, ids=[0.5, 1.5]), TypeError, "request=float; allowed: an integer"),
    "ids number": (lambda c: c.decode(Q, K, V, ids=c.requests[0]), TypeError, "ids=int; allowed: None or a sequence"),
    "lengths without pages": (
        lambda c: c.attend(Q, cache_seqlens=5),
        ValueError,
        "cache_seqlens=5; allowed: None without block_table",
    ),
    "slots without pages": (
        lambda c: c.decode(Q, K, V, slot_mapping=torch.zeros(2).long()),
        ValueError,
        "slot_mapping=a tensor; allowed: None without block_table",
    ),
    "partial lengths": (
        lambda c: partial_attention(Q, c, 0, 64, cache_seqlens=5),
        ValueError,
        "cache_seqlens=5; allowed: None without block_table",
    ),
    "partial fraction": (
        lambda c: partial_attention(Q, c, 0.5, 64),  # type: ignore[arg-type]
        TypeError,
        "begin=float; allowed: an integer",
    ),
    "truncate fraction": (lambda c: c.truncate(1.5), TypeError, "length=float; allowed: an integer"),
    "fork fraction": (lambda c: c.fork(c.requests[0], 1.5), TypeError, "length=float; allowed: an integer"),
    "free text": (lambda c: c.free_request("a"), TypeError, "request=str; allowed: an integer"),
    "prompt rank": (
        lambda c: c.write_prompt(torch.tensor(1.0), PROMPT, starts([1, 2])),
        ValueError,
        "k.ndim=0; allowed: 3 beside cu_seqlens",
    ),
    "prefill list": (lambda c: c.prefill([1], PROMPT, PROMPT, starts([1, 2])), TypeError, "q=list; allowed"),
    "slots alone": (lambda c: c.attend(Q, slot_mapping=torch.zeros(2).long()), ValueError, "slot_mapping=a tensor; "),
    "append rank": (lambda c: c.append(K[0], V[0]), ValueError, "k.ndim=2; allowed: 3, or 4"),
    "append batch": (lambda c: c.append(K[:1], V[:1]), ValueError, "k.shape=(1, 1, 2, 64); dimension 0 must be 2"),
    "append v tokens": (lambda c: c.append(K, V[:, None].expand(-1, 2, -1, -1)), ValueError, "v.shape=(4, 2, 64)"),
    "beyond max_len": (
        lambda c: c.append(*(torch.zeros(2, 171, 2, 64),) * 2),
        ValueError,
        "tokens=171; allowed: 0 to 170",
    ),
    "beyond the pool": (
        lambda c: c.append(*(torch.zeros(2, 169, 2, 64),) * 2),
        ValueError,
        "pages needed=4; free: 3 of 8",
    ),
    "cu_seqlens falls": (lambda c: c.write_prompt(PROMPT, PROMPT, starts([4, -1])), ValueError, "cu_seqlens=[0, 4, 3]"),
    "cu_seqlens start": (
        lambda c: c.write_prompt(PROMPT, PROMPT, torch.tensor([1, 2, 3], dtype=I32)),
        ValueError,
        "cu_seqlens=[1, 2, 3]; from 0",
    ),
    "cu_seqlens end": (lambda c: c.write_prompt(PROMPT, PROMPT, starts([2, 2])), ValueError, "at most 3 tokens"),
    "cu_seqlens count": (
        lambda c: c.write_prompt(PROMPT, PROMPT, starts([3])),
        ValueError,
        "cu_seqlens.shape=(2,); allowed",
    ),
    "cu_seqlens dtype": (
        lambda c: c.write_prompt(PROMPT, PROMPT, starts([1, 2]).long()),
        TypeError,
        "cu_seqlens.dtype=torch.int64; supported: int32",
    ),
    "prefill q heads": (
        lambda c: c.prefill(PROMPT, PROMPT, PROMPT, starts([1, 2])),
        ValueError,
        "q.shape=(3, 2, 64); allowed: (tokens, 4, 64)",
    ),
    "prefill dtypes": (
        lambda c: c.prefill(PROMPT.repeat(1, 2, 1), PROMPT.half(), PROMPT, starts([1, 2])),
        TypeError,
        "k.dtype=float16; supported: float32",
    ),
    "prefill v": (
        lambda c: c.prefill(PROMPT.repeat(1, 2, 1), PROMPT, PROMPT[:2], starts([1, 2])),
        ValueError,
        "v.shape=(2, 2, 64); dimension 0 must be 3",
    ),
    "unknown request": (
        lambda c: c.append(K, V, [c.requests[0], 2147480000]),
        ValueError,
        "request=2147480000; a request",
    ),
    "foreign request": (
        lambda c: c.attend(Q[:1], ids=make().requests[:1]),
        ValueError,
        "; a request of this cache that",
    ),
    "freed request": (
        lambda c: c.free_request(make().requests[0]),
        ValueError,
        "; a request of this cache that has not",
    ),
    "a request twice": (
        lambda c: c.decode(Q, K, V, ids=c.requests[:1] * 2),
        ValueError,
        "; each request once in a call",
    ),
    "truncate longer": (lambda c: c.truncate([130, 71]), ValueError, "length=71; allowed: 0 to 70"),
    "truncate negative": (lambda c: c.truncate(-1), ValueError, "length=-1; allowed: 0 to 130"),
    "truncate count": (lambda c: c.truncate([1]), ValueError, "ids=2; 1, one per value"),
    "fork longer": (lambda c: c.fork(c.requests[1], 71), ValueError, "length=71; allowed: 0 to 70"),
    "fork negative": (lambda c: c.fork(c.requests[1], -1), ValueError, "length=-1; at least 0"),
    "partial range": (lambda c: partial_attention(Q, c, 0, 65), ValueError, "key range edge=65; multiples of 64 below"),
    "partial order": (lambda c: partial_attention(Q, c, 64, 0), ValueError, "key range=64..0; 0 <= begin <= end"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_refused_and_unchanged(kind):
    call, error, message = CALLS[kind]
    cache = make()
    before = snapshot(cache)
    with pytest.raises(error, match=re.escape(message)):
        call(cache)
    assert_unchanged(cache, before)


# A tensor on another device is refused by name: torch would answer for it with memory that nothing was written to.
ELSEWHERE: dict[str, Any] = {
    "q": lambda c, x: c.decode(x(Q), K, V),
    "k": lambda c, x: c.decode(Q, x(K), V),
    "v": lambda c, x: c.append(K[:, None], x(V[:, None])),
    "tree": lambda c, x: c.decode(Q, K, V, tree=x(torch.ones(1, 1, dtype=torch.bool))),
    "q_lens": lambda c, x: c.decode(Q, K, V, q_lens=x(torch.ones(2, dtype=I32))),
    "depth": lambda c, x: c.decode(Q, K, V, depth=x(torch.ones(4))),
    "sinks": lambda c, x: c.attend(Q, sinks=x(torch.ones(4))),
    "out": lambda c, x: c.decode(Q, K, V, out=x(Q)),
    "block_table": lambda c, x: c.attend(Q, block_table=x(TABLE), cache_seqlens=LENGTHS),
    "cache_seqlens": lambda c, x: c.attend(Q, block_table=TABLE, cache_seqlens=x(LENGTHS)),
    "cu_seqlens": lambda c, x: c.write_prompt(PROMPT, PROMPT, x(starts([1, 2]))),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_devices_are_refused(name):
    cache = make()
    before = snapshot(cache)
    with pytest.raises(TypeError, match=re.escape(f"{name}.device=meta; supported: cpu")):
        ELSEWHERE[name](cache, lambda x: x.to("meta"))
    assert_unchanged(cache, before)


def test_no_tokens_is_a_call_like_any_other():
    cache = make()
    before = snapshot(cache)
    q, k, v = (x[:, None][:, :0] for x in (Q, K, V))
    out, lse = cache.decode(q, k, v, return_lse=True)
    assert out.shape == (2, 0, 4, 64)
    assert lse.shape == (2, 4, 0)
    assert_unchanged(cache, before)


# Changes to a step on pages of the caller's, and a part of the message.
PAGES: dict[str, Any] = {
    "no lengths": ({"cache_seqlens": None}, ValueError, "cache_seqlens=None; required beside block_table"),
    "lengths number": ({"cache_seqlens": 2**31}, ValueError, "cache_seqlens=2147483648; allowed: 0 to 2147483647"),
    "ids and a table": ({"ids": [1, 2]}, ValueError, "ids=[1, 2]; allowed: None beside block_table"),
    "two tables": ({"page_table": TABLE}, ValueError, "page_table=a tensor; allowed: None beside block_table"),
    "table dtype": ({"block_table": TABLE.long()}, TypeError, "block_table.dtype=int64; supported: int32"),
    "table rank": ({"block_table": TABLE[0]}, ValueError, "block_table.ndim=1; supported: 2"),
    "table batch": ({"block_table": TABLE[:1]}, ValueError, "block_table.shape=(1, 3); dimension 0 must be 2"),
    "table stride": ({"block_table": strided(TABLE)}, ValueError, "block_table.stride(-1)=2; must be 1"),
    "page beyond": (
        {"block_table": torch.where(TABLE == 1, 9, TABLE)},
        ValueError,
        "block_table[0][1]=9; page ids 0..7",
    ),
    "page negative": (
        {"block_table": torch.where(TABLE == 4, -1, TABLE)},
        ValueError,
        "block_table[1][1]=-1; page ids",
    ),
    "page huge": (
        {"block_table": torch.where(TABLE == 0, 2147480000, TABLE)},
        ValueError,
        "[0][0]=2147480000; page ids",
    ),
    "page shared": ({"block_table": torch.where(TABLE == 4, 2, TABLE)}, ValueError, "writes the same slots of it"),
    "lengths beyond": (
        {"cache_seqlens": LENGTHS + 62},
        ValueError,
        "keys of request 0=193; block_table has room for 192",
    ),
    "lengths negative": ({"cache_seqlens": LENGTHS - 72}, ValueError, "seqlens[1]=-"),
    "lengths negative by the tokens": (
        {"cache_seqlens": torch.tensor([-1, 70], dtype=I32)},
        ValueError,
        "seqlens[0]=-1",
    ),
    "lengths negative, no pages": (
        {"cache_seqlens": torch.tensor([-1, -1], dtype=I32), "block_table": TABLE[:, :0]},
        ValueError,
        "seqlens[0]=-1; at least 0",
    ),
    "lengths dtype": ({"cache_seqlens": LENGTHS.long()}, TypeError, "seqlens.dtype=int64; supported: int32"),
    "lengths batch": ({"cache_seqlens": LENGTHS[:1]}, ValueError, "seqlens.shape=(1); dimension 0 must be 2"),
    "slot elsewhere": ({"slot_mapping": torch.tensor([130, 263])}, ValueError, "slot_mapping[1]=263; block_table puts"),
    "slot beyond": ({"slot_mapping": torch.tensor([130, 2**40])}, ValueError, "slot_mapping[1]=1099511627776; "),
    "slot negative": ({"slot_mapping": torch.tensor([-2, 262])}, ValueError, "slot_mapping[0]=-2; "),
    "slot dtype": ({"slot_mapping": torch.tensor([130, 262], dtype=I32)}, TypeError, "slot_mapping.dtype=int32; "),
    "slot count": ({"slot_mapping": torch.tensor([130])}, ValueError, "slot_mapping.shape=(1); dimension 0 must be 2"),
}


@pytest.mark.parametrize("kind", PAGES)
def test_refused_pages(kind):
    changes, error, message = PAGES[kind]
    cache = make()
    before = snapshot(cache)
    arguments = {"block_table": TABLE, "cache_seqlens": LENGTHS, **changes}
    with pytest.raises(error, match=re.escape(message)):
        fold_attn_with_kvcache(Q, cache, K, V, **arguments)
    assert_unchanged(cache, before)


def test_the_calls_above_are_right_where_they_are_not_wrong():
    """The unchanged calls succeed, so that each refusal is of its own change."""
    cache = make()
    fold_attn_with_kvcache(Q, cache, K, V, block_table=TABLE, cache_seqlens=LENGTHS)
    fold_attn_with_kvcache(
        Q, cache, K, V, block_table=TABLE, cache_seqlens=LENGTHS, slot_mapping=torch.tensor([130, 262])
    )
    cache.decode(Q, K, V, depth=9.0, tree=torch.ones(1, 1, dtype=torch.bool), q_lens=torch.tensor([1, 1], dtype=I32))
    cache.append(K, V)
    cache.prefill(PROMPT.repeat(1, 2, 1), PROMPT, PROMPT, starts([1, 2]))
    assert cache.lengths == [133, 74]


def test_padding_before_a_token():
    cache = make()
    before = snapshot(cache)
    q, k, v = (x[:, None].expand(-1, 2, -1, -1) for x in (Q, K, V))
    slots = torch.tensor([130, 131, -1, 262])
    with pytest.raises(ValueError, match=re.escape("slot_mapping[3]=262; -1: what follows")):
        fold_attn_with_kvcache(q, cache, k, v, block_table=TABLE, cache_seqlens=LENGTHS, slot_mapping=slots)
    assert_unchanged(cache, before)


def test_partials_that_do_not_belong_together():
    cache = make()
    a, b = partial_attention(Q, cache, 0, 64), partial_attention(Q + 1, cache, 64, 300)
    copies = [t.clone() for t in a]
    with pytest.raises(ValueError, match="grid of row 0="):
        add_partials(a, b)
    with pytest.raises(ValueError, match=re.escape("numerator.shape=(1, 1, 4, 64)")):
        add_partials(a, partial_attention(Q[:1], cache, 0, 64, ids=cache.requests[:1]))
    with pytest.raises(ValueError, match=r"sinks\.shape"):
        finish(a, sinks=torch.zeros(3))
    with pytest.raises(TypeError, match=r"out\.dtype=int32"):
        finish(a, out_dtype=torch.int32)
    assert all(torch.equal(x, y) for x, y in zip(a, copies, strict=True))
