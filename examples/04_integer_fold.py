"""4. The integer fold: weights are rounded once, and nothing after that rounds again.

A weight 2^(s - Z) lies between 0 and about 1, because Z was declared. So it can be rounded to fixed point. Values are
stored as integers with a scale per row. Then numerator and denominator are integers, and integer addition gives the
same bits in any order.
"""

import numpy as np
from made_up import Array, head

logits, _, values = head()
mass = np.log2(np.exp2(logits).sum())
z = mass - 2.3  # declared, and too low: weights reach 2^2.3
exact = np.exp2(logits - mass) @ values

# Values: v ~ scale * code / 256, code a 16-bit integer (docs/cache-format.md has the real format).
scale = np.abs(values).max(axis=1) / 127
codes = np.rint(values / scale[:, None] * 256).astype(np.int64)
unit = 2.0 ** np.ceil(np.log2(scale.max()))  # E: a power of two that no scale exceeds

# Weights: 26 fraction bits, in 32 unsigned bits, so there is room up to 2^6. The value's scale is folded in.
share = np.exp2(logits - z)
d = np.rint(share * 2**26).astype(np.int64)
w = np.rint(share * (scale / unit) * 2**26).astype(np.int64)
assert d.max() < 2**32


def total(parts: list[Array]) -> tuple[Array, np.int64]:
    numerator, denominator = np.zeros(values.shape[1], np.int64), np.int64(0)
    for keys in parts:
        numerator, denominator = numerator + w[keys] @ codes[keys], denominator + d[keys].sum()
    return numerator, denominator


def finish(numerator: Array, denominator: np.int64) -> Array:
    return numerator / denominator * (unit / 256)  # the one division, after everything has been added


everything = np.arange(len(logits))
random = np.random.default_rng(1)
schedules = [[everything], np.split(everything, 64), np.split(everything, 64)[::-1], np.array_split(everything, 5)]
schedules += [np.array_split(random.permutation(everything), n) for n in (1, 2, 7, 64, 1000)]
outs = [finish(*total(parts)) for parts in schedules]

# No sum can overflow: |numerator| <= 2^15 * sum(w), and the denominator's safe range keeps sum(w) below 2^32.
assert 2**15 * int(w.sum()) < 2**63
errors = [np.linalg.norm(out - exact) / np.linalg.norm(exact) for out in outs]
print(f"{len(outs)} schedules, {len({out.tobytes() for out in outs})} result, bit for bit; error {errors[0]:.1e}")
assert len({out.tobytes() for out in outs}) == 1

# The error comes from the two roundings, of values to 16 bits and of weights to 26; a bf16 kernel rounds far coarser.
rounded = (values.astype(np.float32).view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)  # V in bf16
bf16 = np.linalg.norm(np.exp2(logits - mass) @ rounded - exact) / np.linalg.norm(exact)
print(f"V in bf16 alone, everything else exact: error {bf16:.1e}")
assert errors[0] < bf16

# What this buys: a part computed anywhere, at any time, is added as it is.
prefix, rest = total([everything[:3000]]), total([everything[3000:]])
together = finish(prefix[0] + rest[0], prefix[1] + rest[1])
print(f"a prefix summed once and shared: the same bits: {together.tobytes() == outs[0].tobytes()}")
assert together.tobytes() == outs[0].tobytes()
