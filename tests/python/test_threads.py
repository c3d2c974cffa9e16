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


def test_what_torch_does_with_denormals_changes_no_bit():
    """torch.set_flush_denormal is a thread's own, and the library's other threads know nothing of it."""
    q, k, v = (scale * rows for scale, rows in zip((8, 8, 1e-37), layer(200), strict=True))
    before = fold_attention.get_num_threads()

    def results(threads: int, flush: bool) -> list[torch.Tensor]:
        fold_attention.set_num_threads(threads)
        cache = FoldKVCache(1, 4, 2, 64, 200, depth=9)
        queries, keys, values = (rows[None].clone().requires_grad_() for rows in (q, k, v))
        torch.set_flush_denormal(flush)
        try:
            cache.append(k[None], v[None])
            decoded = cache.attend(q[-1:])
            out = fold_attn_func(queries, keys, values, causal=True)
            out.backward(torch.full_like(out, 1e-3))
        finally:
            torch.set_flush_denormal(False)
        gradients = [rows.grad for rows in (queries, keys, values) if rows.grad is not None]
        return [decoded, cache.storage, out.detach(), *gradients]

    try:
        expected = results(1, flush=False)
        for threads, flush in ((1, True), (2, True), (2, False)):
            for ours, theirs in zip(results(threads, flush), expected, strict=True):
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    finally:
        fold_attention.set_num_threads(before)
