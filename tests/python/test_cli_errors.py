"""What the command line refuses: one line that says what, what was got and what is allowed; nothing is written."""

import subprocess
import sys

import pytest
from cli_testing import decode_capture, refused, run, tensors

GOOD = tensors()


def damaged(path, how):
    data = decode_capture(path).read_bytes()
    path.write_bytes(
        {"truncated": data[:-1], "header": b"\xff" * 8 + data[8:], "empty": b"", "text": b"a capture\n" * 9}[how]
    )
    return path


@pytest.mark.parametrize("command", [("demo", "--capture"), ("bench", "decode", "--data")], ids=" ".join)
@pytest.mark.parametrize("how", ["truncated", "header", "empty", "text"])
def test_damaged_capture(capsys, tmp_path, command, how):
    path = damaged(tmp_path / "bad.safetensors", how)
    out = tmp_path / "out"
    target = ("--output", out) if command[0] == "demo" else ("--json", out)
    line = refused(capsys, *command, path, *target)
    assert str(path) in line
    assert "safetensors" in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"k": None}, "tensors=['q', 'v']; required: q, k, v"),
        ({"q": GOOD["q"].int()}, "q.dtype=torch.int32; allowed: bfloat16, float16 or float32"),
        ({"v": GOOD["v"].float()}, "v.dtype=torch.float32; allowed"),
        ({"q": GOOD["q"][0].clone()}, "q.ndim=2; allowed: 3"),
        ({"v": GOOD["v"][:, 1:].clone()}, "v.shape=(2, 299, 64); allowed: (2, 300, 64), as k"),
        ({"q": GOOD["q"][:, :3].clone()}, "heads=3; allowed: a multiple of kv_heads=2"),
        ({"q": GOOD["q"][:, :, :32].clone()}, "q.shape[-1]=32; allowed: 64, as k"),
        ({"q": GOOD["q"].repeat(200, 1, 1)}, "q.shape=(600, 4, 64); allowed: 1 to 300 steps"),
        ({"k": GOOD["k"] * float("nan")}, "k=NaN or Inf; allowed: finite numbers"),
        ({n: x[..., :40].clone() for n, x in GOOD.items()}, "head_dim=40; supported: 64, 128, 256"),
    ],
)
def test_wrong_tensors(capsys, tmp_path, changes, says):
    path = decode_capture(tmp_path / "bad.safetensors", **changes)
    assert says in refused(capsys, "bench", "decode", "--data", path)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"capture": "backward"}, "capture=backward; allowed: decode"),
        ({"scale": "large"}, "metadata.scale=large; allowed: a finite number other than 0"),
        ({"scale": "inf"}, "metadata.scale=inf; allowed"),
        ({"scale": "0"}, "metadata.scale=0; allowed"),
    ],
)
def test_wrong_metadata(capsys, tmp_path, metadata, says):
    path = decode_capture(tmp_path / "bad.safetensors", metadata)
    assert says in refused(capsys, "bench", "decode", "--data", path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("decode", "--depth", "deep"), "--depth=deep; allowed: none, or a number"),
        (("decode", "--depth", "nan"), "depth=nan; allowed: None or a finite number"),
        (("decode", "--bits", 7), "k_bits=7; supported: 16, 8, 4"),
        (("decode", "--data", "absent"), "--data=absent; allowed: synthetic, capture, or the path of a capture"),
        (("decode", "--head-dim", 80), "head_dim=80; supported: 64, 128, 256"),
        (("decode", "--heads", 5, "--kv-heads", 2), "heads=5; allowed: a multiple of kv_heads=2"),
        (("forward", "--dtype", "float8"), "--dtype=float8; allowed: bfloat16, float16, float32"),
        (("forward", "--head-dim", 257), "head_dim=257; 1 to 256"),
    ],
)
def test_wrong_options(capsys, arguments, says):
    small = ("--seqlen", 64, "--kv-heads", 1) if "--kv-heads" not in arguments else ("--seqlen", 64)
    assert says in refused(capsys, "bench", arguments[0], *small, *arguments[1:])


@pytest.mark.parametrize(
    "arguments", [("fold",), ("demo", "--batch", 0), ("bench", "decode", "--page", 1), ("capture",)]
)
def test_bad_usage(capsys, arguments):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert "Usage" in err


def test_folder_that_cannot_be_made(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    config = tmp_path / "file" / "config.json"
    status, _, err = run(capsys, "show-config", "--json", config)
    assert status == 1
    assert len(err.strip().splitlines()) == 1
    assert str(config.parent) in err


@pytest.mark.parametrize("module", ["typer", "matplotlib"])
def test_without_its_dependencies_one_line_says_so(module):
    code = f"import sys; sys.modules['{module}'] = None; from fold_attention.cli import main; sys.exit(main(['demo']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == f"fold-attention: needs {module}; pip install 'fold-attention[cli]'"
