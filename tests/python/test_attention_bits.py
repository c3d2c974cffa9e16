"""P2: outputs and gradients are the same bytes over repeats, threads, batches, packing and strides."""

import mmap
import threading
import warnings

import pytest
import torch
from attention_reference import assert_same_bytes, run

import fold_attention
from fold_attention import fold_attn_func, fold_attn_varlen_func

MAP_NORESERVE = 0x4000  # Linux: address space alone; only the pages that are touched exist
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def dense(q, k, v, *, sinks=None, **options):
    return fold_attn_func(q, k, v, sinks=sinks, return_lse=True, **options)


def inputs(b, sq, sk, h=4, hk=2, d=64, dtype=torch.bfloat16):
    """q, k, v, dout."""
    return [torch.randn(b, s, n, d).to(dtype) for s, n in ((sq, h), (sk, hk), (sk, hk), (sq, h))]


def same(a, b, what):
    for name, x, y in zip(NAMES, a, b, strict=False):
        assert_same_bytes(x, y, f"{name}, {what}")


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_repeats_and_threads(dtype, head_dim):
    """FA#1766, FA#746: every head dim: three repeats at each of 1, 2, 3 and 7 threads."""
    tensors = inputs(2, 200, 333, d=head_dim, dtype=dtype)
    sinks = torch.randn(4)
    expected = run(dense, *tensors, sinks=sinks, causal=True)
    for threads in (1, 2, 3, 7):
        fold_attention.set_num_threads(threads)
        for repeat in range(3):
            same(run(dense, *tensors, sinks=sinks, causal=True), expected, f"{threads} threads, repeat {repeat}")


def test_repeats_under_load():
    """FA#2244: fp16, B2 S1024 H12 D64: many backwards, while another thread of the process computes too."""
    tensors = inputs(2, 1024, 1024, h=12, hk=12, dtype=torch.float16)
    expected = run(dense, *tensors, causal=True)
    stop = threading.Event()

    def load():
        other = inputs(1, 150, 150)
        while not stop.is_set():
            run(dense, *other)

    neighbour = threading.Thread(target=load)
    neighbour.start()
    try:
        for repeat in range(6):
            same(run(dense, *tensors, causal=True), expected, f"repeat {repeat}")
    finally:
        stop.set()
        neighbour.join()


@pytest.mark.parametrize("flag", [True, False])
def test_deterministic_argument_changes_nothing(flag):
    tensors = inputs(1, 100, 100)
    same(
        run(dense, *tensors, deterministic=flag, num_splits=3, pack_gqa=True, sm_margin=8), run(dense, *tensors), "flag"
    )


def test_use_deterministic_algorithms():
    """TE#2798, pytorch#182551: no warning, no error, the same bytes."""
    tensors = inputs(1, 100, 100)
    expected = run(dense, *tensors)
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            same(run(dense, *tensors), expected, "deterministic algorithms")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [2, 5, 64])
def test_alone_and_in_a_batch(dtype, batch):
    """FA#1897, FA#2450: one sequence at every position of a batch (64: first, middle, last) with its bytes alone."""
    tensors = inputs(1, 130, 190, dtype=dtype)
    expected = run(dense, *tensors, causal=True)
    for position in range(batch) if batch < 10 else (0, batch // 2, batch - 1):
        many = inputs(batch, 130, 190, dtype=dtype)
        for whole, one in zip(many, tensors, strict=True):
            whole *= 1000  # neighbours of another magnitude, which no shared grid may feel
            whole[position] = one[0]
        results = run(dense, *many, causal=True)
        same([x[position : position + 1] for x in results], expected, f"position {position} of {batch}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "neighbours", [[(0, 0)], [(1, 1), (300, 5)], [(7, 131), (0, 9), (64, 64)], [(1, 4096)]], ids=str
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_alone_and_packed(dtype, neighbours, causal):
    """FA#1897: one sequence packed before, between and behind others of any length, with its bytes alone."""
    sq, sk = 97, 200
    q, k, v, dout = (x[0] for x in inputs(1, sq, sk, dtype=dtype))
    sinks = torch.randn(4)
    expected = run(dense, q[None], k[None], v[None], dout[None], sinks=sinks, causal=causal)
    for position in range(len(neighbours) + 1):
        lengths = [*neighbours[:position], (sq, sk), *neighbours[position:]]
        cu_q, cu_k = (torch.tensor([0, *(n[i] for n in lengths)]).cumsum(0).int() for i in (0, 1))
        pairs = ((q, cu_q), (k, cu_k), (v, cu_k), (dout, cu_q))
        pq, pk, pv, pd = (100 * torch.randn(int(c[-1]), *x.shape[1:]).to(dtype) for x, c in pairs)
        rows_q, rows_k = (slice(int(c[position]), int(c[position + 1])) for c in (cu_q, cu_k))
        pq[rows_q], pk[rows_k], pv[rows_k], pd[rows_q] = q, k, v, dout

        def packed(q, k, v, cu_q=cu_q, cu_k=cu_k, **options):
            return fold_attn_varlen_func(q, k, v, cu_q, cu_k, 4096, 4096, return_lse=True, **options)

        out, lse, dq, dk, dv, _ = run(packed, pq, pk, pv, pd, sinks=sinks, causal=causal)
        ours = (out[None, rows_q], lse[None, :, rows_q], dq[None, rows_q], dk[None, rows_k], dv[None, rows_k])
        same(ours, expected, f"position {position}")


def test_strides_change_no_byte():
    """pytorch#187506: fused-qkv views, transposes, slices of a pool, heads expanded with stride 0: as contiguous."""
    q, k, v, dout = inputs(2, 90, 90, h=4, hk=4)
    expected = run(dense, q, k, v, dout)
    fused = torch.stack((q, k, v), dim=2).unbind(2)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout)]
    pool = torch.full((4, 100, 9, 128), torch.nan, dtype=q.dtype)
    sliced = []
    for x in (q, k, v, dout):
        part = pool.clone()[1:3, 5:95, 1::2][:, :, :, 64:]
        part.copy_(x)
        sliced.append(part)
    for what, (a, b, c, d) in {
        "fused qkv": (*fused, dout),
        "(B, H, S, D)": transposed,
        "slices of a pool": sliced,
        "rows reversed in memory order": [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v, dout)],
    }.items():
        same(run(dense, a, b, c, d), expected, what)


def test_heads_expanded_with_stride_zero():
    q, k, v, dout = inputs(1, 70, 70, h=4, hk=1)
    out = run(dense, q, k.expand(-1, -1, 4, -1), v.expand(-1, -1, 4, -1), dout)[0]
    assert_same_bytes(out, run(dense, q, k, v, dout)[0], "expanded heads")
    one_head = run(dense, q[:, :, :1].expand(-1, -1, 4, -1), k, v, dout)
    assert_same_bytes(one_head[0], run(dense, q[:, :, :1].repeat(1, 1, 4, 1), k, v, dout)[0], "expanded queries")


def test_incoming_gradient_of_any_stride():
    q, k, v, _ = inputs(1, 40, 40)
    ones = torch.ones_like(q)
    same(run(dense, q, k, v, torch.ones(()).to(q.dtype).expand(q.shape)), run(dense, q, k, v, ones), "expanded")
    strided = ones.transpose(1, 3).contiguous().transpose(1, 3)
    same(run(dense, q, k, v, strided), run(dense, q, k, v, ones), "transposed")


@pytest.mark.parametrize("power", [31, 32])
def test_offsets_past_two_to_the_31(power):
    """vllm#50427, vllm#47671, FI#3136, FA#1500: an entry past 2^31 or 2^32 elements has the bytes of the first."""
    tensors = inputs(1, 33, 65)
    expected = run(dense, *tensors)
    far = 2**power + 64
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    placed = []
    for x in tensors:
        memory = torch.frombuffer(mmap.mmap(-1, 2 * (far + x.numel()), flags=flags), dtype=x.dtype)
        both = memory.as_strided((2, *x.shape[1:]), (far, *x.stride()[1:]))
        both.copy_(x.expand(2, -1, -1, -1))
        placed.append(both)
    results = run(dense, *placed)
    for batch in (0, 1):
        same([x[batch : batch + 1] for x in results], expected, f"entry {batch}")
