"""FoldAttention: attention with a declared softmax reference, the same bits for any scheduling."""

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise ImportError("fold_attention needs torch >= 2.9; install the build of it that suits your machine") from None

from fold_attention._lib import lib as _library
from fold_attention.attention import fold_attn_func, fold_attn_varlen_func
from fold_attention.decode import Partial, add_partials, finish, fold_attn_with_kvcache, partial_attention
from fold_attention.kv_cache import FoldKVCache
from fold_attention.support import supports
from fold_attention.threads import get_num_threads, set_num_threads

__version__: str = _library.version()

__all__ = [
    "FoldKVCache",
    "Partial",
    "add_partials",
    "finish",
    "fold_attn_func",
    "fold_attn_varlen_func",
    "fold_attn_with_kvcache",
    "get_num_threads",
    "partial_attention",
    "set_num_threads",
    "supports",
]
