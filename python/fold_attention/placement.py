"""Where a cache lies: its device, its memory, and what the host knows of it."""

import numpy as np
import torch
from torch import Tensor

from fold_attention.errors import bad_value
from fold_attention.support import supports


def chosen_device(device: torch.device | str | None) -> torch.device:
    """The device of a cache; None: the current CUDA device where its backend runs, else the CPU."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if _cuda_runs() else torch.device("cpu")
    chosen = torch.device(device)
    yes, reason = supports("cache", device=chosen)
    if not yes:
        raise TypeError(reason)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def _cuda_runs() -> bool:
    return torch.cuda.is_available() and supports("cache", device="cuda")[0]


def page_pool(pages: int, page_bytes: int, device: torch.device) -> Tensor:
    """(pages, page_bytes) uint8. On the CPU memory is committed where it is first touched, large pools in pieces of up
    to 2 MB: numpy asks for large pages."""
    alignment = 128
    try:
        if device.type != "cpu":
            return torch.zeros((pages, page_bytes), dtype=torch.uint8, device=device)
        memory = np.zeros(pages * page_bytes + alignment, dtype=np.uint8)
    except (MemoryError, torch.OutOfMemoryError):
        raise bad_value("num_pages", pages, f"memory for that many pages of {page_bytes} bytes on {device}") from None
    start = -memory.ctypes.data % alignment
    return torch.from_numpy(memory)[start : start + pages * page_bytes].view(pages, page_bytes)


def on_host(storage: Tensor, block_table: Tensor) -> Tensor:
    """The pool on the CPU, with the pages that block_table (on the CPU) names."""
    if storage.device.type == "cpu":
        return storage
    pool = page_pool(storage.shape[0], storage.shape[1], torch.device("cpu"))
    pages = torch.unique(block_table[block_table >= 0]).long()
    pool[pages] = storage[pages.to(storage.device)].cpu()
    return pool


class HostAndDevice:
    """A block table and lengths, (B, max_pages) and (B,) int32, as the host made them and on the cache's device, where
    they are updated in place without waiting for it."""

    def __init__(self, block_table: Tensor, lengths: Tensor, device: torch.device) -> None:
        self.host = (block_table, lengths)
        same = device.type == "cpu"
        self.device = self.host if same else (block_table.to(device), lengths.to(device))

    def update(self, block_table: Tensor, lengths: Tensor) -> None:
        """New ones of the same shape; what is as it was is not copied."""
        for there, here, new in zip(self.device, self.host, (block_table, lengths), strict=True):
            if here is new or torch.equal(here, new):
                continue
            here.copy_(new)
            if there is not here:
                there.copy_(here, non_blocking=True)
