"""1. Softmax attention as it is usually computed, and what its maximum costs.

    o = sum_j 2^s_j v_j / sum_j 2^s_j          s_j: base-2 logits, log2(e) * scale * q . k_j

Nothing here uses the library: NumPy only.
"""

import numpy as np
from made_up import Array, head

logits, _, values = head()
logits += 150  # a head with large logits
s, v = logits.astype(np.float32), values.astype(np.float32)
exact = np.exp2(s.astype(np.float64) - 150) @ v.astype(np.float64) / np.exp2(s.astype(np.float64) - 150).sum()
SOME_ROUNDINGS = 8 * np.finfo(np.float32).eps


def error(out: Array) -> float:
    return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))


# As written, 2^s overflows fp32 (its largest number is just under 2^128).
with np.errstate(over="ignore", invalid="ignore"):
    naive = np.exp2(s) @ v / np.exp2(s).sum()
print(f"as written:          2^{s.max():.0f} overflows; output {naive[0]}")
assert not np.isfinite(naive).any()

# Subtracting one number from all logits changes nothing, so the maximum is subtracted. It takes a pass to find it.
weights = np.exp2(s - s.max())
two_passes = weights @ v / weights.sum()
print(f"minus the maximum:   error {error(two_passes):.1e}, in two passes over the keys")
assert error(two_passes) < SOME_ROUNDINGS


def online(keys: Array, tile: int = 64):
    """FlashAttention's way, one pass: whenever a larger logit turns up, all that was summed is rescaled."""
    top, total, summed, rescaled = np.float32(-np.inf), np.float32(0), np.zeros(v.shape[1], np.float32), 0
    for i in range(0, len(keys), tile):
        tile_s, tile_v = s[keys[i : i + tile]], v[keys[i : i + tile]]
        new = max(top, tile_s.max())
        shrink, w = np.exp2(top - new), np.exp2(tile_s - new)
        rescaled += int(new > top)
        total, summed, top = total * shrink + w.sum(), summed * shrink + w @ tile_v, new
    return top, total, summed, rescaled


def merge(parts):
    """Partial results speak of different maxima, so they meet through another rescale."""
    top = max(part[0] for part in parts)
    total = sum(part[1] * np.exp2(part[0] - top) for part in parts)
    return sum(part[2] * np.exp2(part[0] - top) for part in parts) / total


everything = np.arange(len(s))
one = online(everything)
print(f"a running maximum:   error {error(merge([one])):.1e}, in one pass, rescaled {one[3]} times")
assert error(merge([one])) < SOME_ROUNDINGS
assert one[3] > 1

# Split over 2, 3, 5 workers: the same number up to rounding, but not the same bits.
outs = [merge([online(part) for part in np.array_split(everything, n)]) for n in (1, 2, 3, 5)]
different = len({out.tobytes() for out in outs})
print(f"1, 2, 3 or 5 splits: {different} different results, bit for bit, of 4")
assert different > 1
assert all(error(out) < SOME_ROUNDINGS for out in outs)
