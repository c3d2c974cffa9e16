"""Memory of attention on a GPU: offsets past 2^31 elements, and workspaces that grow as the sequences do."""

import pytest
import torch
from attention_reference import run
from cuda_attention_testing import GPU, SameBytes, dense, ends_of, needs_gpu, of_sequence, tensors, varlen

pytestmark = needs_gpu
FAR = 2**31


@pytest.fixture(autouse=True)
def _give_memory_back():
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["sequences", "rows", "heads"])
@pytest.mark.parametrize("dim", [64, 128])
def test_strides_past_two_to_the_31(dim, dimension):
    """vllm#50427, vllm#47671, FI#3136, FA#1500: the last sequence, row or head starts past 2^31 elements."""
    given = tensors(2, 200, 260, 4, 2, dim)
    expected = run(dense, *given, causal=True)
    placed = []
    for x in given:
        strides = list(x.stride())
        strides[dimension] = FAR // (x.shape[dimension] - 1) // 64 * 64 + 64
        reach = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
        far = torch.full((reach,), torch.nan, dtype=x.dtype, device=GPU).as_strided(x.shape, strides)
        placed.append(far.copy_(x))
    with SameBytes() as same:
        same.compare(run(dense, *placed, causal=True), expected, "far apart")


def test_tensors_of_more_than_two_to_the_31_elements():
    """Packed sequences, inputs and results contiguous: the first and the last as each is alone."""
    lengths = (*[2048] * 64, 1031, 1017)
    heads, dim, total = 128, 128, sum(lengths)
    assert total * heads * dim > FAR + 1017 * heads * dim
    given = [x[0] for x in tensors(1, total, total, heads, heads, dim)]
    ends = ends_of(lengths)
    results = run(varlen(ends, ends), *given, causal=True)
    with SameBytes() as same:
        for rows in (slice(0, 2048), slice(total - 2048, total - 1017), slice(total - 1017, total)):
            alone = run(dense, *(x[None, rows] for x in given), causal=True)
            same.compare(of_sequence(results, rows, rows), alone, f"rows from {rows.start}")


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
def test_memory_grows_as_the_length(heads, packed):
    """O(S D): four times the rows take at most four times the memory beyond inputs and results."""

    def beyond(length):
        given = tensors(1, length, length, *heads, 128)
        call = dense
        if packed:
            given, call = [x[0] for x in given], varlen(*[ends_of([length // 2, length // 2])] * 2)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run(call, *given, causal=True)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return peak - sum(x.numel() * x.element_size() for x in results)

    small, large = beyond(4096), beyond(16384)
    print(f"{heads}: {small / 2**20:.1f} MiB at 4096 rows, {large / 2**20:.1f} at 16384")
    assert large <= 4 * small + 2**20
