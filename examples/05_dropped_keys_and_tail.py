"""5. Keys that need no value, and what stands in for theirs.

A weight 2^(s - Z) is a key's share of the row. At depth d, a key whose share is below 2^-d is *dropped*: its value is
never read. Its share stays in the denominator. The tail model supplies a stand-in for the values of dropped keys: the
mean value of their 64-key block, plus a correction predicted from their keys.

The newest 64 keys and key 0 are always read. float64 throughout, to show the idea; the library does this in integers.
"""

import numpy as np
from made_up import Array, head

logits, keys, values = head()
share = np.exp2(logits) / np.exp2(logits).sum()
exact = share @ values


def block_mean(x: Array) -> Array:
    """Each row replaced by the mean of its 64-row block."""
    return np.repeat(x.reshape(-1, 64, x.shape[1]).mean(axis=1), 64, axis=0)


# The map from keys to values, by least squares on what lies around the block means, reduced to 16 directions: those
# along which the fitted values are largest.
around_k, around_v = keys - block_mean(keys), values - block_mean(values)
fitted = np.linalg.lstsq(around_k, around_v, rcond=None)[0]
directions = np.linalg.svd(around_k @ fitted, full_matrices=False)[2][:16]
correction = around_k @ fitted @ directions.T @ directions  # 16 numbers a key, from its key alone

stand_ins = {"nothing": np.zeros_like(values), "means": block_mean(values), "tail": block_mean(values) + correction}


def error(out: Array) -> float:
    return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))


print("depth   values read   mass of the rest   error: nothing in their place, block means, means and correction")
for depth in (16, 14, 12, 10, 8):
    dropped = share < 2.0**-depth
    dropped[0] = False
    dropped[-64:] = False
    errors = [error(share @ np.where(dropped[:, None], stand_in, values)) for stand_in in stand_ins.values()]
    lost = share[dropped].sum()
    print(f"{depth:5}   {1 - dropped.mean():11.1%}   {lost:16.3f}   " + "   ".join(f"{e:.1e}" for e in errors))
    assert lost < dropped.sum() * 2.0**-depth  # a depth's promise: each dropped key holds less than 2^-depth
    assert errors[2] < errors[1] < errors[0]
    # Leaving a value out while its share stays in the denominator errs by the dropped values' share, no more.
    assert errors[0] * np.linalg.norm(exact) <= (share[dropped] @ np.linalg.norm(values[dropped], axis=1)) * (1 + 1e-9)
