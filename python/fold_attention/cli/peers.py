"""The same attention by ordinary means, for one decode step: q (B, H, D), k and v (B, HK, L, D) -> (B, H, D)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """torch's scaled_dot_product_attention as models call it."""
    return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, scale=scale, enable_gqa=True).squeeze(2)


def sdpa_folded(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """scaled_dot_product_attention with the query heads of a KV head as rows, so that a key is read once for them."""
    return F.scaled_dot_product_attention(_folded(q, k), k, v, scale=scale).flatten(1, 2)


def matmul_folded(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Two matrix products around a softmax, query heads of a KV head as rows."""
    logits = torch.matmul(_folded(q, k) * scale, k.mT)
    return torch.matmul(torch.softmax(logits, -1), v).flatten(1, 2)


DECODE = {
    "torch SDPA, enable_gqa": sdpa,
    "torch SDPA, folded": sdpa_folded,
    "torch matmul, folded": matmul_folded,
}


def _folded(q: Tensor, k: Tensor) -> Tensor:
    b, h, d = q.shape
    return q.view(b, k.shape[1], h // k.shape[1], d)
