"""Contenders of attention.py: this library, and the kernels that a user could pick instead, as far as installed."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from attention_problem import Problem
from peers import published_package
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fold_attention import fold_attn_func, fold_attn_varlen_func


@dataclass
class Contender:
    name: str
    deterministic: bool  # the same gradients in every run
    run: Callable[[], Tensor]  # the output, with its graph
    forward: bool = True  # its forward is its own


def contenders(problem: Problem, published: Path | None) -> Iterator[Contender]:
    yield Contender("fold", True, partial(_call, fold_attn_func, fold_attn_varlen_func, problem))
    if published is not None:
        yield Contender("published", True, partial(_published, problem, published), forward=False)
    if importlib.util.find_spec("flash_attn") is not None:
        for deterministic in (False, True):
            name = "FlashAttention-4" + (", deterministic" if deterministic else "")
            run = partial(_flash_attention_4, problem, deterministic)
            yield Contender(name, deterministic, run, forward=not deterministic)
    if problem.starts is None:
        yield Contender("torch, cuDNN", False, partial(_cudnn, problem))


def _call(dense: Callable[..., Any], packed: Callable[..., Any], problem: Problem, **options: Any) -> Tensor:
    """All of these libraries share flash-attn's signature; some also return the log-sum-exp."""
    options["causal"] = problem.causal
    if problem.starts is None:
        result = dense(*problem.leaves, **options)
    else:
        for name in ("q", "k"):
            options |= {f"cu_seqlens_{name}": problem.starts, f"max_seqlen_{name}": max(problem.lengths)}
        result = packed(*problem.leaves, **options)
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


def _published(problem: Problem, directory: Path) -> Tensor:
    """Its forward is FlashAttention-4's."""
    package = published_package(directory)
    return _call(package.fold_attn_func, package.fold_attn_varlen_func, problem)


def _flash_attention_4(problem: Problem, deterministic: bool) -> Tensor:
    cute = importlib.import_module("flash_attn.cute")
    return _call(cute.flash_attn_func, cute.flash_attn_varlen_func, problem, deterministic=deterministic)


def _cudnn(problem: Problem) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in problem.leaves)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=problem.causal, enable_gqa=problem.q.shape[2] != problem.k.shape[2]
        )
    return out.transpose(1, 2)
