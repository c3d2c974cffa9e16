"""`fold-attention capture`: records a transformers model's queries, keys and values into capture files."""

import datetime
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from safetensors.torch import save_file

import fold_attention
from fold_attention.cli import report
from fold_attention.cli.bench_training import DTYPES
from fold_attention.errors import bad_value

if TYPE_CHECKING:
    from fold_attention.integrations.transformers_capture import Layer


def capture(
    model: Annotated[str, typer.Argument(help="A model of transformers: a folder, or a name on the hub.")],
    text: Annotated[Path, typer.Argument(help="The prompt, a UTF-8 text file.", exists=True, dir_okay=False)],
    layers: Annotated[str, typer.Option(help='Layers to record, from 0: "0,5,17", or "all".')] = "all",
    prompt_tokens: Annotated[int | None, typer.Option(help="Cut the prompt to that many tokens.", min=1)] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate: the steps of the capture.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="Of the sampling; 0 takes the likeliest token.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32: of the model, and of what is recorded.")
    ] = "bfloat16",
    output: Annotated[Path, typer.Option(help="Folder for the files, one per layer.", file_okay=False)] = Path("out"),
) -> None:
    """Record what a model's attention sees while it generates, one file per layer, for `demo` and `bench decode`.

    Queries and keys are taken after the rotary embedding, where transformers calls its attention function; the model
    itself runs as it is, with torch's attention. A file holds k, v (KV heads, L, head dim), q, out (steps, heads, head
    dim) and token_ids (L,); step t sits at position L - steps + t and sees the keys up to its own. Layers with a
    sliding window, a softcap or sinks are refused.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        from fold_attention.integrations.transformers_capture import record
    except ImportError:
        raise ValueError("transformers=not installed; recording a model needs it: pip install transformers") from None
    if dtype not in DTYPES:
        raise bad_value("--dtype", dtype, f"allowed: {', '.join(DTYPES)}")
    count = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
    chosen = _layers(layers, count)
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = text.read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(words, add_special_tokens=False)["input_ids"], dtype=torch.int32)[:prompt_tokens]
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
    recorded, token_ids = record(loaded, ids, tokens, chosen, temperature, seed)
    about = {
        "capture": "decode",
        "model": Path(model).name if Path(model).is_dir() else model,
        "n_layers": str(count),
        "prompt_len": str(len(ids)),
        "steps": str(tokens),
        "seqlen_total": str(len(token_ids)),
        "text": f"{text.name}, sha256 {hashlib.sha256(words.encode()).hexdigest()}",
        "sampling": f"temperature {temperature}, seed {seed}",
        "compute_dtype": dtype,
        "visible_keys": "step t is at position prompt_len + t and sees keys [0, prompt_len + t]",
        "recorded": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "recorder": f"fold-attention {fold_attention.__version__}, torch {torch.__version__}",
    }
    output.mkdir(parents=True, exist_ok=True)
    console = report.console()
    stem = Path(model).name
    for index, layer in sorted(recorded.items()):
        path = output / f"decode_{stem}_L{index:02d}.safetensors"
        tensors = layer.tensors() | {"token_ids": token_ids.to(torch.int32)}
        save_file(tensors, path, about | _of_layer(index, layer, tensors))
        console.print(f"{path}: {len(ids)} prompt tokens, {tokens} steps", markup=False)


def _layers(text: str, count: int) -> list[int]:
    if text == "all":
        return list(range(count))
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise bad_value(
            "--layers", text, f'allowed: "all", or numbers from 0 to {count - 1} with commas between'
        ) from None


def _of_layer(index: int, layer: "Layer", tensors: dict[str, Any]) -> dict[str, str]:
    heads, kv_heads, dim = tensors["q"].shape[1], tensors["k"].shape[0], tensors["k"].shape[2]
    return {
        "layer": str(index),
        "heads": str(heads),
        "kv_heads": str(kv_heads),
        "head_dim": str(dim),
        "scale": repr(layer.scale),
        "gqa": f"query head h reads kv head h // {heads // kv_heads}",
    }
