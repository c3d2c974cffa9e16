"""Any sequence of calls on a cache leaves each request with the outputs of a cache of its own."""

import torch
from attention_reference import assert_same_bytes
from cache_testing import layer, poisoned
from hypothesis import given
from hypothesis import strategies as st

from fold_attention import FoldKVCache

CALL = st.tuples(st.sampled_from(["append", "fork", "truncate", "free", "add"]), st.integers(0, 7), st.integers(0, 400))
LAYER = layer(4096, 2, 1)


@given(
    calls=st.lists(CALL, min_size=1, max_size=12),
    page_size=st.sampled_from([64, 128, 256]),
    depth=st.sampled_from([None, 8.0]),
    bits=st.sampled_from([16, 8, (16, 4)]),
)
def test_any_sequence_of_calls(calls, page_size, depth, bits):
    options = {"page_size": page_size, "bits": bits, "depth": depth}
    cache = poisoned(1, 2000, 2, 1, num_pages=200, **options)
    held = {cache.requests[0]: torch.zeros(0, dtype=torch.long)}  # each request's keys, as rows of the layer
    written = 0
    for name, which, size in calls:
        ids = cache.requests
        request = ids[which % len(ids)] if ids else None
        if name == "add" or request is None:
            held[cache.add_request()] = torch.zeros(0, dtype=torch.long)
        elif name == "append":
            size = min(size, 2000 - len(held[request]))
            rows = (written + torch.arange(size)) % 4096
            cache.append(LAYER[1][rows][None], LAYER[2][rows][None], [request])
            held[request] = torch.cat([held[request], rows])
            written += size
        elif name == "fork":
            length = size % (len(held[request]) + 1)
            held[cache.fork(request, length)] = held[request][:length]
        elif name == "truncate":
            held[request] = held[request][: size % (len(held[request]) + 1)]
            cache.truncate([len(held[request])], [request])
        else:
            cache.free_request(request)
            del held[request]
    assert cache.requests == sorted(held)
    assert cache.lengths == [len(held[r]) for r in cache.requests]
    q = LAYER[0][: len(held)]
    out, lse = cache.attend(q, return_lse=True)
    for i, rows in enumerate(held[r] for r in cache.requests):
        alone = FoldKVCache(1, 2, 1, 64, 2000, **options)
        alone.append(LAYER[1][rows][None], LAYER[2][rows][None])
        expected, expected_lse = alone.attend(q[i : i + 1], return_lse=True)
        assert_same_bytes(out[i], expected[0])
        assert_same_bytes(lse[i], expected_lse[0])
