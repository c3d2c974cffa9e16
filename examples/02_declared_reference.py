"""2. The reference can be declared before a key is read.

    o = sum_j 2^(s_j - Z) v_j / sum_j 2^(s_j - Z)

is the same for any Z: the maximum is one choice, no more. FoldAttention estimates the row's whole mass from a sample
of keys and declares that. A weight 2^(s_j - Z) is then final when it is formed, and is (about) the key's share.
"""

import numpy as np
from made_up import Array, head

logits, _, values = head()
mass = np.log2(np.exp2(logits).sum())  # the true log2 of the row's mass
exact = np.exp2(logits - mass) @ values
s, v = logits.astype(np.float32), values.astype(np.float32)
SOME_ROUNDINGS = 8 * np.finfo(np.float32).eps


def sampled_reference(s: Array) -> float:
    """log2 of the mass: key 0, the newest 63 keys and the 4 largest of 128 samples are counted as they are, the mean
    of the other samples stands for every key that was not looked at."""
    rest = len(s) - 64
    samples = np.sort(s[1 + (2 * np.arange(128) + 1) * rest // 256])
    counted = np.concatenate([s[:1], s[-63:], samples[-4:]])
    return float(np.log2(np.exp2(counted).sum() + np.exp2(samples[:-4]).mean() * (rest - 4)))


def attention(z: float) -> tuple[Array, np.float32]:
    """One pass in fp32; also the denominator t = 2^(mass - Z)."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        w = np.exp2(s - np.float32(z))
        return w @ v / w.sum(), w.sum()


def error(out: Array) -> float:
    return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))


z = sampled_reference(logits)
print(f"log2 of the row's mass {mass:.2f}; declared from 192 of {len(s)} keys: Z = {z:.2f}")
assert abs(z - mass) < 1

print("what is declared      denominator t    error")
for shift in (0, -5, 1, 100, -300, 300):
    out, t = attention(z + shift)
    safe = bool(0.25 <= t < 64)
    verdict = "in the safe range" if safe else "out of it"
    print(f"Z {shift:+4d}                {t:9.1e}        {error(out):.1e}   {verdict}")
    if safe:
        assert error(out) < SOME_ROUNDINGS

# A wrong reference is never silent: t says how wrong it was, and the row is computed again with a reference that holds.
for shift in (-300, 300):
    _, t = attention(z + shift)
    assert not 0.25 <= t < 64
    out, t = attention(mass)
    assert 0.5 <= t < 2
    assert error(out) < SOME_ROUNDINGS
print(
    "a row whose t is outside [1/4, 64), or [1/2, 64) if it spreads over many keys, is computed again, from what t says"
)
