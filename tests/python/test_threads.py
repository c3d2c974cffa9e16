"""The number of threads is the library's own: calls leave torch's as it was."""

import torch
from cache_testing import layer

import fold_attention
from fold_attention import FoldKVCache, fold_attn_func


def test_calls_leave_the_threads_of_torch_alone():
    before = torch.get_num_threads()
    q, k, v = layer(70)
    try:
        for torch_threads, own in ((1, 2), (3, 1)):
            torch.set_num_threads(torch_threads)
            fold_attention.set_num_threads(own)
            cache = FoldKVCache(1, 4, 2, 64, 70)
            cache.append(k[None], v[None])
            cache.attend(q[-1:])
            fold_attn_func(q[None], k[None], v[None])
            assert torch.get_num_threads() == torch_threads
            assert fold_attention.get_num_threads() == own
    finally:
        torch.set_num_threads(before)
