"""P3: n tokens at once equal n steps, a shared prefix one stored per request, chunks of a prompt the whole."""

import pytest
import torch
from attention_reference import assert_same_bytes
from cache_testing import bf16_error, exact, filled, layer, poisoned, starts

from fold_attention import FoldKVCache

OPTIONS = [{"depth": None}, {"depth": 12.0}, {"depth": 9.0, "window_size": (100, 0)}]


def used_bytes(cache: FoldKVCache):
    """The pages of every request, in order of position; what a page does not hold is as it was made."""
    table, _ = cache.tables()
    return [cache.storage[row[row >= 0].long()] for row in table]


def fresh(lengths, layers, **options):
    """As `filled`, on storage of zeros."""
    q, k, _ = layers[0]
    cache = FoldKVCache(len(lengths), q.shape[1], k.shape[1], q.shape[2], 6000, **options)
    keys, values = (torch.cat([x[i][:n] for x, n in zip(layers, lengths, strict=True)]) for i in (1, 2))
    cache.write_prompt(keys, values, starts(lengths))
    return cache


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_draft_chain_equals_single_steps(n, options):
    """vllm#8783, #41758: n tokens at once and n single steps: byte-equal rows, info and cache; lengths around a block,
    a page and a mark of the tail's fit."""
    lengths = [0, 1, 60, 63, 64, 190, 250, 255, 256, 1017, 1023, 1024, 1080]
    layers = [layer(length + n, seed=length) for length in lengths]
    many, single = (filled(lengths, layers, n, **options) for _ in range(2))
    q, k, v = (
        torch.stack([x[which][length:] for x, length in zip(layers, lengths, strict=True)]) for which in range(3)
    )
    out, lse, info = many.decode(q, k, v, return_lse=True, return_info=True)
    for t in range(n):
        out_t, lse_t, info_t = single.decode(q[:, t], k[:, t], v[:, t], return_lse=True, return_info=True)
        assert_same_bytes(out[:, t], out_t, f"token {t}: out")
        assert_same_bytes(lse[:, :, t], lse_t, f"token {t}: lse")
        for name, value in info.items():
            assert_same_bytes(value[:, t], info_t[name], f"token {t}: {name}")
    assert many.lengths == single.lengths == [length + n for length in lengths]
    for a, b in zip(used_bytes(many), used_bytes(single), strict=True):
        assert_same_bytes(a, b, "cache")


def test_ragged_drafts():
    """Requests with fewer tokens than the call: as if they came alone; what is padding may hold NaN."""
    lengths, tokens = [100, 0, 64, 255], [3, 0, 5, 1]
    layers = [layer(length + 5, seed=length) for length in lengths]
    q, k, v = (torch.stack([x[which][n : n + 5] for x, n in zip(layers, lengths, strict=True)]) for which in range(3))
    for b, n in enumerate(tokens):
        for x in (q, k, v):
            x[b, n:] = torch.nan
    cache = fresh(lengths, layers)
    out, lse = cache.decode(q, k, v, q_lens=torch.tensor(tokens, dtype=torch.int32), return_lse=True)
    assert cache.lengths == [103, 0, 69, 256]
    for b, n in enumerate(tokens):
        assert torch.equal(out[b, n:], torch.zeros_like(out[b, n:]))
        assert bool((lse[b, :, n:] == -torch.inf).all())
        if n:
            alone = fresh([lengths[b]], [layers[b]])
            assert_same_bytes(alone.decode(q[b : b + 1, :n], k[b : b + 1, :n], v[b : b + 1, :n])[0], out[b, :n])


@pytest.mark.parametrize("bits", [16, (8, 4)])
def test_chunked_prefill_gives_the_same_cache(bits):
    """sglang#28063: 5000 tokens in chunks of 1, 7, 64, 1000, 4096, 5000: the same cache bytes."""
    q, k, v = layer(5000, 2, 1)
    whole = fresh([5000], [(q, k, v)], bits=bits)
    for chunk in (1, 7, 64, 1000, 4096):
        cache = FoldKVCache(1, 2, 1, 64, 6000, bits=bits)
        for at in range(0, 5000, chunk):
            n = min(chunk, 5000 - at)
            cache.write_prompt(k[at : at + n], v[at : at + n], starts([n]))
        assert_same_bytes(used_bytes(cache)[0], used_bytes(whole)[0], f"chunks of {chunk}")


def test_ragged_prompts_written_together_equal_written_alone():
    lengths = [0, 1, 63, 64, 65, 257, 1024, 0, 509]
    layers = [layer(max(n, 1), seed=n) for n in lengths]
    together = fresh(lengths, layers)
    for n, x, pages in zip(lengths, layers, used_bytes(together), strict=True):
        assert_same_bytes(used_bytes(fresh([n], [x]))[0], pages, f"{n} keys")


def test_truncated_and_written_again_is_as_if_never_longer():
    """Rejected drafts leave no trace in what is read: outputs equal those of a cache that never held them."""
    q, k, v = layer(1500)
    other = layer(200, seed=7)
    for keep in (1, 63, 64, 65, 255, 256, 1000, 1023, 1024):
        plain = filled([1500], [(q, k, v)], depth=10.0)
        cache = poisoned(1, 1500, depth=10.0)
        cache.append(k[None, :keep], v[None, :keep])
        cache.append(other[1][None], other[2][None])
        cache.truncate(keep)
        cache.append(k[None, keep:], v[None, keep:])
        assert_same_bytes(cache.attend(q[None, -3:]), plain.attend(q[None, -3:]), f"kept {keep}")


@pytest.mark.parametrize("depth", [None, 12.0])
def test_shared_prefix_equals_undivided(depth):
    """vllm#26130, #45667: a prefix of 4096 shared by 64 requests with suffixes of 0 to 100 tokens: byte-equal to
    requests that store it themselves."""
    q, k, v = layer(4096, 2, 1)
    suffixes = [layer(100, 2, 1, seed=i + 1) for i in range(64)]
    lengths = [(i * 100) // 63 for i in range(64)]
    shared = FoldKVCache(1, 2, 1, 64, 4300, num_pages=16 + 64 * 2, depth=depth)
    shared.append(k[None], v[None])
    prefix = shared.requests[0]
    forks = [shared.fork(prefix) for _ in range(64)]
    assert shared.free_pages == 64 * 2, "a fork holds no page of its own"
    keys, values = (torch.cat([x[i][:n] for x, n in zip(suffixes, lengths, strict=True)]) for i in (1, 2))
    shared.write_prompt(keys, values, starts(lengths), forks)
    queries = torch.stack([x[0][0] for x in suffixes])
    out, lse = shared.attend(queries, ids=forks, return_lse=True)
    for i, (_, ks, vs) in enumerate(suffixes):
        alone = FoldKVCache(1, 2, 1, 64, 4300, depth=depth)
        alone.append(torch.cat([k, ks[: lengths[i]]])[None], torch.cat([v, vs[: lengths[i]]])[None])
        expected = alone.attend(queries[i : i + 1], return_lse=True)
        assert_same_bytes(expected[0][0], out[i], f"request {i}")
        assert_same_bytes(expected[1][0], lse[i], f"lse of request {i}")
    assert_same_bytes(used_bytes(shared)[0], used_bytes(fresh([4096], [(q, k, v)]))[0], "the prefix was not written to")


@pytest.mark.parametrize("cut", [1, 63, 64, 100, 255, 256, 257, 300])
def test_fork_inside_a_page_copies_before_it_writes(cut):
    """A fork cut anywhere, both sides growing: each equals a cache of its own."""
    q, k, v = layer(400)
    _, k2, v2 = layer(400, seed=9)
    cache = FoldKVCache(1, 4, 2, 64, 700, num_pages=8, depth=11.0)
    cache.append(k[None, :300], v[None, :300])
    parent = cache.requests[0]
    child = cache.fork(parent, cut)
    both = torch.stack([k[300:400], k2[:100]]), torch.stack([v[300:400], v2[:100]])
    cache.append(*both)
    rows = q[None, -2:]
    for request, keys, values in (
        (parent, k, v),
        (child, torch.cat([k[:cut], k2[:100]]), torch.cat([v[:cut], v2[:100]])),
    ):
        alone = FoldKVCache(1, 4, 2, 64, 700, depth=11.0)
        alone.append(keys[None], values[None])
        assert_same_bytes(alone.attend(rows), cache.attend(rows, ids=[request]), f"cut at {cut}")


def tree_of(nodes: int, seed: int):
    """Parents (nodes,) of a random forest and its mask (nodes, nodes)."""
    g = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(-1, i, (1,), generator=g)) if i else -1 for i in range(nodes)]
    mask = torch.eye(nodes, dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
    return torch.tensor(parents), mask


TREES = [(1, 0), (2, 1), (7, 2), (13, 3), (64, 4)]


@pytest.mark.parametrize("prefix", [0, 1, 62, 64, 250, 1020])
@pytest.mark.parametrize(("nodes", "seed"), TREES)
def test_tree_equals_its_paths(nodes, seed, prefix):
    """A node's row has the bits it would have at the end of a chain that holds its path alone."""
    parents, mask = tree_of(nodes, seed)
    q, k, v = layer(prefix + nodes, seed=seed)
    cache = filled([prefix], [(q, k, v)], nodes, depth=11.0)
    draft = q[None, prefix:], k[None, prefix:], v[None, prefix:]
    out, lse, info = cache.decode(*draft, tree=mask[None], return_lse=True, return_info=True)
    for node in range(nodes):
        path = prefix + mask[node].nonzero()[:, 0]
        chain = poisoned(1, prefix + nodes, depth=11.0)
        chain.append(torch.cat([k[:prefix], k[path]])[None], torch.cat([v[:prefix], v[path]])[None])
        expected, expected_lse, expected_info = chain.attend(q[None, prefix + node], return_lse=True, return_info=True)
        assert_same_bytes(out[:, node], expected, f"node {node}")
        assert_same_bytes(lse[:, :, node], expected_lse, f"lse of node {node}")
        for name in ("kept_fraction", "dropped_mass", "recomputed"):
            assert_same_bytes(info[name][:, node], expected_info[name], f"{name} of node {node}")
    cache.truncate(prefix)
    assert_same_bytes(out, cache.decode(*draft, tree=parents), "the same tree as parents")


@pytest.mark.parametrize(("nodes", "seed"), TREES)
def test_tree_equals_sdpas_mask(nodes, seed):
    """FA#924, FI#3585: against torch's attention with the tree as its mask, in fp64."""
    _, mask = tree_of(nodes, seed)
    prefix = 150
    q, k, v = layer(prefix + nodes, seed=seed)
    cache = filled([prefix], [(q, k, v)], nodes)
    out = cache.decode(q[None, prefix:], k[None, prefix:], v[None, prefix:], tree=mask)[0]
    full = torch.cat([torch.ones(nodes, prefix, dtype=torch.bool), mask], 1)

    def masked(dtype):
        rows, keys, values = (x.to(dtype).transpose(0, 1)[None] for x in (q[prefix:], k, v))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        result = sdpa(rows, keys, values, attn_mask=full, enable_gqa=True)
        return result[0].transpose(0, 1).double()

    reference = masked(torch.float64)
    assert (out - reference).norm() < (masked(torch.bfloat16) - reference).norm()


def test_chain_mask_is_no_tree():
    q, k, v = layer(300)
    chain, tree = (filled([200], [(q, k, v)], 16) for _ in range(2))
    rows = q[None, 200:216], k[None, 200:216], v[None, 200:216]
    lower = torch.ones(16, 16, dtype=torch.bool).tril()
    assert_same_bytes(chain.decode(*rows), tree.decode(*rows, tree=lower), "lower triangle")
    chain.truncate(200)
    assert_same_bytes(tree.attend(rows[0]), chain.decode(*rows, tree=torch.arange(-1, 15)), "parents")


@pytest.mark.parametrize("window", [(-1, -1), (200, 0)])
def test_prefill_in_chunks_is_attention(window):
    """A later chunk attends to the cached keys too: within the error of a bf16 implementation on 16-bit planes."""
    lengths = [300, 0, 517]
    layers = [layer(max(n, 1), seed=n) for n in lengths]
    sinks = torch.randn(4)
    cache = poisoned(3, 520, window_size=window, sinks=sinks)
    chunks: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {n: [] for n in lengths}
    at = [0, 0, 0]
    for sizes in ([64, 0, 1], [1, 0, 255], [235, 0, 0], [0, 0, 261]):
        parts = [[x[i][a : a + n] for x, a, n in zip(layers, at, sizes, strict=True)] for i in range(3)]
        q, k, v = map(torch.cat, parts)
        out, lse = cache.prefill(q, k, v, starts(sizes), return_lse=True)
        for n, a, b in zip(lengths, starts(sizes)[:-1], starts(sizes)[1:], strict=True):
            chunks[n].append((out[a:b], lse[:, a:b]))
        at = [a + n for a, n in zip(at, sizes, strict=True)]
    assert cache.lengths == lengths
    for n, (q, k, v) in zip(lengths, layers, strict=True):
        out = torch.cat([c[0] for c in chunks[n]])
        if n:
            reference, lse = exact(q, k, v, window=window, sinks=sinks)
            assert (out - reference).norm() < bf16_error(q, k, v, reference, window=window, sinks=sinks)
            # Within the reach of a logit's own error.
            assert (torch.cat([c[1] for c in chunks[n]], 1) - lse).abs().max() < 1e-3
