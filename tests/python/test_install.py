"""The installed package: what it links, what it needs at import, and that one build serves every Python and torch."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fold_attention

PACKAGE = Path(fold_attention.__file__).parent
LIBRARY = next(p for p in (Path(d) / "_fold.so" for d in fold_attention.__path__) if p.is_file())


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if k in ("PYTHONPATH", "LD_LIBRARY_PATH", "HOME")}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=base | env, check=False)


def readelf(*flags: str) -> str:
    return subprocess.run(["readelf", *flags, str(LIBRARY)], capture_output=True, text=True, check=True).stdout


def test_version_is_the_one_of_the_distribution():
    assert fold_attention.__version__ == importlib.metadata.version("fold-attention")


def test_without_torch_one_line_says_so():
    """FA#1644: no torch: a one-line reason."""
    done = python("import sys; sys.modules['torch'] = None; import fold_attention")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: fold_attention needs torch >= 2.9; install the build of it that suits your machine"


def test_library_links_no_framework():
    """FA#1644: one shared library for every torch and Python version: it links neither and uses no symbol of theirs."""
    needed = re.findall(r"NEEDED.*\[(.+)\]", readelf("-d"))
    assert "libtvm_ffi.so" in needed
    assert not [n for n in needed if re.match(r"lib(torch|c10|python|cuda|cudart|nv)", n)]
    symbols = readelf("--dyn-syms", "--wide")
    assert not re.search(r"\bUND _?Py[A-Z_]|UND .*(c10|at)::|UND _ZN?K?(2at|3c10|5torch)", symbols)


def test_library_exports_its_functions_alone():
    """Nothing else is visible, so that a libfold.so in the same process is neither used nor shadowed by it."""
    defined = re.findall(r"(?:GLOBAL|WEAK|UNIQUE)\s+DEFAULT\s+\d+\s+(\S+)", readelf("--dyn-syms", "--wide"))
    assert "__tvm_ffi_version" in defined
    assert [s for s in defined if not s.startswith("__tvm_ffi_")] == []


def test_wheel_is_tagged_for_any_python():
    wheel = importlib.metadata.distribution("fold-attention").read_text("WHEEL")
    assert wheel is not None
    assert re.search(r"^Tag: py3-none-", wheel, re.MULTILINE)


@pytest.mark.parametrize("torch_api", [True, False], ids=["torch", "torch without the C exchange API"])
def test_import_needs_no_compiler_and_no_gpu(torch_api):
    """FI#1904, DeepGEMM#427, nanochat#436: with an empty PATH and no visible GPU, import and use still work."""
    hide = "" if torch_api else "del torch.Tensor.__dlpack_c_exchange_api__; "
    done = python(
        f"import warnings; warnings.simplefilter('error'); import torch; {hide}"
        "import fold_attention as f; f.set_num_threads(1); print(f.get_num_threads())",
        PATH="",
        CUDA_VISIBLE_DEVICES="",
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
