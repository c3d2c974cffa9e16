"""Workspaces of eager steps on a GPU, kept from call to call.

What a stream runs it runs in order, so one workspace serves all of its steps and spares each an allocation. A step that
is captured takes one of its graph's pool.
"""

import torch
from torch import Tensor

_LARGEST = 64 << 20  #: bytes; for steps that need more an allocation is nothing
_kept: dict[tuple[int, int], Tensor] = {}  # of a device and stream


def kept(on: Tensor) -> Tensor | None:
    """The workspace of the current stream of a tensor's device, if there is one and the step may use it."""
    if not on.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    return _kept.get(_current_stream(on))


def keep(on: Tensor, wanted: int) -> None:
    """A workspace of `wanted` bytes for the next steps; 0: the last one did."""
    if wanted == 0 or wanted > _LARGEST or torch.cuda.is_current_stream_capturing():
        return
    _kept[_current_stream(on)] = on.new_empty(wanted, dtype=torch.uint8)


def _current_stream(on: Tensor) -> tuple[int, int]:
    device = on.get_device()
    return device, torch._C._cuda_getCurrentRawStream(device)
