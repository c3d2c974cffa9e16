"""Errors on a GPU against fp64, forward and gradients: at most 1.05 times those of FlashAttention-4, where it is
installed (`pip install flash-attn-4`), and of torch's fused attention, on the same inputs; over the sequences of a
batch, in the geometric mean. `pytest -rP` prints ratios.
"""

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attention_reference import attention, error, run
from cuda_attention_testing import GPU, NAMES, dense, needs_gpu, tensors

import fold_attention

pytestmark = needs_gpu
FACTOR = 1.05


def torch_fused(q, k, v, *, causal, **_):
    """It masks causally from the top left, which is the same where the lengths are equal."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2), None


def flash_attention_4(q, k, v, *, causal, **_):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = importlib.import_module("flash_attn.cute").flash_attn_func(q, k, v, causal=causal)
    return (result[0] if isinstance(result, tuple) else result), None


def has_flash_attention_4() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:  # of flash_attn itself
        return False


PEERS = [
    pytest.param(torch_fused, id="torch"),
    pytest.param(
        flash_attention_4,
        id="FlashAttention-4",
        marks=pytest.mark.skipif(not has_flash_attention_4(), reason="FlashAttention-4 is not installed"),
    ),
]


def gradients(peer, given, causal):
    """out, dq, dk and dv of a peer, in the places where NAMES has them."""
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    out, _ = peer(*leaves, causal=causal)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (out.detach(), None, *torch.autograd.grad(out, leaves, given[3]))


def exactly(given, causal):
    """In fp64, one KV head and its query heads at a time: the matrices are large."""
    q, k, v, dout = (x.double() for x in given)
    group = q.shape[2] // k.shape[2]
    heads = []
    for head in range(k.shape[2]):
        rows = slice(head * group, (head + 1) * group)
        part = (q[:, :, rows], k[:, :, [head]], v[:, :, [head]], dout[:, :, rows])
        heads.append(run(attention, *part, causal=causal))
    columns = zip(NAMES, zip(*heads, strict=True), strict=False)
    return [torch.cat(parts, dim=1 if name == "lse" else 2) for name, parts in columns]


def error_ratio(ours, theirs, exact):
    """Our error over theirs, which need not beat the correctly rounded result: the geometric mean over sequences, so
    that none of them makes up the result. In a sequence a few rows may; where they do, the ratio of two equally good
    implementations has a standard deviation of 0.05 to 0.07."""
    ratios = []
    for x, other, want in zip(ours, theirs, exact, strict=True):
        allowed = max(error(other, want), error(want.to(x.dtype), want))
        ratios.append(max(error(x, want) / max(allowed, 1e-300), 0.5))  # one that is exact does not make up for others
    return torch.tensor(ratios, dtype=torch.float64).log().mean().exp().item()


def check(given, causal, peer):
    exact, theirs = exactly(given, causal), gradients(peer, given, causal)
    ours = run(dense, *given, causal=causal)
    results = zip(NAMES, ours, theirs, exact, strict=False)
    ratios = {name: error_ratio(x, other, want) for name, x, other, want in results if other is not None}
    listed = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    print(f"error over {peer.__name__}'s: {listed}")
    assert all(ratio <= FACTOR for ratio in ratios.values()), listed
    return ours, exact


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(2, 512, 512, 4, 2, 64), (1, 1021, 1021, 6, 6, 96), (1, 2048, 2048, 8, 2, 128), (3, 129, 129, 4, 1, 128)],
    ids=str,
)
def test_random_inputs(shape, dtype, causal, peer):
    ours, exact = check(tensors(*shape, dtype=dtype), causal, peer)
    torch.testing.assert_close(ours[1].double(), exact[1], rtol=2**-21, atol=2**-21)


def captures():
    """The one in the package, and the whole ones where they lie beside the checkout."""
    shipped = Path(fold_attention.__file__).parent / "data"
    beside = Path(__file__).parents[3] / "shared/captures"
    return sorted(path for folder in (shipped, beside) for path in folder.glob("backward_*.safetensors"))


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("path", captures(), ids=lambda path: path.stem)
def test_a_captured_training_step(path, peer):
    load_file = pytest.importorskip("safetensors.torch").load_file
    data = load_file(path, device=str(GPU))
    check([data[name][None] for name in ("q", "k", "v", "dout")], True, peer)


def large_logits(q, k, v, dout):
    q *= 8


def shifted_logits(q, k, v, dout):
    """One channel, as in models with massive activations, moves all logits of a row far from zero."""
    q[..., 0], k[..., 0] = 16, 32


def sink_key(q, k, v, dout):
    """Key 0 holds most of every row's mass, and its value is small."""
    q[..., 1], k[:, 0, :, 1] = 4, 24
    v[:, 0] *= 2**-6


def huge_rows_of_dout(q, k, v, dout):
    dout[:, 5::32] *= 2**20


def huge_value(q, k, v, dout):
    v[:, 300] *= 2**20


def rows_of_every_size(q, k, v, dout):
    for x in (v, dout):
        x *= torch.exp2(2 * torch.randn(x.shape[:3], device=GPU)).to(x.dtype)[..., None]


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize(
    "change",
    [large_logits, shifted_logits, sink_key, huge_rows_of_dout, huge_value, rows_of_every_size],
    ids=lambda f: f.__name__,
)
def test_adversarial_inputs(change, peer):
    given = tensors(16, 1024, 1024, 8, 2, 128)
    change(*given)
    check(given, True, peer)
