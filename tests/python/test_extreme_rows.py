"""Rows that spread over very many keys, values of very different size, values read from plane h alone: judged against
fp64 and against what a bf16 implementation makes of the same inputs."""

import math

import pytest
import torch
from cache_testing import bf16_error, exact, filled
from torch import Tensor

from fold_attention import FoldKVCache

D = 64


def rows(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """k and v (n, 1, D)."""
    g = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, n, 1, D, generator=g).bfloat16().float()
    return k, v


def attend(q: Tensor, k: Tensor, v: Tensor, depth: float | None = None) -> Tensor:
    """One token q (1, 1, D) over all keys."""
    cache = filled([len(k)], [(q.expand(len(k), -1, -1), k, v)], depth=depth)
    out: Tensor = cache.attend(q)
    return out


@pytest.mark.parametrize("n", [5000, 16384, 100_003])
@pytest.mark.parametrize("same", ["query zero", "keys alike"])
def test_rows_that_spread_over_very_many_keys(n, same):
    """Every weight is tiny; depth None is still as accurate as bf16 attention."""
    k, v = rows(n, n)
    q = torch.zeros(1, 1, D)
    if same == "keys alike":
        k, q = k[:1].expand(n, -1, -1), torch.ones(1, 1, D)
    reference, _ = exact(q, k, v)
    assert (attend(q, k, v) - reference).norm() <= bf16_error(q, k, v, reference)


@pytest.mark.parametrize(("n", "scale"), [(20_011, 1.0), (100_003, 1.0), (100_003, 0.3)])
def test_rows_that_spread_over_many_different_keys(n, scale):
    """No key has a share that would be read deeply by itself; depth None is still as accurate as bf16 attention."""
    k, v = rows(n, n)
    q = (scale * torch.randn(1, 1, D, generator=torch.Generator().manual_seed(3))).bfloat16().float()
    reference, _ = exact(q, k, v)
    assert (attend(q, k, v) - reference).norm() <= bf16_error(q, k, v, reference)


def with_outlier(octaves: int) -> tuple[Tensor, Tensor, Tensor]:
    """A key that nobody attends to, whose V is 2^octaves times the others'."""
    k, v = rows(4096, 1)
    q = torch.randn(1, 1, D, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    k[2000] = -q[0] * 8
    v[2000] *= 2.0**octaves
    return q, k, v


@pytest.mark.parametrize("octaves", [4, 10, 16, 30, 60])
def test_one_key_with_a_huge_value(octaves):
    q, k, v = with_outlier(octaves)
    reference, _ = exact(q, k, v)
    assert (attend(q, k, v) - reference).norm() <= bf16_error(q, k, v, reference)


@pytest.mark.parametrize("octaves", [4, 10, 16, 30, 60])
@pytest.mark.parametrize("depth", [8.0, 12.0])
def test_the_tail_model_with_a_huge_value(depth, octaves):
    """Neither the mean of its block nor the fit lets the outlier speak for the dropped keys."""
    errors = []
    for size in (0, octaves):
        q, k, v = with_outlier(size)
        reference, _ = exact(q, k, v)
        errors.append(float((attend(q, k, v, depth=depth) - reference).norm() / reference.norm()))
    assert errors[1] <= 1.25 * errors[0]


@pytest.mark.parametrize("octaves", [2, 6, 9, 11, 14])
def test_a_key_of_tiny_value_that_holds_nearly_everything(octaves):
    """As attention sinks do. The other keys share 2^-12 of the mass, so only their planes h are read, but none of them
    vanishes: the error is at most that of rounding their V to 4 bits, or a bf16 implementation's."""
    n = 16384
    k, v = rows(n, 5)
    q = torch.ones(1, 1, D)
    k *= 0.02
    k[0] = (12 + 14) * math.log(2) * 8 / D
    v[0] *= 2.0**-octaves
    reference, _ = exact(q, k, v)
    coarse = FoldKVCache(1, 1, 1, D, n, bits=(16, 4))
    coarse.append(k[None], v[None])
    _, readings = coarse.read()
    readings[0] = v[0]
    rounded, _ = exact(q, k, readings)
    allowed = max(1.25 * (rounded - reference).norm(), bf16_error(q, k, v, reference))
    assert (attend(q, k, v) - reference).norm() <= allowed


def test_a_huge_value_that_is_attended_to():
    """The output is that key's, to the rounding of a bf16 output."""
    q, k, v = with_outlier(40)
    k[2000] = q[0] * 3
    reference, _ = exact(q, k, v)
    assert (attend(q, k, v, depth=12.0) - reference).norm() <= reference.norm() * 2**-9


def test_readings_of_one_plane_have_no_bias():
    """The mean of many values read from plane h alone errs like the mean of independent roundings."""
    n = 16384
    k, v = rows(n, 3)
    q = torch.zeros(1, 1, D)
    cache = FoldKVCache(1, 1, 1, D, n, bits=(16, 4))
    cache.append(k[None], v[None])
    _, values = cache.read()
    rounding = (values[:, 0] - v[:, 0]).norm() / (n * D) ** 0.5  # of one channel of one value
    error = (cache.attend(q) - v.mean(0)).norm() / D**0.5
    assert error <= 3 * rounding / n**0.5


def test_coarse_logits_have_no_bias():
    """The same for K, along a query that has the same value in every rotated channel, where a bias would add up."""
    n = 16384
    k, v = rows(n, 4)
    q = torch.zeros(1, 1, D)
    q[..., 0] = 8.0
    cache = FoldKVCache(1, 1, 1, D, n, bits=(4, 16))
    cache.append(k[None], v[None])
    keys, _ = cache.read()
    shift = (keys[:, 0] - k[:, 0]) @ q[0, 0] / D**0.5  # of each logit
    assert abs(shift.mean()) <= 3 * shift.std() / n**0.5
    _, lse = cache.attend(q, return_lse=True)
    _, expected = exact(q, keys, v)
    largest = (keys[:, 0] @ q[0, 0] / D**0.5).abs().max()
    assert abs(float(lse) - float(expected)) <= largest / 254  # a plane of the query has 127 steps
