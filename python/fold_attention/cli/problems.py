"""What is measured: decode steps and training layers, captured or synthetic, and their fp64 references."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fold_attention.errors import bad_type, bad_value

DATA = Path(__file__).parents[1] / "data"
SHIPPED_DECODE = sorted(DATA.glob("decode_*.safetensors"))
SHIPPED_TRAINING = sorted(DATA.glob("backward_*.safetensors"))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class DecodeProblem:
    """Steps of one token per request; in step t every request sees its first lengths[t] keys."""

    name: str
    q: Tensor  # (steps, B, H, D)
    k: Tensor  # (B, HK, L, D), contiguous, as torch's attention wants it
    v: Tensor  # (B, HK, L, D)
    lengths: list[int]  # (steps,)
    scale: float

    @property
    def shape(self) -> dict[str, int]:
        _, batch, heads, dim = self.q.shape
        return {"batch": batch, "heads": heads, "kv_heads": self.k.shape[1], "head_dim": dim, "keys": self.k.shape[2]}

    def fp8(self) -> "DecodeProblem":
        """Request 0 with K and V as a cache of E4M3 numbers with scale 1 holds them, the default of serving engines."""
        limit = torch.finfo(torch.float8_e4m3fn).max
        k, v = (x[:1].float().clamp(-limit, limit).to(torch.float8_e4m3fn).to(x.dtype) for x in (self.k, self.v))
        return DecodeProblem(self.name, self.q[:, :1], k, v, self.lengths, self.scale)

    def expected(self, step: int, request: int = 0) -> Tensor:
        """(H, D) float64: the output of one step for one request."""
        n = self.lengths[step]
        outs = []
        for rows, k, v in zip(
            self.q[step, request].chunk(self.k.shape[1]), self.k[request], self.v[request], strict=True
        ):
            logits = rows.double() @ k[:n].double().T * self.scale
            outs.append(torch.softmax(logits, -1) @ v[:n].double())
        return torch.cat(outs)


@dataclass
class TrainingProblem:
    """Self-attention over whole sequences, with the gradient of the output."""

    name: str
    q: Tensor  # (B, S, H, D)
    k: Tensor  # (B, S, HK, D)
    v: Tensor  # (B, S, HK, D)
    dout: Tensor  # (B, S, H, D)
    causal: bool
    scale: float


def load_decode(path: Path, batch: int = 1, seqlen: int | None = None) -> DecodeProblem:
    """A decode capture, in `batch` copies; with `seqlen`, its keys repeated or cut to that many, all visible."""
    tensors, metadata = _read(path, "decode", {"q": 3, "k": 3, "v": 3})
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    steps, heads, dim = q.shape
    kv_heads, length, _ = k.shape
    if v.shape != k.shape:
        raise bad_value("v.shape", tuple(v.shape), f"allowed: {tuple(k.shape)}, as k")
    _check_heads(heads, kv_heads, dim, k.shape[2])
    if not 0 < steps <= length:
        raise bad_value("q.shape", tuple(q.shape), f"allowed: 1 to {length} steps, as many as there are keys")
    lengths = [length - steps + 1 + t for t in range(steps)]
    if seqlen is not None:
        repeats = -(-seqlen // length)
        k, v = (x.repeat(1, repeats, 1)[:, :seqlen] for x in (k, v))
        lengths = [seqlen] * steps
    k, v = (x.expand(batch, *x.shape).contiguous() for x in (k, v))
    q = q[:, None].expand(steps, batch, heads, dim).contiguous()
    return DecodeProblem(path.stem, q, k, v, lengths, _scale(metadata, dim))


def load_training(path: Path, batch: int = 1) -> TrainingProblem:
    """A training capture, in `batch` copies."""
    tensors, metadata = _read(path, "backward", {"q": 3, "k": 3, "v": 3, "dout": 3})
    q, k, v, dout = (tensors[name] for name in ("q", "k", "v", "dout"))
    for name, tensor, like in (("v", v, k), ("dout", dout, q)):
        if tensor.shape != like.shape:
            raise bad_value(
                f"{name}.shape", tuple(tensor.shape), f"allowed: {tuple(like.shape)}, as {'kq'[name != 'v']}"
            )
    _check_heads(q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    q, k, v, dout = (x.expand(batch, *x.shape).contiguous() for x in (q, k, v, dout))
    return TrainingProblem(path.stem, q, k, v, dout, True, _scale(metadata, q.shape[3]))


def synthetic_decode(
    batch: int,
    seqlen: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    steps: int = 4,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> DecodeProblem:
    """Logits of standard deviation 3 nats, and a sink: key 0 holds about half of the mass, and its V is small.

    A query is 0.8 of a direction that its group shares and 0.6 of its own.
    """
    _check_heads(heads, kv_heads, head_dim, head_dim)
    g = torch.Generator(device).manual_seed(seed)
    k, v = (torch.empty(batch, kv_heads, seqlen, head_dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    for b in range(batch):
        for x in (k, v):
            x[b] = torch.randn(kv_heads, seqlen, head_dim, generator=g, device=device).bfloat16()
    common = torch.randn(1, batch, kv_heads, 1, head_dim, generator=g, device=device)
    own = torch.randn(steps, batch, kv_heads, heads // kv_heads, head_dim, generator=g, device=device)
    q = 3 * (0.8 * common + 0.6 * own)
    # exp of the other keys' logits adds up to about seqlen exp(9 / 2).
    direction = common[0, :, :, 0] / common[0, :, :, 0].square().sum(-1, keepdim=True)
    k[:, :, 0] = (direction * (math.log(seqlen) + 4.5) * math.sqrt(head_dim) / (3 * 0.8)).bfloat16()
    v[:, :, 0] *= 0.1
    q = q.bfloat16().flatten(2, 3)
    return DecodeProblem("synthetic", q, k, v, [seqlen] * steps, 1 / math.sqrt(head_dim))


def synthetic_training(
    batch: int, seqlen: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, causal: bool, seed: int = 0
) -> TrainingProblem:
    """Normal q, k, v and gradient."""
    _check_heads(heads, kv_heads, head_dim, head_dim)
    g = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(batch, seqlen, h, head_dim, generator=g).to(dtype) for h in (heads, kv_heads, kv_heads, heads)
    )
    return TrainingProblem("synthetic", q, k, v, dout, causal, 1 / math.sqrt(head_dim))


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the fp64 reference."""
    return float((got.double() - expected).norm() / expected.norm())


def _check_heads(heads: int, kv_heads: int, q_dim: int, k_dim: int) -> None:
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise bad_value("heads", heads, f"allowed: a multiple of kv_heads={kv_heads}")
    if q_dim != k_dim:
        raise bad_value("q.shape[-1]", q_dim, f"allowed: {k_dim}, as k")


def _scale(metadata: dict[str, str], dim: int) -> float:
    text = metadata.get("scale")
    try:
        scale = 1 / math.sqrt(dim) if text is None else float(text)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale) or scale == 0:
        raise bad_value("metadata.scale", text, "allowed: a finite number other than 0")
    return scale


def _read(path: Path, kind: str, ranks: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            missing = [name for name in ranks if name not in file.keys()]  # noqa: SIM118
            if metadata.get("capture", kind) != kind:
                raise bad_value(f"{path.name}: capture", metadata["capture"], f"allowed: {kind}")
            if missing:
                raise bad_value(f"{path.name}: tensors", sorted(file.keys()), f"required: {', '.join(ranks)}")
            tensors = {name: file.get_tensor(name) for name in ranks}
    except SafetensorError as error:
        raise bad_value("path", path, f"a whole safetensors file ({error})") from None
    dtype = tensors["q"].dtype
    for name, tensor in tensors.items():
        if tensor.ndim != ranks[name]:
            raise bad_value(f"{path.name}: {name}.ndim", tensor.ndim, f"allowed: {ranks[name]}")
        if tensor.dtype not in DTYPES or tensor.dtype != dtype:
            raise bad_type(f"{path.name}: {name}.dtype", tensor.dtype, "allowed: bfloat16, float16 or float32, as q")
        if not bool(tensor.isfinite().all()):
            raise bad_value(f"{path.name}: {name}", "NaN or Inf", "allowed: finite numbers")
    return tensors, metadata
