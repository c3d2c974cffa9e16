"""Custom operators: schema, fake kernels, gradients; torch.compile without a graph break or a compile per length."""

import pytest
import torch
from attention_reference import assert_same_bytes

from fold_attention import fold_attn_func, fold_attn_varlen_func

NAMES = ("out", "dq", "dk", "dv")
ops = torch.ops.fold_attention


def dense(sq=17, sk=33, dtype=torch.bfloat16):
    return [torch.randn(2, s, h, 32, dtype=dtype, requires_grad=True) for s, h in ((sq, 4), (sk, 2), (sk, 2))]


def packed(dtype=torch.float32):
    q, k, v = (torch.randn(t, h, 32, dtype=dtype, requires_grad=True) for t, h in ((20, 4), (31, 2), (31, 2)))
    return q, k, v, torch.tensor([0, 3, 3, 20], dtype=torch.int32), torch.tensor([0, 9, 11, 31], dtype=torch.int32)


@pytest.mark.parametrize("options", [(None, True, -1, -1), (0.3, False, 5, 2)], ids=["causal", "window and scale"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
def test_opcheck_dense(options, with_sinks):
    """FA#2013: torch.library.opcheck: schema, fake kernel, autograd registration, dynamic shapes."""
    q, k, v = dense()
    sinks = torch.randn(4, requires_grad=True) if with_sinks else None
    torch.library.opcheck(ops.forward.default, (q, k, v, sinks, None, None, *options))


def test_opcheck_packed():
    q, k, v, cu_q, cu_k = packed()
    torch.library.opcheck(ops.forward.default, (q, k, v, None, cu_q, cu_k, None, True, -1, -1))


def test_opcheck_forward_out():
    q, k, v = (x.detach() for x in dense())
    arguments = (q, k, v, None, None, None, None, True, -1, -1, torch.empty_like(q), torch.empty(2, 4, 17))
    torch.library.opcheck(ops.forward_out.default, arguments)


def test_opcheck_backward():
    q, k, v = (x.detach() for x in dense())
    sinks = torch.randn(4)
    out, lse = ops.forward(q, k, v, sinks, None, None, None, True, -1, -1)
    dout = torch.randn_like(out)
    torch.library.opcheck(ops.backward.default, (dout, q, k, v, sinks, None, None, None, True, -1, -1, out, lse))


def train(function, *arguments, **options):
    """out and the gradients of every floating-point tensor among the arguments."""
    given = [x.detach().requires_grad_(x.is_floating_point()) if torch.is_tensor(x) else x for x in arguments]
    out = function(*given, **options)
    out.backward(torch.ones_like(out))
    return [out.detach(), *(x.grad for x in given if torch.is_tensor(x) and x.requires_grad)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_training_equals_eager_without_a_compile_per_length(backend):
    """FA#2013, FA#1139: fullgraph at three lengths: one compile, and eager's bytes in the output and the gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(fold_attn_func, fullgraph=True, dynamic=True, backend=backend)
    for length in (48, 65, 130):
        tensors = dense(length, length + 7)
        with torch._dynamo.config.patch(error_on_recompile=True):
            results = train(compiled, *tensors, causal=True)
        for name, a, b in zip(NAMES, results, train(fold_attn_func, *tensors, causal=True), strict=True):
            assert_same_bytes(a, b, f"{name} at length {length}")


def test_compiled_packed_equals_eager():
    torch._dynamo.reset()
    compiled = torch.compile(fold_attn_varlen_func, fullgraph=True, dynamic=True, backend="aot_eager")
    q, k, v, cu_q, cu_k = packed()
    a = train(compiled, q, k, v, cu_q, cu_k, 17, 20, causal=True, softmax_scale=0.2)
    b = train(fold_attn_varlen_func, q, k, v, cu_q, cu_k, 17, 20, causal=True, softmax_scale=0.2)
    for name, x, y in zip(NAMES, a, b, strict=True):
        assert_same_bytes(x, y, name)


def test_compiled_out_argument():
    torch._dynamo.reset()
    compiled = torch.compile(fold_attn_func, fullgraph=True, backend="aot_eager")
    q, k, v = (x.detach() for x in dense())
    out = torch.full_like(q, torch.nan)
    result = compiled(q, k, v, out=out)
    assert_same_bytes(result, fold_attn_func(q, k, v))
    assert_same_bytes(out, result)


def test_no_gradient_no_graph():
    q, k, v = (x.detach() for x in dense())
    assert fold_attn_func(q, k, v).grad_fn is None
    with torch.no_grad():
        assert fold_attn_func(*dense()).grad_fn is None


def test_lse_carries_no_gradient():
    out, lse = fold_attn_func(*dense(), return_lse=True)
    assert out.requires_grad
    assert not lse.requires_grad
