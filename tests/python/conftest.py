"""Settings of the whole Python suite."""

import os

import hypothesis
import pytest
import torch

import fold_attention

# Examples are drawn from a fixed seed in CI, so that a failure there is a failure everywhere.
hypothesis.settings.register_profile("default", deadline=None, max_examples=25, print_blob=True)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("default"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def _fresh_state():
    """Every test starts from the same random state and leaves the number of threads as it was."""
    torch.manual_seed(0)
    threads = fold_attention.get_num_threads()
    yield
    fold_attention.set_num_threads(threads)
