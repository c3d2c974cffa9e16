"""Which pages of a cache hold which request's keys; a value: every change makes a new table."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fold_attention._lib import lib


def _integers(array: Any) -> list[int]:
    """Of an array of the library's. An empty one, as most are, is not even gone through, which takes long."""
    return [int(x) for x in array] if len(array) > 0 else []


class Room(NamedTuple):
    """A table with room for tokens."""

    table: "PageTable"
    sources: list[int]  #: pages to copy before the tokens are written
    destinations: list[int]
    same_pages: bool  #: every request has the pages that it had


class PageTable:
    """Requests, their lengths and their reference-counted pages (include/fold/page_table.h).

    Methods that change something return the changed table and leave this one as it is; a call that cannot be honoured
    raises ValueError.
    """

    def __init__(self, handle: Any, max_pages: int) -> None:
        self.handle = handle
        self.max_pages = max_pages

    @classmethod
    def create(cls, num_pages: int, page_size: int, max_len: int) -> "PageTable":
        return cls(lib.page_table_create(num_pages, page_size, max_len), -(-max_len // page_size))

    def _with(self, handle: Any) -> "PageTable":
        return PageTable(handle, self.max_pages)

    def add_request(self) -> tuple["PageTable", int]:
        handle, request = lib.page_table_add_request(self.handle)
        return self._with(handle), int(request)

    def free_request(self, request: int) -> "PageTable":
        return self._with(lib.page_table_free_request(self.handle, request))

    def fork(self, request: int, length: int) -> tuple["PageTable", int]:
        handle, child = lib.page_table_fork(self.handle, request, length)
        return self._with(handle), int(child)

    def truncate(self, requests: Sequence[int], lengths: Sequence[int]) -> "PageTable":
        return self._with(lib.page_table_truncate(self.handle, list(requests), list(lengths)))

    def extend(self, requests: Sequence[int], tokens: Sequence[int]) -> Room:
        """The table with room for the tokens, and what that took."""
        extended = lib.page_table_extend(self.handle, list(requests), list(tokens))
        # By index, as every step comes here and unpacking takes three times as long.
        return Room(self._with(extended[0]), _integers(extended[1]), _integers(extended[2]), bool(extended[3]))

    def requests(self) -> list[int]:
        """Ids in the order of addition."""
        return _integers(lib.page_table_requests(self.handle))

    def free_pages(self) -> int:
        return int(lib.page_table_free_pages(self.handle))

    def tensors(self, requests: Sequence[int]) -> tuple[Tensor, Tensor]:
        """block_table (requests, max_pages) int32, -1 past a request's pages, and lengths (requests,) int32."""
        block_table = torch.empty((len(requests), self.max_pages), dtype=torch.int32)
        lengths = torch.empty(len(requests), dtype=torch.int32)
        self.write(requests, block_table, lengths)
        return block_table, lengths

    def lengths(self, requests: Sequence[int]) -> Tensor:
        """(requests,) int32."""
        lengths = torch.empty(len(requests), dtype=torch.int32)
        lib.page_table_lengths(self.handle, list(requests), lengths)
        return lengths

    def write(self, requests: Sequence[int], block_table: Tensor, lengths: Tensor) -> None:
        """Fills in such tensors."""
        lib.page_table_write(self.handle, list(requests), block_table, lengths)
