"""FoldAttention: attention with a declared softmax reference, the same bits for any scheduling."""

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise ImportError("fold_attention needs torch >= 2.9; install the build of it that suits your machine") from None

from fold_attention._lib import lib as _library
from fold_attention.attention import fold_attn_func, fold_attn_varlen_func
from fold_attention.threads import get_num_threads, set_num_threads

__version__: str = _library.version()

__all__ = ["fold_attn_func", "fold_attn_varlen_func", "get_num_threads", "set_num_threads"]
