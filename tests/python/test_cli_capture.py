"""`capture` and the recorder behind it, on tiny models with random weights."""

import subprocess
import sys

import pytest
import torch
from cli_testing import refused, run
from safetensors import safe_open

from fold_attention.cli import problems

transformers = pytest.importorskip("transformers")
from fold_attention.integrations.transformers_capture import record  # noqa: E402

SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
PROMPT, STEPS = 70, 5


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


@pytest.fixture(scope="module")
def folder(llama, tmp_path_factory):
    """The model with a tokenizer that makes a token of each character, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("models") / "tiny"
    llama.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token=chr(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    (path.parent / "text.txt").write_text("A young lady, accomplished and clever. " * 3)
    return path


def test_recorded_layers_are_what_the_model_computed(llama):
    ids = torch.arange(PROMPT) % 128
    layers, token_ids = record(llama, ids, STEPS, [0, 2])
    assert sorted(layers) == [0, 2]
    assert torch.equal(token_ids[:PROMPT], ids)
    for layer in layers.values():
        t = layer.tensors()
        assert t["q"].shape == t["out"].shape == (STEPS, 4, 64)
        assert t["k"].shape == t["v"].shape == (2, PROMPT + STEPS, 64)
        lengths = [PROMPT + 1 + step for step in range(STEPS)]
        problem = problems.DecodeProblem("", t["q"][:, None], t["k"][None], t["v"][None], lengths, layer.scale)
        expected = torch.stack([problem.expected(step) for step in range(STEPS)])
        bf16 = problems.relative_error(expected.bfloat16(), expected)
        assert problems.relative_error(t["out"], expected) < bf16  # the model runs in fp32


def test_keys_carry_their_rotary_embedding(llama):
    """Layer 0's keys: the projection of the normalised embeddings, rotated by transformers' own function."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    layers, token_ids = record(llama, torch.arange(PROMPT) % 128, STEPS, [0])
    block = llama.model.layers[0]
    with torch.no_grad():
        hidden = block.input_layernorm(llama.model.embed_tokens(token_ids[None]))
        k = block.self_attn.k_proj(hidden).view(1, -1, 2, 64).transpose(1, 2)
        cos, sin = llama.model.rotary_emb(hidden, torch.arange(len(token_ids))[None])
        rotated = apply_rotary_pos_emb(k, k, cos, sin)[1][0].double()
    recorded = layers[0].tensors()["k"]
    assert problems.relative_error(recorded, rotated) < problems.relative_error(rotated.bfloat16(), rotated)


def test_generated_tokens_are_the_models_own(llama):
    ids = torch.arange(PROMPT) % 128
    _, token_ids = record(llama, ids, STEPS, [1])
    for length in range(PROMPT, PROMPT + STEPS):
        with torch.no_grad():
            assert int(llama(token_ids[None, :length]).logits[0, -1].argmax()) == token_ids[length]
    sampled = [record(llama, ids, STEPS, [1], temperature=2.0, seed=seed)[1].tolist() for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_the_model_is_left_as_it_was(llama):
    before = llama.config._attn_implementation
    for layers in ([0], [9]):
        try:
            record(llama, torch.arange(5), 1, layers)
        except ValueError:
            assert layers == [9]
        assert llama.config._attn_implementation == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((torch.arange(5), 1, [3]), r"layers=\[3\]; allowed: 0 to 2"),
        ((torch.arange(5), 1, []), "layers=none; allowed: 0 to 2"),
        ((torch.arange(0), 1, [0]), r"token_ids.shape=\(0,\); allowed: \(P,\), at least one token"),
        ((torch.arange(5), 0, [0]), "steps=0; at least 1"),
    ],
)
def test_refused(llama, arguments, says):
    with pytest.raises(ValueError, match=says):
        record(llama, *arguments)


def test_sliding_window_is_refused():
    config = transformers.MistralConfig(**SIZES, sliding_window=16)
    model = transformers.MistralForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"layer 0: keys=16; allowed: all 41, no sliding window"):
        record(model, torch.arange(40), 1, [0])


def test_command(capsys, folder, tmp_path):
    options = ["--layers", "0,2", "--prompt-tokens", PROMPT, "--tokens", STEPS, "--output", tmp_path]
    status, out, _ = run(capsys, "capture", folder, folder.parent / "text.txt", *options)
    assert status == 0
    paths = [tmp_path / f"decode_tiny_L{index:02d}.safetensors" for index in (0, 2)]
    assert sorted(tmp_path.iterdir()) == paths
    for path in paths:
        assert str(path) in out
        problem = problems.load_decode(path)
        assert problem.shape == {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 64, "keys": PROMPT + STEPS}
        assert problem.q.dtype == torch.bfloat16
        assert problem.scale == 0.125
        with safe_open(path, "pt") as file:
            metadata, token_ids = file.metadata(), file.get_tensor("token_ids")
        assert metadata["prompt_len"] == str(PROMPT)
        assert "".join(map(chr, token_ids[:14])) == "A young lady, "
    status, out, _ = run(capsys, "bench", "decode", "--data", paths[0], "--rounds", 1)
    assert status == 0


def test_command_refuses(capsys, folder, tmp_path):
    text = folder.parent / "text.txt"
    line = refused(capsys, "capture", folder, text, "--layers", "first", "--output", tmp_path / "out")
    assert '--layers=first; allowed: "all", or numbers from 0 to 2' in line
    line = refused(capsys, "capture", folder, text, "--dtype", "int8", "--output", tmp_path / "out")
    assert "--dtype=int8; allowed: bfloat16, float16, float32" in line
    assert not (tmp_path / "out").exists()


def test_without_transformers_one_line_says_so(tmp_path):
    (tmp_path / "text.txt").write_text("A text")
    code = (
        "import sys; sys.modules['transformers'] = None; from fold_attention.cli import main; "
        f"sys.exit(main(['capture', 'model', {str(tmp_path / 'text.txt')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    expected = "fold-attention: transformers=not installed; recording a model needs it: pip install transformers"
    assert done.stderr.strip() == expected
