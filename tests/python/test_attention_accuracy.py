"""Forward and gradients against fp64, by a factor of the error of an ordinary implementation on the same inputs."""

import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from attention_reference import assert_within, attention, error, run, visible
from hypothesis import given

import fold_attention
from fold_attention import fold_attn_func

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def factor(name, dtype):
    """Ours may have this many times the ordinary error. In fp32 both errors are those of summing in some order."""
    if dtype == torch.float32:
        return 2.0
    return 1.1 if name in ("out", "lse") else 1.05


def fold(q, k, v, *, sinks=None, scale=None, causal=False, window=(-1, -1)):
    options = {"softmax_scale": scale, "causal": causal, "window_size": window, "return_lse": True}
    return fold_attn_func(q, k, v, sinks=sinks, **options)


def sdpa(q, k, v, *, sinks=None, scale=None, causal=False, window=(-1, -1)):
    """torch's own kernel for this type; the log-sum-exp from the written-out implementation, as torch keeps its own."""
    assert sinks is None
    mask = visible(q.shape[1], k.shape[1], causal, window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)
    with torch.no_grad():
        return out, attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale, causal=causal, window=window)[1]


def with_sinks(q, k, v, dout, sinks, **options):
    """The written-out implementation, its sink gradient taken through rowsum(dout * out) as a fused kernel takes it."""
    out, lse, dq, dk, dv, _ = run(attention, q, k, v, dout, sinks=sinks, **options)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    return out, lse, dq, dk, dv, -((sinks[None, :, None] - lse).exp() * delta).sum((0, 2))


def check_against(exact, ours, rival, dtype):
    for name, x, other, reference in zip(NAMES, ours, rival, exact, strict=False):
        assert_within(factor(name, dtype), x, other, reference, name)


def check(q, k, v, *, sinks=None, **options):
    dout = torch.randn_like(q)
    wide = [x.double() for x in (q, k, v, dout)]
    exact = run(attention, *wide, sinks=None if sinks is None else sinks.double(), **options)
    ours = run(fold, q, k, v, dout, sinks=sinks, **options)
    rival = run(sdpa, q, k, v, dout, **options) if sinks is None else with_sinks(q, k, v, dout, sinks, **options)
    check_against(exact, ours, rival, q.dtype)


def inputs(b, sq, sk, h, hk, d, dtype):
    return [torch.randn(b, s, n, d).to(dtype) for s, n in ((sq, h), (sk, hk), (sk, hk))]


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "left window": {"window": (37, 0)},
    "window": {"window": (20, 9)},
    "causal window": {"causal": True, "window": (50, 50)},
    "scale": {"causal": True, "scale": 0.31},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("sq", "sk"), [(160, 160), (61, 200), (200, 61)], ids=["square", "short q", "short k"])
def test_types_masks_and_lengths(dtype, mask, sq, sk):
    check(*inputs(2, sq, sk, 4, 2, 64, dtype), **MASKS[mask])


@pytest.mark.parametrize("head_dim", [1, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_head_dims(head_dim, dtype):
    """FA#1290, ComfyUI#7352: any head dim up to 256."""
    check(*inputs(2, 130, 130, 2, 1, head_dim, dtype), causal=True)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64])
def test_groups(group):
    """FI#996, FI#2684, FI#4316: every number of query heads per KV head."""
    check(*inputs(1, 70, 90, group, 1, 64, torch.bfloat16), causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": (127, 0)}], ids=["causal", "window"])
def test_sinks_and_their_gradient(dtype, options):
    """FA#1797, vllm#30919: one extra logit per head, in the denominator only; window 128 and GQA 8."""
    q, k, v = inputs(1, 300, 300, 16, 2, 64, dtype)
    check(q, k, v, sinks=torch.randn(16) * 3, **options)


@given(
    b=st.integers(1, 3),
    sq=st.integers(1, 130),
    sk=st.integers(1, 130),
    hk=st.integers(1, 3),
    group=st.integers(1, 4),
    d=st.integers(1, 256),
    causal=st.booleans(),
    window=st.tuples(st.integers(-1, 60), st.integers(-1, 60)),
    seed=st.integers(0, 2**31),
)
def test_any_shape_fp32(b, sq, sk, hk, group, d, causal, window, seed):
    """fp32 against the written-out implementation in bf16: a wrong key, row or head is far beyond that."""
    torch.manual_seed(seed)
    q, k, v = inputs(b, sq, sk, hk * group, hk, d, torch.float32)
    tensors = (q, k, v, torch.randn_like(q))
    options = {"causal": causal, "window": window}
    exact = run(attention, *(x.double() for x in tensors), **options)
    ours, rival = run(fold, *tensors, **options), run(attention, *(x.bfloat16() for x in tensors), **options)
    assert math.hypot(*map(error, ours, exact)) <= math.hypot(*map(error, rival, exact))


def captured_layers():
    """The one in the package, and the whole ones where they lie beside the checkout."""
    shipped = Path(fold_attention.__file__).parent / "data"
    beside = Path(__file__).parents[3] / "shared/captures"
    return sorted(path for folder in (shipped, beside) for path in folder.glob("backward_*.safetensors"))


@pytest.mark.parametrize("path", captured_layers(), ids=lambda p: p.stem)
def test_captured_training_layer(path):
    """A real layer of a training step: gradients at most 1.05 times torch's bf16 error."""
    from safetensors.torch import load_file

    data = load_file(path)
    q, k, v, dout = (data[n][None] for n in ("q", "k", "v", "dout"))
    heads = []
    for head in range(k.shape[2]):  # one KV head at a time: fp64 probabilities are large
        group = slice(head * q.shape[2] // k.shape[2], (head + 1) * q.shape[2] // k.shape[2])
        parts = (q[:, :, group], k[:, :, [head]], v[:, :, [head]], dout[:, :, group])
        heads.append(run(attention, *(x.double() for x in parts), causal=True))
    columns = zip(NAMES, zip(*heads, strict=True), strict=False)
    exact = [torch.cat(x, dim=1 if name == "lse" else 2) for name, x in columns]
    ours, rival = (run(f, q, k, v, dout, causal=True) for f in (fold, sdpa))
    check_against(exact, ours, rival, q.dtype)
