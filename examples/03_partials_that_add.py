"""3. With a declared reference, partial results add.

Every part of the keys gives a numerator and a denominator in the same unit, 2^Z. Nothing is rescaled: tiles, splits,
prefixes shared with other requests or parts of a cache on other machines meet by addition.
"""

import numpy as np
from made_up import Array, head

logits, _, values = head()
z = np.float32(np.log2(np.exp2(logits).sum()) + 0.37)  # declared; needs to be near, not exact
exact = np.exp2(logits) @ values / np.exp2(logits).sum()
s, v = logits.astype(np.float32), values.astype(np.float32)
SOME_ROUNDINGS = 8 * np.finfo(np.float32).eps


def partial(keys: Array) -> tuple[Array, np.float32]:
    w = np.exp2(s[keys] - z)
    return w @ v[keys], w.sum()


def total(parts: list[Array]) -> Array:
    numerator, denominator = np.zeros(v.shape[1], np.float32), np.float32(0)
    for keys in parts:
        n, d = partial(keys)
        numerator, denominator = numerator + n, denominator + d
    return numerator / denominator


everything = np.arange(len(s))
random = np.random.default_rng(1)
schedules = {
    "all keys at once": [everything],
    "64-key tiles": np.split(everything, 64),
    "64-key tiles, last first": np.split(everything, 64)[::-1],
    "5 splits": np.array_split(everything, 5),
    "a prefix of 3000 and the rest": [everything[:3000], everything[3000:]],
    "keys dealt out at random": np.split(random.permutation(everything), 64),
}
outs = {name: total(parts) for name, parts in schedules.items()}
for name, out in outs.items():
    e = np.linalg.norm(out - exact) / np.linalg.norm(exact)
    print(f"{name:30} error {e:.1e}   first bytes {out.tobytes()[:8].hex()}")
    assert e < SOME_ROUNDINGS

# In real numbers these are equal. In fp32 each addition rounds, so the order still shows in the last bits.
different = len({out.tobytes() for out in outs.values()})
print(f"{different} different results, bit for bit, of {len(outs)}: what is left to remove is rounding (example 4)")
assert different > 1
