"""9. A training run that repeats to the last bit: a small GPT learns the source of Python's standard library.

    python examples/09_training_run.py --steps 200 --plot run.png

On a GPU the model has 100 million parameters (head dim 128, 4 query heads a KV head), elsewhere a few thousand. What
is not attention runs under `torch.use_deterministic_algorithms(True)`. It is trained twice, the second time beside a
process that keeps the device busy: losses and final weights must be the same bytes. The attention gradients of some
steps are computed again, with the same documents packed in another way: each document's must be the same bytes.

Then the same with FlashAttention-4's default backward, or torch's where that is not installed, for comparison.
"""

import hashlib
import importlib.util
import json as json_text
import multiprocessing
import os
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fold_attention import fold_attn_varlen_func

#: q (T, H, D), k and v (T, Hk, D), lengths of the documents, where they start (on the device) -> out (T, H, D)
Attention = Callable[[Tensor, Tensor, Tensor, list[int], Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    depth: int
    width: int
    heads: int
    kv_heads: int
    tokens: int  # of a step, packed documents
    document: int  # at most so many bytes
    steps: int


ON_GPU = Size(depth=9, width=1024, heads=8, kv_heads=2, tokens=8192, document=4096, steps=200)
TINY = Size(depth=2, width=64, heads=4, kv_heads=2, tokens=300, document=120, steps=4)


def fold(q: Tensor, k: Tensor, v: Tensor, _lengths: list[int], starts: Tensor) -> Tensor:
    return fold_attn_varlen_func(q, k, v, starts, starts, causal=True)


def flash_attention_4(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], starts: Tensor) -> Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    where = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    result = flash_attn_varlen_func(q, k, v, **where, causal=True)
    return result[0] if isinstance(result, tuple) else result


def torch_flash(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], _starts: Tensor) -> Tensor:
    """A call for each document."""
    outs = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for rows in zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v)), strict=True):
            outs.append(F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outs)


def peer(device: torch.device) -> tuple[str, Attention]:
    if device.type == "cuda":
        with suppress(ModuleNotFoundError):  # of flash_attn itself
            if importlib.util.find_spec("flash_attn.cute"):
                return "FlashAttention-4", flash_attention_4
    return "torch's flash attention", torch_flash


# The model.


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of (T, heads, D) by angles (T, 1, D / 2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.dim = size.width // size.heads
        self.heads = [size.heads, size.kv_heads, size.kv_heads]
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
        self.qkv = nn.Linear(size.width, sum(self.heads) * self.dim, bias=False)
        self.project = nn.Linear(size.width, size.width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width, bias=False),
        )

    def forward(self, x: Tensor, angles: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.dim)).split(self.heads, dim=1)
        x = x + self.project(attend(rotated(q, angles), rotated(k, angles), v).flatten(1))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Over bytes; documents are packed one behind the other."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        dim = size.width // size.heads
        self.embedding = nn.Embedding(256, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, 256, bias=False)
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, dim, 2) / dim))
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, batch: "Batch", attention: Attention) -> Tensor:
        x = self.embedding(batch.inputs)
        angles = batch.positions[:, None, None] * self.frequencies
        for block in self.blocks:
            x = block(x, angles, lambda q, k, v: attention(q, k, v, batch.lengths, batch.starts))
        return F.cross_entropy(self.head(self.norm(x)).float(), batch.targets)


# The text.


@dataclass
class Batch:
    """Documents one behind the other; a target is the byte behind the input."""

    inputs: Tensor  # (T,)
    targets: Tensor  # (T,)
    positions: Tensor  # (T,) within the document
    lengths: list[int]
    starts: Tensor  # (documents + 1,) int32


def documents(size: Size) -> list[bytes]:
    """Python's standard library in pieces, shuffled."""
    library = Path(sysconfig.get_path("stdlib"))
    pieces = []
    for path in sorted(library.glob("*.py")):
        text = path.read_bytes()
        pieces += [text[i : i + size.document + 1] for i in range(0, len(text) - 1, size.document)]
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    return [pieces[i] for i in order]


def batches(size: Size, device: torch.device) -> Iterator[Batch]:
    """As many whole documents as a step takes, and one cut short."""
    while True:
        taken: list[bytes] = []
        room = size.tokens
        for text in documents(size):
            taken.append(text[: room + 1])
            room -= len(taken[-1]) - 1
            if room > 0:
                continue
            lengths = [len(text) - 1 for text in taken]
            texts = [torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in taken]
            columns = ([x[:-1] for x in texts], [x[1:] for x in texts], [torch.arange(n) for n in lengths])
            starts = torch.tensor([0, *lengths]).cumsum(0).int()
            inputs, targets, positions = (torch.cat(column).to(device) for column in columns)
            yield Batch(inputs, targets, positions, lengths, starts.to(device))
            taken, room = [], size.tokens


# Training.


def bytes_of(x: Tensor) -> bytes:
    return x.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()


class Recorder:
    """Attention that keeps its inputs and gradients."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.calls: list[dict[str, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], starts: Tensor) -> Tensor:
        out = self.attention(q, k, v, lengths, starts)
        call = {"q": q.detach(), "k": k.detach(), "v": v.detach()}
        for name, x in {"dq": q, "dk": k, "dv": v, "dout": out}.items():
            x.register_hook(lambda gradient, name=name: call.__setitem__(name, gradient))
        self.calls.append(call)
        return out

    def packed_otherwise(self, lengths: list[int]) -> int:
        """Computes all gradients again, with the documents in reverse order and in two packs; returns how many were
        compared, and asserts that their bytes are the same."""
        order = list(reversed(range(len(lengths))))
        half = (len(order) + 1) // 2
        compared = 0
        for call in self.calls:
            of_document = {name: x.split(lengths) for name, x in call.items()}
            for pack in (order[:half], order[half:]):
                if not pack:
                    continue
                q, k, v, dout = (torch.cat([of_document[name][i] for i in pack]) for name in ("q", "k", "v", "dout"))
                starts = torch.tensor([0, *(lengths[i] for i in pack)]).cumsum(0).int().to(q.device)
                leaves = [x.requires_grad_() for x in (q, k, v)]
                out = self.attention(*leaves, [lengths[i] for i in pack], starts)
                for name, gradient in zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout), strict=True):
                    for i, again in zip(pack, gradient.split([lengths[i] for i in pack]), strict=True):
                        assert bytes_of(again) == bytes_of(of_document[name][i]), f"{name} of document {i}"
                        compared += 1
        return compared


@dataclass
class Run:
    losses: list[float]
    sha256: str  # of losses and final weights
    seconds: float
    compared: int  # gradients of documents, between two packings


def train(size: Size, attention: Attention, device: torch.device, look_at: tuple[int, ...] = ()) -> Run:
    """From the same weights over the same documents. look_at: steps whose attention gradients are computed again."""
    torch.manual_seed(0)
    model = GPT(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    losses, compared = [], 0
    began = time.perf_counter()
    for step, batch in zip(range(size.steps), batches(size, device), strict=False):
        recorder = Recorder(attention) if step in look_at else None
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(batch, recorder or attention)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if recorder:
            compared += recorder.packed_otherwise(batch.lengths)
    curve = torch.stack(losses)
    digest = hashlib.sha256(bytes_of(curve))
    for weight in model.parameters():
        digest.update(bytes_of(weight))
    return Run(curve.tolist(), digest.hexdigest(), time.perf_counter() - began, compared)


def keep_busy(device: str, started: Any) -> None:
    """What the other process does: products of several sizes, without end."""
    torch.set_num_threads(1)
    matrices = [
        torch.randn(n, n, device=device).bfloat16() for n in ((512, 8192, 2048) if device == "cuda" else (256,))
    ]
    while True:
        for matrix in matrices:
            torch.mm(matrix, matrix)
        if device == "cuda":
            torch.cuda.synchronize()
        started.set()


@contextmanager
def busy(device: torch.device) -> Iterator[None]:
    """Another process that loads the device."""
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=keep_busy, args=(device.type, started), daemon=True)
    process.start()
    try:
        assert started.wait(60), "the other process did not start"
        yield
    finally:
        process.kill()
        process.join()


def twice(size: Size, attention: Attention, device: torch.device, look_at: tuple[int, ...] = ()) -> tuple[Run, Run]:
    """Alone, and beside another process."""
    alone = train(size, attention, device, look_at)
    with busy(device):
        return alone, train(size, attention, device, look_at)


def report(name: str, runs: tuple[Run, Run]) -> dict[str, Any]:
    first, second = runs
    same = sum(a == b for a, b in zip(first.losses, second.losses, strict=True))
    print(f"{name}: loss {first.losses[0]:.4f} to {first.losses[-1]:.4f}")
    print(f"  beside another process {same} of {len(first.losses)} losses are the same; SHA-256 of losses and weights:")
    for run in runs:
        print(f"  {run.sha256}, {run.seconds:.1f} s")
    fields = ("losses", "sha256", "seconds")
    return {"name": name, "runs": [{field: getattr(run, field) for field in fields} for run in runs]}


def draw(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (curves, gaps) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for color, result in zip(("tab:blue", "tab:orange"), results, strict=True):
        first, second = (run["losses"] for run in result["runs"])
        curves.plot(first, color=color, label=f"{result['name']}, alone")
        curves.plot(second, color=color, linestyle="dotted", label="beside another process")
        gaps.plot([abs(a - b) for a, b in zip(first, second, strict=True)], color=color, label=result["name"])
    gaps.set_yscale("symlog", linthresh=1e-6)
    curves.set(xlabel="step", ylabel="loss, nats a byte", title="Two runs each")
    gaps.set(xlabel="step", title="Difference of the two runs' losses", ylim=(-2e-7, None))
    for axes in (curves, gaps):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def main(
    steps: Annotated[int | None, typer.Option(min=1, help="200 on a GPU, 4 elsewhere.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where to draw losses and their differences.")] = None,
    json: Annotated[Path | None, typer.Option(help="Where to write losses, digests and times.")] = None,
) -> None:
    """Trains twice, the second time beside a process that loads the device, and compares bytes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = ON_GPU if device.type == "cuda" else TINY
    size = replace(size, steps=steps or size.steps)
    parameters = sum(x.numel() for x in GPT(size).parameters())
    print(f"{parameters / 1e6:.2f}M parameters, {size.steps} steps of {size.tokens} bytes, on {device.type}")

    torch.use_deterministic_algorithms(True)
    ours = twice(size, fold, device, look_at=(0, size.steps // 2, size.steps - 1))
    results = [report("FoldAttention", ours)]
    print(f"  gradients of documents packed in another way, the same bytes: {ours[0].compared}")
    assert ours[0].sha256 == ours[1].sha256

    name, attention = peer(device)
    with warnings.catch_warnings():
        # With warn_only torch warns of its flash attention's backward, and leaves it as it is by default.
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        theirs = twice(size, attention, device)
    results.append(report(name, theirs))
    print(f"  {name}'s default backward: the two runs {'agree' if theirs[0].sha256 == theirs[1].sha256 else 'differ'}")

    if json is not None:
        about = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__}
        about |= {"size": asdict(size), "parameters": parameters, "documents_compared": ours[0].compared}
        json.write_text(json_text.dumps({**about, "results": results}, indent=1))
    if plot is not None:
        draw(results, plot)


if __name__ == "__main__":
    typer.run(main)
