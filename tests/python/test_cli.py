"""The commands that measure: what they report, on inputs small enough to check."""

import importlib.metadata
import json
import subprocess
import sys

import pytest
import torch
from cli_testing import decode_capture, run

import fold_attention
from fold_attention.cli import demo, problems, same_bits, timing

PROVENANCE = {"command", "date", "fold_attention", "source", "torch", "python", "system", "cpu", "isa", "threads"}


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch):
    """Times do not matter here: what is read to evict caches and to measure the memory is small."""
    monkeypatch.setattr(timing, "EVICT_BYTES", 1 << 12)
    monkeypatch.setattr(timing, "BANDWIDTH_BYTES", 1 << 20)


@pytest.fixture
def threads_of_torch():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_installed_as_a_script():
    scripts = importlib.metadata.entry_points(group="console_scripts", name="fold-attention")
    assert [script.value for script in scripts] == ["fold_attention.cli:main"]


def test_module_returns_the_status():
    done = subprocess.run(
        [sys.executable, "-m", "fold_attention.cli", "demo", "--capture", "absent"], capture_output=True
    )
    assert done.returncode == 2
    assert b"absent" in done.stderr


def test_every_option_is_explained():
    """`--help` says what each command does and what each of its options means."""
    import typer

    from fold_attention.cli.app import app

    def commands(command, name):
        for child_name, child in getattr(command, "commands", {}).items():
            yield from commands(child, f"{name} {child_name}")
        if not hasattr(command, "commands"):
            yield name, command

    found = dict(commands(typer.main.get_command(app), "fold-attention"))
    names = {"demo", "bench decode", "bench forward", "bench backward", "capture", "show-config"}
    assert set(found) == {f"fold-attention {name}" for name in names}
    for name, command in found.items():
        assert command.help, name
        assert [option.name for option in command.params if not option.help] == [], name


def test_show_config(capsys, tmp_path):
    status, out, _ = run(capsys, "show-config", "--json", tmp_path / "config.json")
    assert status == 0
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["fold_attention"] == fold_attention.__version__
    assert config["isa"] in ("portable", "avx2", "avx512")
    assert config["unsupported_backends"]["cpu"] is None
    assert config["unsupported_backends"]["cuda"] == fold_attention.supports("cache", device="cuda")[1]
    for text in (config["library"], config["isa"], "head dim", "64, 128, 256"):
        assert text in out


def test_demo(capsys, tmp_path):
    capture = decode_capture(tmp_path / "small.safetensors")
    status, out, _ = run(capsys, "demo", "--capture", capture, "--batch", 2, "--output", tmp_path / "out")
    assert status == 0
    assert (tmp_path / "out/demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    results = json.loads((tmp_path / "out/demo.json").read_text())
    assert results["provenance"].keys() >= PROVENANCE
    rows = {(r["bits"], r["tail"], r["depth"]): r for r in results["rows"] if "bits" in r}
    dense, cut = [None], [20, 16, 14, 12, 10]
    assert set(rows) == {(b, t, d) for b in (16, 8, 4) for t in (True, False) for d in (dense if t else []) + cut}
    others = {row["name"]: row for row in results["rows"] if "bits" not in row}
    plain = others["torch SDPA, enable_gqa"]
    assert rows[16, True, None]["error"] < plain["error"] < rows[4, True, None]["error"]
    assert rows[16, True, None]["dropped_mass"] == 0
    assert rows[16, False, 10]["dropped_mass"] > 0
    assert rows[16, True, 10]["bytes_read"] < rows[16, True, None]["bytes_read"] < plain["bytes_read"] == 1
    cache = fold_attention.FoldKVCache(1, 4, 2, 64, 300, tail=False)
    assert rows[16, False, 10]["cache_bytes_per_key"] == cache.storage.shape[1] / cache.page_size / 2
    assert all(row["median_s"] > 0 for row in (*rows.values(), plain))
    hashes = results["same_bits"]["small"]
    assert hashes["splits of the keys"].keys() == {"1", "4", "7", "33"}
    assert hashes["threads"].keys() == {"1", "2"}
    assert len({value for found in hashes.values() for value in found.values()}) == 1
    assert "equal" in out
    assert "DIFFERENT" not in out


def test_demo_fails_where_bits_differ(capsys, tmp_path, monkeypatch):
    count = iter(range(10**6))
    monkeypatch.setattr(same_bits, "sha256", lambda *_: str(next(count)))
    monkeypatch.setattr(demo, "DEPTHS", (None, 12))
    capture = decode_capture(tmp_path / "small.safetensors")
    status, out, _ = run(capsys, "demo", "--capture", capture, "--batch", 1, "--output", tmp_path)
    assert status == 1
    assert "DIFFERENT" in out


def test_hashes_see_every_byte():
    x = torch.zeros(2, 3)
    y = x.clone()
    y.view(torch.uint8)[1, 11] = 1
    assert same_bits.sha256(x) != same_bits.sha256(y)
    assert same_bits.sha256(x.t()) == same_bits.sha256(x.t().contiguous())


@pytest.mark.parametrize("path", problems.SHIPPED_DECODE, ids=lambda path: path.stem)
def test_shipped_decode_capture(path):
    """It says where it is from, and its queries, keys and values are those that gave the model's output."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata, out = file.metadata(), file.get_tensor("out")
    assert metadata.keys() >= {"model", "model_license", "model_weights", "text_source", "text_license", "cut"}
    problem = problems.load_decode(path)
    expected = torch.stack([problem.expected(step) for step in range(len(problem.lengths))])
    rounded = problems.relative_error(expected.bfloat16(), expected)
    assert problems.relative_error(out, expected) < 2 * rounded


@pytest.mark.parametrize("data", ["synthetic", "capture"])
def test_bench_decode(capsys, tmp_path, data, threads_of_torch):
    shape = ["--heads", 6, "--kv-heads", 2, "--head-dim", 64, "--batch", 2]
    source = "synthetic" if data == "synthetic" else decode_capture(tmp_path / "small.safetensors")
    options = [
        "--seqlen",
        700,
        "--depth",
        "none",
        "--depth",
        12,
        "--bits",
        16,
        "--bits",
        8,
        "--rounds",
        3,
        "--threads",
        1,
    ]
    json_path = tmp_path / "bench.json"
    status, out, _ = run(capsys, "bench", "decode", *shape, *options, "--data", source, "--json", json_path)
    assert status == 0
    results = json.loads(json_path.read_text())
    heads = 6 if data == "synthetic" else 4  # a capture brings its own
    assert results["problem"] | {"batch": 2, "heads": heads, "kv_heads": 2, "keys": 700} == results["problem"]
    assert results["provenance"]["threads"] == results["provenance"]["torch_threads"] == 1
    rows = {row["name"]: row for row in results["rows"]}
    fold = [name for name in rows if name.startswith("fold")]
    assert len(fold) == 4
    peers = [row for name, row in rows.items() if name.startswith("torch")]
    best, plain = min(row["median_s"] for row in peers), rows["torch SDPA, enable_gqa"]
    for name in (*fold, "torch SDPA, folded"):
        row = rows[name]
        assert row["speedup_over_best_torch"] * row["median_s"] == pytest.approx(best)
        assert row["speedup_over_plain_torch"] * row["median_s"] == pytest.approx(plain["median_s"])
        assert row["bandwidth"] * row["median_s"] == pytest.approx(row["bytes"])
        assert row["of_read_bandwidth"] == pytest.approx(row["bandwidth"] / results["read_bandwidth"])
        assert name in out
    assert plain["bytes"] == 2 * 2 * 700 * 64 * 4
    assert rows["fold, 16 bits, depth none"]["error"] < plain["error"] < rows["fp8 cache (E4M3, scale 1)"]["error"]


@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("data", ["synthetic", "capture"])
def test_bench_training(capsys, tmp_path, what, data):
    """Errors are judged as everywhere: 1.1 times torch's for outputs, 1.05 for gradients."""
    shape = ["--seqlen", 200, "--heads", 4, "--kv-heads", 2, "--head-dim", 64, "--batch", 2]
    json_path = tmp_path / "bench.json"
    status, _, _ = run(capsys, "bench", what, *shape, "--data", data, "--rounds", 2, "--json", json_path)
    assert status == 0
    results = json.loads(json_path.read_text())
    fold, torch_row = results["rows"]
    assert set(fold["errors"]) == ({"out"} if what == "forward" else {"dq", "dk", "dv"})
    for name, error in fold["errors"].items():
        assert 0 < error <= torch_row["errors"][name] * (1.1 if what == "forward" else 1.05)
    assert fold["speedup_over_torch"] * fold["median_s"] == pytest.approx(torch_row["median_s"])


def test_synthetic_logits_are_what_is_documented():
    problem = problems.synthetic_decode(1, 4096, 8, 2, 128)
    q, k = problem.q[0, 0].double(), problem.k[0].double()
    logits = torch.cat([rows @ keys.T for rows, keys in zip(q.chunk(2), k, strict=True)]) * problem.scale
    assert logits[:, 1:].std() == pytest.approx(3, rel=0.1)
    assert 0.1 < torch.softmax(logits, -1)[:, 0].mean() < 0.9
    assert torch.corrcoef(problem.q[:, 0, :4].double().flatten(2).flatten(0, 1))[0, 1] == pytest.approx(0.64, abs=0.2)


def test_repeated_capture(tmp_path):
    """--seqlen repeats a capture's keys, or cuts them."""
    path = decode_capture(tmp_path / "small.safetensors")
    once, longer, shorter = (problems.load_decode(path, 1, n) for n in (None, 700, 100))
    assert once.lengths == [298, 299, 300]
    assert longer.lengths == [700] * 3
    assert torch.equal(longer.k[0, :, 300:600], once.k[0])
    assert torch.equal(shorter.v[0], once.v[0, :, :100])
