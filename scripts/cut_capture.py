"""Cuts a capture to some KV heads (with their query heads) and its first steps or tokens: a smaller problem, as valid.

    python scripts/cut_capture.py decode_prose_L05.safetensors OUTPUT --kv-heads 1 --first 16

A decode capture keeps its whole prompt and the first steps. A training capture keeps the first tokens: causal queries
see no later key, so the rows of q and dout that remain are a backward problem of their own.
"""

import argparse
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file


def cut_decode(tensors, metadata, heads, kv_heads, first):
    steps, prompt = tensors["q"].shape[0], int(metadata["prompt_len"])
    if not 0 < first <= steps:
        raise SystemExit(f"--first={first}; allowed: 1 to {steps}, the steps of this capture")
    for name in ("q", "out"):
        tensors[name] = tensors[name][:first, heads]
    for name in ("k", "v"):
        tensors[name] = tensors[name][kv_heads, : prompt + first]
    tensors["token_ids"] = tensors["token_ids"][: prompt + first]
    metadata.update(steps=str(first), seqlen_total=str(prompt + first))
    metadata.pop("generated_text", None)  # of more steps than these
    return f"first {first} of {steps} steps"


def cut_training(tensors, metadata, heads, kv_heads, first):
    tokens = tensors["q"].shape[0]
    if not 0 < first <= tokens:
        raise SystemExit(f"--first={first}; allowed: 1 to {tokens}, the tokens of this capture")
    for name in ("q", "out", "dout"):
        tensors[name] = tensors[name][:first, heads]
    for name in ("k", "v"):
        tensors[name] = tensors[name][:first, kv_heads]
    metadata.update(seqlen=str(first))
    for name in ("loss", "grad_norm", "torch_cpu_bf16_vs_float64"):  # of all tokens
        metadata.pop(name, None)
    return f"first {first} of {tokens} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--kv-heads", type=int, nargs="+", required=True)
    parser.add_argument("--first", type=int, required=True, help="steps (decode) or tokens (training) to keep")
    arguments = parser.parse_args()

    with safe_open(arguments.source, "pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    all_kv_heads = int(metadata["kv_heads"])
    group = int(metadata["heads"]) // all_kv_heads
    if not all(0 <= h < all_kv_heads for h in arguments.kv_heads):
        raise SystemExit(f"--kv-heads={arguments.kv_heads}; allowed: 0 to {all_kv_heads - 1}")
    heads = [h * group + i for h in arguments.kv_heads for i in range(group)]
    cut = cut_decode if metadata["capture"] == "decode" else cut_training
    what = cut(tensors, metadata, heads, arguments.kv_heads, arguments.first)

    metadata["cut"] = f"KV heads {arguments.kv_heads} of {all_kv_heads} with their query heads; {what}"
    metadata["heads"], metadata["kv_heads"] = str(len(heads)), str(len(arguments.kv_heads))
    metadata.pop("model_out_vs_float64", None)
    save_file({name: t.contiguous() for name, t in tensors.items()}, arguments.output, metadata)


if __name__ == "__main__":
    main()
