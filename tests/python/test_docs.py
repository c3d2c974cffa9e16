"""What the pages say is so: their Python runs, the files and commands they name exist, their pictures are current."""

import importlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
FOLDERS = ("benchmarks", "bindings", "cmake", "docs", "examples", "include", "python", "scripts", "src", "tests")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_blocks_run(page):
    """In order, in one namespace, as a reader would type them."""
    namespace: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)


def test_the_readme_has_python():
    assert len(blocks(ROOT / "README.md", "python")) >= 3


def test_the_readmes_cpp_is_the_example():
    """ctest builds and runs it (examples/cpp/CMakeLists.txt)."""
    assert blocks(ROOT / "README.md", "cpp") == [(ROOT / "examples/cpp/first_steps.cpp").read_text()]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_pages_name_exist(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = (link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link)
    missing = {link for link in links if not (page.parent / link).exists()}
    paths = re.findall(r"`([\w.-]+/[\w./-]*)`", text)
    missing |= {path for path in paths if path.split("/")[0] in FOLDERS and not (ROOT / path).exists()}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_that_pages_name_exist(page):
    text = page.read_text()
    targets = set(re.findall(r"^([\w-]+(?: [\w-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets = {target for line in targets for target in line.split()}
    named = set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE))
    assert named <= targets
    named = set(re.findall(r"`fold-attention ([a-z][\w-]*)", text))
    if named:
        typer = pytest.importorskip("typer")
        commands = importlib.import_module("fold_attention.cli.app").app
        assert named <= set(typer.main.get_command(commands).commands)


def test_the_readmes_numbers_are_the_accuracy_pages_means():
    def rows(text: str) -> list[tuple[str, str]]:
        """Name and last number of each row."""
        return re.findall(r"^\| ([\w, ]+?) \|.* ([\d.e-]+) \|$", text, re.MULTILINE)

    errors, read = re.split(r"\*\*Bytes read, 16 bits\*\*", (ROOT / "docs/accuracy.md").read_text())
    errors, read = dict(rows(errors)), dict(rows(read.split("**", 1)[0]))
    short = re.findall(
        r"^\| (torch, bf16|depth \w+) \| (\S+) \| (\S+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(short) == 5
    assert short == [(name, errors[name], read.get(name, "1")) for name, _, _ in short]


def test_the_picture_is_what_its_script_draws():
    images = ROOT / "docs/images"
    drawing = runpy.run_path(str(images / "draw_planes.py"))["drawing"]()
    assert (images / "planes.svg").read_text() == drawing
