"""How many threads the CPU backend uses; no result depends on it."""

from fold_attention._lib import lib


def set_num_threads(n: int) -> None:
    """Use `n` threads (1 to 4096) in every later call, from any Python thread."""
    lib.set_num_threads(n)


def get_num_threads() -> int:
    """Threads of the next call: what `set_num_threads` set, at first OpenMP's own default (OMP_NUM_THREADS)."""
    return int(lib.get_num_threads())
