"""When a call goes through its torch operator, and when to the library by itself.

An operator's dispatch takes the host longer than all the launches of a decoding step, and its first use imports torch's
compiler, which takes seconds. So it is left to those who look at operators: torch.compile and other tracers, and modes.
"""

import torch
from torch import Tensor


def is_watched(*tensors: Tensor | None) -> bool:
    """Whether somebody looks at operators, or a tensor has no memory of its own."""
    for tensor in tensors:
        if tensor is not None and type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            return True
    if torch.compiler.is_compiling():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether a gradient could be asked for."""
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return torch.is_grad_enabled()
    return False
