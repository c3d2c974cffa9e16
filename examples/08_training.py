"""8. Training: gradients that are the same bits, alone or packed, for any number of threads.

`fold_attn_func` and `fold_attn_varlen_func` take the arguments of flash-attn's functions of those names.
"""

import torch

from fold_attention import fold_attn_func, fold_attn_varlen_func, get_num_threads, set_num_threads

torch.manual_seed(0)
HEADS, KV_HEADS, DIM, LENGTHS = 4, 2, 64, (130, 1, 257)


def leaf(tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(tokens, heads, DIM, dtype=torch.bfloat16, requires_grad=True)


total = sum(LENGTHS)
q, k, v = leaf(total, HEADS), leaf(total, KV_HEADS), leaf(total, KV_HEADS)
upstream = torch.randn(total, HEADS, DIM, dtype=torch.bfloat16)  # the gradient that comes from the rest of a model


def bits(tensors) -> list[bytes]:
    return [t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]


# Three sequences packed behind each other.
starts = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
out = fold_attn_varlen_func(q, k, v, starts, starts, max(LENGTHS), max(LENGTHS), causal=True)
packed = (out, *torch.autograd.grad(out, (q, k, v), upstream))

# The same sequences, each alone.
alone = []
for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
    rows = [x[start:stop].detach()[None].requires_grad_() for x in (q, k, v)]
    out = fold_attn_func(*rows, causal=True)
    alone.append([x[0] for x in (out, *torch.autograd.grad(out, rows, upstream[start:stop][None]))])
joined = [torch.cat(parts) for parts in zip(*alone, strict=True)]
print(f"out, dq, dk, dv of {len(LENGTHS)} sequences packed, as each alone: {bits(packed) == bits(joined)}")
assert bits(packed) == bits(joined)

# Another number of threads.
threads = get_num_threads()
set_num_threads(1 if threads > 1 else 3)
out = fold_attn_varlen_func(q, k, v, starts, starts, causal=True)
assert bits((out, *torch.autograd.grad(out, (q, k, v), upstream))) == bits(packed)
set_num_threads(threads)
print("with another number of threads: the same bits")

# How close they are: against float64, beside torch's own attention in bf16, for the last sequence.
rows = [x[-LENGTHS[-1] :].detach() for x in (q, k, v)]


def torch_gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in rows]
    heads_first = [x.transpose(0, 1)[None] for x in leaves]
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    out.backward(upstream[-LENGTHS[-1] :].to(dtype).transpose(0, 1)[None])
    return [x.grad.double() for x in leaves]


def errors(gradients, references) -> list[float]:
    return [float((g.double() - r).norm() / r.norm()) for g, r in zip(gradients, references, strict=True)]


exact = torch_gradients(torch.float64)
ours = errors([x[-LENGTHS[-1] :] for x in packed[1:]], exact)
theirs = errors(torch_gradients(torch.bfloat16), exact)
for name, mine, other in zip(("dq", "dk", "dv"), ours, theirs, strict=True):
    print(f"{name}: error {mine:.1e}, torch's bf16 attention {other:.1e}")
    assert mine < 1.05 * other

# A training step: torch.compile and autograd see an ordinary differentiable operator.
weight = torch.zeros(HEADS * DIM, requires_grad=True)
loss = (fold_attn_varlen_func(q, k, v, starts, starts, causal=True).flatten(1).float() @ (weight + 1)).square().mean()
loss.backward()
assert all(torch.isfinite(x.grad).all() for x in (q, k, v, weight))
print(f"a loss of {loss.item():.1f} and gradients for q, k, v and the rest of the model")
