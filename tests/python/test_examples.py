"""The examples run as a newcomer runs them: each asserts what it shows."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("[0-9][0-9]_*.py"))


def test_the_ladder_is_complete():
    assert [int(path.name[:2]) for path in EXAMPLES] == list(range(1, 10))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    run = subprocess.run([sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout
