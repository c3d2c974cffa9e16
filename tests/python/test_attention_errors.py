"""Bad input to the training entry points: ValueError or TypeError, *what=got; allowed*, before anything is written."""

import re

import pytest
import torch
from attention_reference import assert_same_bytes

import fold_attention
from fold_attention import fold_attn_func, fold_attn_varlen_func


def arguments():
    return {name: torch.randn(2, 12, h, 32) for name, h in (("q", 4), ("k", 2), ("v", 2))}


def packed_arguments():
    return {
        **{name: torch.randn(12, h, 32) for name, h in (("q", 4), ("k", 2), ("v", 2))},
        "cu_seqlens_q": torch.tensor([0, 5, 12], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 8, 12], dtype=torch.int32),
    }


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


T = torch.randn
DENSE = [
    # what is passed instead, the error, how its message begins
    ({"q": T(12, 4, 32)}, ValueError, "q.ndim=3; allowed: 4"),
    ({"k": T(12, 2, 32)}, ValueError, "k.ndim=3; "),
    ({"q": [[1.0]]}, TypeError, "q=list; allowed: torch.Tensor"),
    ({"q": T(2, 12, 4, 32).double()}, TypeError, "q.dtype=float64; "),
    ({"q": T(2, 12, 4, 32).int()}, TypeError, "q.dtype=int32; "),
    ({"q": T(2, 12, 4, 32).to(torch.complex64)}, TypeError, "q.dtype=complex64; "),
    ({"k": T(2, 12, 2, 32).bfloat16()}, TypeError, "k.dtype=bfloat16; supported: float32"),
    ({"q": T(2, 12, 4, 64)[..., ::2]}, ValueError, "q.stride(-1)=2; must be 1"),
    ({"v": T(2, 12, 32, 2).transpose(2, 3)}, ValueError, "v.stride(-1)=2; must be 1"),
    ({"q": T(2, 12, 3, 32)}, ValueError, "heads=3; a multiple of kv_heads=2"),
    ({"q": T(2, 12, 4, 257), "k": T(2, 12, 2, 257), "v": T(2, 12, 2, 257)}, ValueError, "head_dim=257; 1 to 256"),
    ({"k": T(3, 12, 2, 32)}, ValueError, "k.shape=(3, 12, 2, 32); "),
    ({"v": T(2, 11, 2, 32)}, ValueError, "v.shape=(2, 11, 2, 32); "),
    ({"v": T(2, 12, 2, 16)}, ValueError, "v.shape=(2, 12, 2, 16); "),
    ({"sinks": T(3)}, ValueError, "sinks.shape=(3); dimension 0 must be 4"),
    ({"sinks": T(4), "learnable_sink": T(4)}, ValueError, "learnable_sink=a tensor; "),
    ({"sinks": [0.0]}, TypeError, "sinks=list; allowed: torch.Tensor"),
    ({"dropout_p": 0.1}, ValueError, "dropout_p=0.1; supported: 0.0"),
    ({"softcap": 30.0}, ValueError, "softcap=30.0; supported: 0.0"),
    ({"alibi_slopes": T(4)}, ValueError, "alibi_slopes=a tensor; supported: None"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale=nan; a finite number"),
    ({"softmax_scale": float("inf")}, ValueError, "softmax_scale=inf; a finite number"),
    ({"softmax_scale": "auto"}, TypeError, "softmax_scale=auto; "),
    ({"window_size": (-2, 0)}, ValueError, "window_left=-2; "),
    ({"window_size": (0, -5)}, ValueError, "window_right=-5; "),
    ({"window_size": 128}, ValueError, "window_size=128; allowed: (left, right)"),
    ({"window_size": (1.5, 0)}, TypeError, "window_size=(1.5, 0); "),
    ({"causal": "yes"}, TypeError, "causal=yes; allowed: bool"),
    ({"out": T(2, 12, 4, 32).bfloat16()}, TypeError, "out.dtype=bfloat16; supported: float32"),
    ({"out": T(2, 12, 4, 16)}, ValueError, "out.shape=(2, 12, 4, 16); "),
    ({"out": T(2, 12, 1, 32).expand(2, 12, 4, 32)}, ValueError, "out.stride(2)=0; "),
    ({"out": 1}, TypeError, "out=int; allowed: torch.Tensor"),
    ({"q": T(2, 12, 4, 32).requires_grad_(), "out": T(2, 12, 4, 32)}, ValueError, "out=a tensor; allowed: None where"),
]


@pytest.mark.parametrize(("change", "error", "message"), DENSE, ids=[m for *_, m in DENSE])
def test_dense(change, error, message):
    out = torch.full((2, 12, 4, 32), 7.0)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        fold_attn_func(**{**arguments(), "out": out, **change})
    assert_same_bytes(out, torch.full_like(out, 7.0), "out was written")


PACKED = [
    ({"q": T(1, 12, 4, 32)}, ValueError, "q.ndim=4; allowed: 3"),
    ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q=NoneType; allowed: torch.Tensor"),
    ({"cu_seqlens_k": ints(0, 8, 12, dtype=torch.int64)}, TypeError, "cu_seqlens_k.dtype=int64; supported: int32"),
    ({"cu_seqlens_q": ints(1, 5, 12)}, ValueError, "cu_seqlens_q[0]=1; must be 0"),
    ({"cu_seqlens_q": ints(0, 7, 5)}, ValueError, "cu_seqlens_q[2]=5; must not be below cu_seqlens_q[1]=7"),
    ({"cu_seqlens_k": ints(0, -1, 12)}, ValueError, "cu_seqlens_k[1]=-1; must not be below cu_seqlens_k[0]=0"),
    ({"cu_seqlens_q": ints(0, 5, 13)}, ValueError, "cu_seqlens_q[2]=13; at most the rows, 12"),
    ({"cu_seqlens_k": ints(0, 12)}, ValueError, "sequences of cu_seqlens_k=1; as many as cu_seqlens_q, 2"),
    ({"cu_seqlens_q": ints(0, 0, 5, 5, 12, 12)[::2]}, ValueError, "cu_seqlens_q.stride(-1)=2; must be 1"),
    ({"cu_seqlens_q": ints(0, 5, 12)[None]}, ValueError, "cu_seqlens_q.ndim=2; supported: 1"),
    ({"cu_seqlens_q": ints()}, ValueError, "cu_seqlens_q.shape=(0); "),
    ({"block_table": ints(0)}, ValueError, "block_table=a tensor; supported: None"),
    ({"seqused_k": ints(1, 2)}, ValueError, "seqused_k=a tensor; supported: None"),
    ({"dropout_p": 0.5}, ValueError, "dropout_p=0.5; supported: 0.0"),
]


@pytest.mark.parametrize(("change", "error", "message"), PACKED, ids=[m for *_, m in PACKED])
def test_packed(change, error, message):
    out = torch.full((12, 4, 32), 7.0)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        fold_attn_varlen_func(**{**packed_arguments(), "out": out, **change})
    assert_same_bytes(out, torch.full_like(out, 7.0), "out was written")


def test_unknown_arguments_are_not_swallowed():
    options = {**arguments(), "q_descale": torch.ones(2, 2)}
    with pytest.raises(TypeError, match="q_descale"):
        fold_attn_func(**options)


@pytest.mark.parametrize("n", [0, -1, 5000])
def test_number_of_threads(n):
    before = fold_attention.get_num_threads()
    with pytest.raises(ValueError, match=f"^num_threads={n}; allowed: 1 to 4096$"):
        fold_attention.set_num_threads(n)
    assert fold_attention.get_num_threads() == before
