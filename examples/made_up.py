"""The made-up attention head that examples 01 to 05 look at: one query, its keys and values."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def head(keys: int = 4096, dim: int = 64, seed: int = 0) -> tuple[Array, Array, Array]:
    """The query's base-2 logits (keys,), the keys and the values (keys, dim); float64.

    As in trained models, a few keys hold much of the mass, key 0 among them, neighbours resemble each other, and a
    value is partly predictable from its key.
    """
    random = np.random.default_rng(seed)
    q = random.standard_normal(dim) / 4
    topic = np.repeat(random.standard_normal((keys // 64, dim)), 64, axis=0)  # one for every 64 keys
    k = random.standard_normal((keys, dim)) + 0.5 * topic
    k[[0, keys // 3, keys - 20]] += 2.5 * q  # keys that this query looks for
    v = 0.5 * k @ random.standard_normal((dim, dim)) / np.sqrt(dim) + 0.5 * random.standard_normal((keys, dim)) + topic
    return k @ q * np.log2(np.e), k, v
