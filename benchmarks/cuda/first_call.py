"""What the first use of the library costs beyond CUDA's own start: `python benchmarks/cuda/first_call.py`.

In this process, in order: torch is imported and computes a gradient, which starts CUDA; fold_attention is imported; the
first cache is made, takes a prompt and decodes a step; then the same once more, with everything loaded. The difference
of the last two is what loading the library and its kernels costs. Then the same for attention over a sequence and its
gradient.
"""

import time

import torch


def seconds_until_done(start: float) -> float:
    torch.cuda.synchronize()
    return time.perf_counter() - start


def first_use() -> float:
    from fold_attention import FoldKVCache

    torch.cuda.synchronize()
    start = time.perf_counter()
    cache = FoldKVCache(1, 32, 8, 128, 4096, depth=12, device="cuda")
    k = torch.randn(1, 1000, 8, 128, dtype=torch.bfloat16, device="cuda")
    cache.write_prompt(k, k)
    cache.decode(torch.randn(1, 32, 128, dtype=torch.bfloat16, device="cuda"), k[:, 0], k[:, 0])
    return seconds_until_done(start)


def attention() -> float:
    from fold_attention import fold_attn_func

    q = torch.randn(1, 1024, 8, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = fold_attn_func(q, q, q, causal=True)
    out.backward(out.detach())
    return seconds_until_done(start)


def main() -> None:
    start = time.perf_counter()
    # What the first use asks of torch itself, whose first backward imports a large part of it.
    x = torch.randn(8, 8, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    (x * x).backward(x.detach())
    cuda = seconds_until_done(start)
    start = time.perf_counter()
    import fold_attention  # noqa: F401

    imported = time.perf_counter() - start
    first, second = first_use(), first_use()
    print(f"CUDA's own start {cuda:.3f} s; import of fold_attention {imported:.3f} s")
    print(f"first cache, prompt and step {first:.3f} s, second {second:.4f} s: {first - second:.3f} s to load")
    first, second = attention(), attention()
    print(f"first attention and gradient {first:.3f} s, second {second:.4f} s: {first - second:.3f} s to load")


if __name__ == "__main__":
    main()
