"""First calls in eager mode load nothing that takes seconds."""

import subprocess
import sys

PROGRAM = """
import sys
import torch
from fold_attention import FoldKVCache, fold_attn_func

cache = FoldKVCache(1, 4, 2, 64, 256, depth=12, device="cpu")
k = torch.randn(1, 70, 2, 64)
cache.write_prompt(k, k)
cache.append(k[:, 0], k[:, 0])
cache.decode(torch.randn(1, 4, 64), k[:, 0], k[:, 0])
cache.attend(torch.randn(1, 1, 4, 64), return_info=True)
q = torch.randn(1, 8, 4, 64, requires_grad=True)
sinks = torch.nn.Parameter(torch.randn(4))
fold_attn_func(q, k, k, causal=True, sinks=sinks).sum().backward()
assert q.grad is not None and sinks.grad is not None
with torch.no_grad():
    fold_attn_func(q, k, k, out=torch.empty_like(q))
print("torch._dynamo" in sys.modules)
"""


def test_first_calls_do_not_import_the_compiler():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
