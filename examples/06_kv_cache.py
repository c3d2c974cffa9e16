"""6. FoldKVCache: a prompt, some steps, and how deeply keys are read.

From here on the library does the work (torch on a CPU). Made-up queries, keys and values stand for a model's.
"""

import torch

from fold_attention import FoldKVCache, fold_attn_with_kvcache

torch.manual_seed(0)
HEADS, KV_HEADS, DIM, PROMPT, STEPS = 8, 2, 64, 2048, 4
# Keys with a few that many queries look for, as in trained models.
topic = torch.randn(1, KV_HEADS, DIM)
k = torch.randn(PROMPT + STEPS, KV_HEADS, DIM)
k[:: PROMPT // 8] += topic
v = torch.randn(PROMPT + STEPS, KV_HEADS, DIM) + k
q = 2.5 * torch.randn(PROMPT + STEPS, HEADS, DIM) + topic.repeat_interleave(HEADS // KV_HEADS, 1)
q, k, v = (x.bfloat16() for x in (q, k, v))


def exact(position: int) -> torch.Tensor:
    """What row `position` should return, (HEADS, DIM), in float64; query head h reads KV head h // 4."""
    keys, values = (x[: position + 1].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    logits = torch.einsum("hd,nhd->hn", q[position].double(), keys) / DIM**0.5
    return torch.einsum("hn,nhd->hd", logits.softmax(-1), values)


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


# One request of at most 4096 keys. Pages are 256 keys; memory is committed as they are filled.
cache = FoldKVCache(batch=1, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=DIM, max_len=4096, device="cpu")
out = cache.prefill(q[None, :PROMPT], k[None, :PROMPT], v[None, :PROMPT])  # (1, PROMPT, HEADS, DIM)
print(
    f"prefill: {cache.lengths[0]} keys, {cache.num_pages - cache.free_pages} pages, last row's error "
    f"{error(out[0, -1], exact(PROMPT - 1)):.1e} in {str(out.dtype).removeprefix('torch.')}"
)

# A decoding step appends a token's key and value, then attends. out_dtype: float32 shows more than bf16's own rounding.
for step in range(PROMPT, PROMPT + STEPS):
    out = cache.decode(q[step][None], k[step][None], v[step][None], out_dtype=torch.float32)  # (1, HEADS, DIM)
bf16 = error(exact(step).bfloat16(), exact(step))  # what rounding a perfect result to bf16 costs
print(f"decode:  {cache.lengths[0]} keys, error {error(out[0], exact(step)):.1e}; rounding to bf16 would be {bf16:.1e}")
assert error(out[0], exact(step)) < bf16

# The same step, read less deeply: values of keys whose share of the row is below about 2^-depth are left unread.
print("depth   values read   mass of the rest   cache bytes read   error")
row, reference = q[step][None], exact(step)
whole = cache.lengths[0] * KV_HEADS * DIM * 4  # bytes of K and V in bf16
errors, bytes_read = [], []
for depth in (None, 16, 12, 10):
    out, info = fold_attn_with_kvcache(row, cache, depth=depth, out_dtype=torch.float32, return_info=True)
    kept, lost = info["kept_fraction"].mean().item(), info["dropped_mass"].mean().item()
    bytes_read.append(info["bytes_read"].sum().item() / whole)
    errors.append(error(out[0], reference))
    print(f"{depth!s:5}   {kept:11.1%}   {lost:16.4f}   {bytes_read[-1]:11.2f} bf16   {errors[-1]:.1e}")
assert errors == sorted(errors)
assert bytes_read == sorted(bytes_read, reverse=True)

# Splitting the work changes no bit.
outs = [fold_attn_with_kvcache(row, cache, depth=12, splits=n) for n in (1, 2, 7)]
assert all(torch.equal(out, outs[0]) for out in outs)
print("1, 2 or 7 splits: the same bits")

# What is cached can be smaller: bits=(K, V) keeps fewer planes of each row, so that every reading is coarser.
errors = []
for bits in (16, (16, 8), 8, 4):
    small = FoldKVCache(1, HEADS, KV_HEADS, DIM, 4096, bits=bits, device="cpu")
    small.append(k[None], v[None])
    errors.append(error(small.attend(row, out_dtype=torch.float32)[0], reference))
    size = small.storage.shape[1] / (256 * KV_HEADS * DIM * 4)  # a page of 256 keys
    print(f"bits={bits!s:7}: {size:.2f} of a bf16 cache, error {errors[-1]:.1e}")
assert errors == sorted(errors)
