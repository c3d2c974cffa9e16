"""Records what a transformers model's attention layers are given: queries, keys and values after RoPE."""

import inspect
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fold_attention.errors import bad_value

try:
    from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
except ImportError:
    raise ImportError("recording a model needs transformers >= 4.56; pip install transformers") from None

NAME = "fold_attention_capture"


@dataclass
class Layer:
    """One layer's decode steps. Step t sits at position L - steps + t and sees keys up to its own."""

    scale: float
    q: list[Tensor] = field(default_factory=list)  # each (H, D)
    out: list[Tensor] = field(default_factory=list)  # each (H, D): the model's own output
    k: Tensor | None = None  # (HK, L, D), as of the last step
    v: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        assert self.k is not None
        assert self.v is not None
        named = {"q": torch.stack(self.q), "out": torch.stack(self.out), "k": self.k, "v": self.v}
        return {name: tensor.cpu().contiguous() for name, tensor in named.items()}


class _Recorder:
    """While set, steps of one token are noted for the chosen layers."""

    current: "_Recorder | None" = None

    def __init__(self, layers: Collection[int]) -> None:
        self.chosen = set(layers)
        self.layers: dict[int, Layer] = {}
        self.position: int | None = None  # of the step's token; None while the prompt is read

    def note(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scaling: float | None, **extra: Any
    ) -> None:
        index = module.layer_idx
        if self.position is None or index not in self.chosen:
            return
        for name in ("softcap", "s_aux"):
            if extra.get(name) is not None:
                raise bad_value(f"layer {index}: {name}", "set", "allowed: plain softmax attention")
        if k.shape[2] != self.position + 1:
            raise bad_value(f"layer {index}: keys", k.shape[2], f"allowed: all {self.position + 1}, no sliding window")
        if v.shape != k.shape:
            raise bad_value(f"layer {index}: v.shape", tuple(v.shape), f"allowed: {tuple(k.shape)}, as k")
        scale = q.shape[3] ** -0.5 if scaling is None else float(scaling)
        layer = self.layers.setdefault(index, Layer(scale))
        layer.q.append(q[0, :, 0].clone())
        layer.out.append(out[0, 0].clone())
        layer.k, layer.v = k[0], v[0]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if _Recorder.current is not None:
        noted = {name: options.get(name) for name in ("scaling", "softcap", "s_aux")}
        _Recorder.current.note(module, query, key, value, out, **noted)
    return out, None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@torch.no_grad()
def record(
    model: Any,
    token_ids: Tensor,
    steps: int,
    layers: Collection[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[dict[int, Layer], Tensor]:
    """Reads a prompt, generates `steps` tokens, and records the chosen layers while their tokens are read back in.

    Args:
        model: a causal language model of transformers, in evaluation mode as `from_pretrained` leaves it.
        token_ids: (P,) integers, the prompt.
        temperature: of the sampling; 0 takes the likeliest token.

    Returns:
        The layers by index, and token_ids (P + steps,): the prompt and the generated tokens.
    """
    count = model.config.get_text_config().num_hidden_layers
    wrong = sorted(index for index in layers if not 0 <= index < count)
    if wrong or not layers:
        raise bad_value("layers", wrong or "none", f"allowed: 0 to {count - 1}")
    if token_ids.ndim != 1 or not len(token_ids):
        raise bad_value("token_ids.shape", tuple(token_ids.shape), "allowed: (P,), at least one token")
    if steps < 1:
        raise bad_value("steps", steps, "at least 1")
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    recorder = _Recorder.current = _Recorder(layers)
    generator = torch.Generator().manual_seed(seed)
    try:
        tokens = token_ids.long().tolist()
        options = _call_options(model)
        logits = model(token_ids.long()[None].to(model.device), **options).logits
        for _ in range(steps):
            tokens.append(_sample(logits[0, -1], temperature, generator))
            recorder.position = len(tokens) - 1
            logits = model(torch.tensor([tokens[-1:]], device=model.device), **options).logits
    finally:
        _Recorder.current = None
        model.set_attn_implementation(before)
    missing = sorted(set(layers) - set(recorder.layers))
    if missing:
        raise bad_value(
            "layers", missing, "allowed: layers whose attention goes through transformers' AttentionInterface"
        )
    return recorder.layers, torch.tensor(tokens)


def _call_options(model: Any) -> dict[str, Any]:
    """A cache, under the name this version of transformers gives it; of a prompt's logits only the last are needed."""
    known = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"cache" if "cache" in known else "past_key_values": DynamicCache(config=model.config)}
    return options | {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in known else {})


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    weights = torch.softmax(logits.double().cpu() / temperature, -1)
    return int(torch.multinomial(weights, 1, generator=generator))
