"""7. Draft tokens and shared prefixes: the same bits as one token and one request at a time.

A row's bits depend on its own keys, query and options alone. So tokens may be verified together, requests may share
what they have in common, and prompts may come in chunks, without any change to a result.
"""

import torch

from fold_attention import FoldKVCache, add_partials, finish, partial_attention

torch.manual_seed(0)
HEADS, KV_HEADS, DIM, PROMPT, DRAFT = 8, 2, 64, 1000, 5
q = torch.randn(PROMPT + DRAFT, HEADS, DIM, dtype=torch.bfloat16) * 2
k = torch.randn(PROMPT + DRAFT, KV_HEADS, DIM, dtype=torch.bfloat16)
v = torch.randn(PROMPT + DRAFT, KV_HEADS, DIM, dtype=torch.bfloat16)


def new_cache() -> FoldKVCache:
    """One request that holds the prompt."""
    cache = FoldKVCache(1, HEADS, KV_HEADS, DIM, max_len=2048, depth=12, device="cpu")
    cache.append(k[None, :PROMPT], v[None, :PROMPT])
    return cache


# One token at a time, as without drafts.
cache = new_cache()
steps = [cache.decode(q[i][None], k[i][None], v[i][None]) for i in range(PROMPT, PROMPT + DRAFT)]
one_by_one = torch.stack(steps, dim=1)  # (1, DRAFT, HEADS, DIM)

# A chain of draft tokens, verified in one call.
cache = new_cache()
drafts = slice(PROMPT, PROMPT + DRAFT)
together = cache.decode(q[None, drafts], k[None, drafts], v[None, drafts])
print(f"{DRAFT} draft tokens in one call, as {DRAFT} steps: {torch.equal(together, one_by_one)}")
assert torch.equal(together, one_by_one)

# The model accepts two of them: the others are forgotten, and other tokens take their place.
cache.truncate(PROMPT + 2)
again = cache.decode(q[None, PROMPT + 2], k[None, PROMPT + 2], v[None, PROMPT + 2])
assert cache.lengths == [PROMPT + 3]
assert torch.equal(again, one_by_one[:, 2])
print("after rejected drafts: the same bits as if they had never been there")

# A draft tree, given by its nodes' parents: 0 -> 1 -> 2, and 3 and 4 as other continuations of 0.
cache = new_cache()
parents = torch.tensor([-1, 0, 1, 0, 0])
tree = cache.decode(q[None, drafts], k[None, drafts], v[None, drafts], tree=parents)
cache = new_cache()
path = [PROMPT, PROMPT + 4]  # node 4 sees node 0 and itself
last = [cache.decode(q[i][None], k[i][None], v[i][None]) for i in path][-1]
assert torch.equal(tree[:, :3], one_by_one[:, :3])
assert torch.equal(tree[:, 4], last)
print("a tree of drafts: each node as at the end of its own path")

# A prefix shared by three requests is stored once: forks share pages, and copy the last one when they write to it.
cache = FoldKVCache(1, HEADS, KV_HEADS, DIM, max_len=2048, depth=12, num_pages=16, device="cpu")
cache.append(k[None, :PROMPT], v[None, :PROMPT])
alone = cache.num_pages - cache.free_pages
children = [cache.fork(cache.requests[0]), cache.fork(cache.requests[0])]
shared = cache.decode(*(x[PROMPT].expand(2, -1, -1) for x in (q, k, v)), ids=children)
print(f"three requests on {cache.num_pages - cache.free_pages} pages; one alone has {alone}")
assert cache.num_pages - cache.free_pages == alone + len(children)
assert all(torch.equal(row, one_by_one[0, 0]) for row in shared)

# A prompt in uneven chunks leaves the same bytes.
chunked = FoldKVCache(1, HEADS, KV_HEADS, DIM, max_len=2048, depth=12, device="cpu")
for start, stop in ((0, 1), (1, 700), (700, PROMPT)):
    chunked.append(k[None, start:stop], v[None, start:stop])
assert torch.equal(chunked.storage, new_cache().storage)
print("a prompt in 3 chunks: the same cache bytes")

# Parts of the keys, summed apart (on other machines, say), add to the bits of the whole.
cache = new_cache()
row = q[PROMPT - 1][None]
parts = [partial_attention(row, cache, begin, end) for begin, end in ((0, 256), (256, 640), (640, 2048))]
out, lse, valid = finish(add_partials(parts[2], parts[0], parts[1]))
assert valid.all()
assert torch.equal(out[:, 0], cache.attend(row, out_dtype=torch.float32))
print("three partial sums, added out of order: the same bits as one call")
