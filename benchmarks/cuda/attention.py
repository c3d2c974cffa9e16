"""Training attention on a GPU, forward and backward, beside torch and FlashAttention-4 in one run.

    python benchmarks/cuda/attention.py --json attention.json

Each contender's forward, and its forward with its backward, is a captured CUDA graph; the backward is their difference.
Before every replay the L2 is emptied; contenders run in turn, each round starting with another one. TFLOP/s counts the
two products of the forward and the five of the backward over the pairs that are seen (half of them if causal). torch is
`scaled_dot_product_attention` with its cuDNN kernels.
FlashAttention-4 is left out where it is not installed.
"""

import importlib
import json as json_text
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from device_timing import Captured, rotating
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fold_attention import fold_attn_func

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
SHAPES = (
    "B1 S8192 H32/32 D128",
    "B1 S8192 H32/8 D128",
    "B2 S8192 H32/8 D128",
    "B1 S16384 H32/8 D128",
    "B4 S4096 H32/32 D64",
    "B4 S4096 H64/8 D64",
    "B1 S2048 H8/2 D128",
    "B8 S2048 H32/32 D128",
    "B1 S8192 H16/16 D128",
)


def fold(causal: bool) -> Attention:
    return lambda q, k, v: fold_attn_func(q, k, v, causal=causal)


def torch_cudnn(causal: bool) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            heads_first = [x.transpose(1, 2) for x in (q, k, v)]
            grouped = q.shape[2] != k.shape[2]
            return F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    return attend


def flash_attention_4(causal: bool, deterministic: bool) -> Attention:
    function = importlib.import_module("flash_attn.cute").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = function(q, k, v, causal=causal, deterministic=deterministic)
        return result[0] if isinstance(result, tuple) else result

    return attend


def contenders(causal: bool) -> Iterator[tuple[str, Attention]]:
    yield "fold", fold(causal)
    yield "torch, cuDNN", torch_cudnn(causal)
    try:
        for deterministic in (False, True):
            name = "FlashAttention-4" + (", deterministic" if deterministic else "")
            yield name, flash_attention_4(causal, deterministic)
    except ImportError:
        return


def measure(shape: str, causal: bool, rounds: int) -> list[dict[str, Any]]:
    batch, rows, heads, dim = (word[1:] for word in shape.split())
    q_heads, kv_heads = (int(n) for n in heads.split("/"))
    b, s, d = int(batch), int(rows), int(dim)
    sizes = (q_heads, kv_heads, kv_heads, q_heads)
    q, k, v, dout = (torch.randn(b, s, h, d, dtype=torch.bfloat16, device="cuda") for h in sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    graphs: dict[tuple[str, bool], Captured] = {}
    for name, attend in contenders(causal):
        with torch.no_grad():
            graphs[name, False] = Captured(lambda attend=attend: attend(q, k, v))
        graphs[name, True] = Captured(lambda attend=attend: torch.autograd.grad(attend(q, k, v), leaves, dout))
    product = 2.0 * b * q_heads * s * s * d * (0.5 if causal else 1)
    timings = rotating(graphs, rounds)
    results = []
    for name in dict.fromkeys(name for name, _ in graphs):
        forward, both = timings[name, False].median, timings[name, True].median
        for direction, microseconds, products in (("forward", forward, 2), ("backward", both - forward, 5)):
            tflops = products * product / microseconds / 1e6
            what = f"{shape} {'causal' if causal else 'full'} {direction} {name}"
            print(f"{what}: {microseconds:.1f} us, {tflops:.0f} TFLOP/s")
            results.append(
                {
                    "shape": shape,
                    "causal": causal,
                    "contender": name,
                    "direction": direction,
                    "us": microseconds,
                    "tflops": tflops,
                }
            )
    return results


def main(
    shapes: Annotated[list[str] | None, typer.Option("--shape", help="B.. S.. H../.. D..; may be repeated.")] = None,
    causal: Annotated[bool, typer.Option(help="A query sees keys up to its own.")] = True,
    rounds: Annotated[int, typer.Option(min=2)] = 15,
    json: Annotated[Path | None, typer.Option(help="Where to write the results.")] = None,
) -> None:
    """Times every shape and prints a line for each contender and direction."""
    results = [line for shape in shapes or SHAPES for line in measure(shape, causal, rounds)]
    if json is not None:
        report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
        json.write_text(json_text.dumps(report, indent=1))


if __name__ == "__main__":
    typer.run(main)
