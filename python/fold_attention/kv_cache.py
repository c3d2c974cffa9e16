"""A paged KV cache of nested planes, and the requests that live in it."""

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fold_attention import decode_ops
from fold_attention._lib import lib
from fold_attention.decode import (
    Window,
    fold_attn_with_kvcache,
    require_depth,
    require_device,
    require_scale,
    require_tensor,
    window_left,
)
from fold_attention.errors import bad_type, bad_value, whole
from fold_attention.page_table import PageTable
from fold_attention.placement import HostAndDevice, chosen_device, on_host, page_pool

MOST_DEPTHS = 1024  # kept by a cache


class Extended(NamedTuple):
    """A page table with room for new tokens of some requests."""

    table: PageTable
    host: tuple[Tensor, Tensor]  #: block table and lengths of these requests, the tokens included
    block_table: Tensor  #: on the cache's device


class FoldKVCache:
    """Keys and values of many requests, in pages of one pool.

    Requests are named by ids; every method that takes `ids` uses all requests, in the order of their addition, when it
    is left out. A call that cannot be honoured raises ValueError or TypeError as *what=got; allowed* and leaves the
    cache as it was. What is cached carries no gradient.
    """

    def __init__(
        self,
        batch: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        max_len: int,
        depth: float | None = None,
        v8: bool = False,
        page_size: int = 256,
        tail: bool = True,
        *,
        bits: int | tuple[int, int] = 16,
        num_pages: int | None = None,
        softmax_scale: float | None = None,
        sinks: Tensor | None = None,
        window_size: Window = (-1, -1),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            batch: requests made with the cache; 0 where the caller manages the pages, or adds requests later.
            n_heads, n_kv_heads: query heads, 1 to 64 per KV head.
            head_dim: 64, 128 or 256.
            max_len: most keys a request may hold.
            depth: default of every call; see `fold_attn_with_kvcache`.
            v8: keep V in 8 bits, whatever `bits` says of it.
            page_size: keys a page, a multiple of 64 from 64 to 1024.
            tail: keep what stands in for V that a depth leaves unread (about 4 % more memory).
            bits: bits an element, 16, 8 or 4, or a pair for K and V.
            num_pages: pages of the pool; by default enough for `batch` requests of `max_len` keys.
            softmax_scale: 1 / sqrt(head_dim) by default.
            sinks: (n_heads,) one extra logit per head (natural log), in the denominator only.
            window_size: (left, right): keys before its own that a row sees; right is without effect.
            device: "cpu" or "cuda"; by default CUDA where there is one.
            dtype: dtype of outputs where a call does not say; None: that of q.
        """
        self.device = chosen_device(device)
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise bad_type("dtype", dtype, "allowed: None, torch.float32, torch.bfloat16 or torch.float16")
        self.dtype = dtype
        batch, max_len, page_size = whole("batch", batch), whole("max_len", max_len), whole("page_size", page_size)
        n_heads, n_kv_heads = whole("n_heads", n_heads), whole("n_kv_heads", n_kv_heads)
        head_dim = whole("head_dim", head_dim)
        pair = tuple(bits) if isinstance(bits, (tuple, list)) else (bits, bits)
        if len(pair) != 2:
            raise bad_value("bits", bits, "allowed: 16, 8 or 4, or a pair for K and V")
        pair = (whole("bits", pair[0]), whole("bits", pair[1]))
        if not isinstance(tail, int):
            raise bad_type("tail", type(tail).__name__, "allowed: True or False")
        k_bits, v_bits = pair[0], min(pair[1], 8) if v8 else pair[1]
        require_depth(depth)
        require_scale(softmax_scale)
        if sinks is not None:
            require_tensor("sinks", sinks)
            sinks = sinks.detach().to(self.device, torch.float32).contiguous()
            if sinks.ndim != 1:
                raise bad_value("sinks.ndim", sinks.ndim, "allowed: 1, (n_heads,)")
        self.n_heads, self.n_kv_heads, self.head_dim, self.max_len = n_heads, n_kv_heads, head_dim, max_len
        self.page_size, self.bits, self.tail = page_size, (k_bits, v_bits), tail
        self.depth, self.softmax_scale, self.sinks = depth, softmax_scale, sinks
        self.window_left = window_left(window_size)
        self.layout = [n_kv_heads, head_dim, page_size, k_bits, v_bits, int(tail)]
        if num_pages is not None and whole("num_pages", num_pages) < 1:
            raise bad_value("num_pages", num_pages, "allowed: None or at least 1")
        self.num_pages = int(lib.cache_check_options(self.layout, *self._options(batch, num_pages or 0)))
        self.storage = page_pool(self.num_pages, lib.page_bytes(self.layout), self.device)
        self._depths: dict[float, Tensor] = {}
        self._table = PageTable.create(self.num_pages, page_size, max_len)
        self._requests: list[int] = []
        self._tables = HostAndDevice(*self._table.tensors([]), self.device)
        table = self._table
        for _ in range(batch):
            table, _id = table.add_request()
        self._adopt(table)

    # Requests

    @property
    def requests(self) -> list[int]:
        """Ids of the requests, in the order of their addition."""
        return list(self._requests)

    @property
    def lengths(self) -> list[int]:
        """Keys that each request holds."""
        return [int(n) for n in self._tables.host[1].tolist()]

    @property
    def free_pages(self) -> int:
        """Pages that no request holds."""
        return self._table.free_pages()

    def add_request(self) -> int:
        """A new request without keys; returns its id. Ids are never used twice."""
        table, request = self._table.add_request()
        self._adopt(table)
        return request

    def free_request(self, request: int) -> None:
        """Gives the pages back that no other request shares; the id is no longer known."""
        self._adopt(self._table.free_request(whole("request", request)))

    def fork(self, request: int, length: int | None = None) -> int:
        """A new request that shares the first `length` keys of another (None: all); returns its id.

        Shared pages are stored once, and copied when one of the requests writes to them.
        """
        kept = -1 if length is None else whole("length", length)
        if length is not None and kept < 0:
            raise bad_value("length", length, "at least 0")
        table, child = self._table.fork(whole("request", request), kept)
        self._adopt(table)
        return child

    def truncate(self, lengths: int | Sequence[int] | Tensor, ids: Sequence[int] | None = None) -> None:
        """Forgets all but the first `lengths` keys of each request (one number for all, or one each)."""
        requests = self._chosen(ids)
        if isinstance(lengths, Tensor):
            lengths = lengths.tolist()
        each = list(lengths) if isinstance(lengths, Sequence) else [lengths] * len(requests)
        self._adopt(self._table.truncate(requests, [whole("length", length) for length in each]))

    def tables(self, ids: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """block_table (batch, max_pages) int32, -1 past a request's pages, and the lengths (batch,) int32.

        Without `ids` these are the cache's own tensors, updated in place while the number of requests stays.
        """
        if ids is None:
            return self._tables.device
        return HostAndDevice(*self._table.tensors(self._chosen(ids)), self.device).device

    # Writing

    def write_prompt(
        self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, ids: Sequence[int] | None = None
    ) -> None:
        """Appends packed tokens to the cache alone; prompts may come in any chunks.

        Args:
            k, v: (tokens, n_kv_heads, head_dim), bfloat16, float16 or float32. With cu_seqlens left out, (batch,
                tokens, n_kv_heads, head_dim): as many tokens for each request.
            cu_seqlens: (batch + 1,) int32: request i brings tokens cu_seqlens[i] to cu_seqlens[i + 1].
        """
        requests = self._chosen(ids)
        require_device(self, k=k, v=v, cu_seqlens=cu_seqlens)
        k, v = (_packed(name, rows, cu_seqlens, len(requests)) for name, rows in (("k", k), ("v", v)))
        cu_seqlens, tokens = _starts(cu_seqlens, k, len(requests))
        with torch.no_grad():
            _, before = self.tables(ids)
            extended = self._extended(requests, tokens)
            where = (extended.block_table, before, cu_seqlens, None)
            decode_ops.run_cache_write(self.storage, self.layout, k, v, *where)
        self._adopt_extended(extended, ids)

    def append(self, k: Tensor, v: Tensor, ids: Sequence[int] | None = None) -> None:
        """Appends one token, k and v (batch, n_kv_heads, head_dim), or T of them, (batch, T, n_kv_heads, head_dim)."""
        for name, rows in (("k", k), ("v", v)):
            require_tensor(name, rows)
            if rows.ndim not in (3, 4):
                raise bad_value(f"{name}.ndim", rows.ndim, "allowed: 3, or 4 with a token axis after batch")
        self.write_prompt(k if k.ndim == 4 else k.unsqueeze(1), v if v.ndim == 4 else v.unsqueeze(1), None, ids)

    @torch.no_grad()
    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None = None,
        ids: Sequence[int] | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """`write_prompt`, and the causal attention of the tokens over what is cached and themselves.

        The prompt's own keys enter as given, cached ones as they were stored; every V is read, whatever the depth.

        Args:
            q: (tokens, n_heads, head_dim), or (batch, tokens, n_heads, head_dim) without cu_seqlens. On a GPU: bfloat16
                or float16, head_dim 64 or 128, and every row starts at a multiple of 16 bytes.
            k, v: as for `write_prompt`, dtype of q.

        Returns:
            out, shape and dtype of q; with `return_lse` also lse (n_heads, tokens of all) float32, natural log.
        """
        requests = self._chosen(ids)
        require_device(self, q=q, k=k, v=v, cu_seqlens=cu_seqlens)
        require_tensor("q", q)
        shape = q.shape
        q, k, v = (_packed(name, rows, cu_seqlens, len(requests)) for name, rows in (("q", q), ("k", k), ("v", v)))
        if q.shape[1] != self.n_heads:
            raise bad_value("q.shape", tuple(shape), f"allowed: (tokens, {self.n_heads}, {self.head_dim})")
        starts, tokens = _starts(cu_seqlens, k, len(requests))
        self._table.extend(requests, tokens)  # raises where there is no room
        out, lse = q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        scale = 0.0 if self.softmax_scale is None else self.softmax_scale
        options = (self.sinks, scale, self.window_left, self._held(requests))
        lib.prefill_attention(self.storage, self.layout, q, k, v, starts, *self.tables(ids), *options, out, lse)
        self.write_prompt(k, v, starts, ids)
        return (out.view(shape), lse) if return_lse else out.view(shape)

    def read(self, ids: Sequence[int] | None = None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """What is stored, packed: k and v (keys of all requests, n_kv_heads, head_dim), at their finest reading."""
        block_table, lengths = self._table.tensors(self._chosen(ids))
        starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        shape = (int(starts[-1]), self.n_kv_heads, self.head_dim)
        k, v = (torch.empty(shape, dtype=dtype, device=self.device) for _ in range(2))
        tables = (block_table.to(self.device), starts.to(self.device))
        lib.cache_read(self.storage, self.layout, *tables, k, v)
        return k, v

    # Attention

    def attend(self, q: Tensor, **options: Any) -> Any:
        """`fold_attn_with_kvcache(q, self, **options)`: attention of the newest tokens, which have been appended."""
        return fold_attn_with_kvcache(q, self, **options)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """`fold_attn_with_kvcache(q, self, k, v, **options)`: `append`, then `attend`."""
        return fold_attn_with_kvcache(q, self, k, v, **options)

    # Files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the requests, their pages (shared ones once) and the options as a safetensors file."""
        options = self._options(0, self.num_pages)
        storage = on_host(self.storage, self._table.tensors(self._requests)[0])
        lib.cache_save(os.fspath(path), storage, self._table.handle, self.layout, *options)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "FoldKVCache":
        """A cache as it was saved. Its requests have new ids, in the saved order.

        Raises ValueError for a file that is not a saved cache, or whose parts do not belong together. What the pages
        hold is taken as it is.
        """
        file = lib.cache_file_open(os.fspath(path))
        layout, numbers, depth, scale, sinks = lib.cache_file_options(file)
        n_kv_heads, head_dim, page_size, k_bits, v_bits, tail = (int(n) for n in layout)
        n_heads, _, max_len, num_pages, left = (int(n) for n in numbers)
        cache = cls(
            0,
            n_heads,
            n_kv_heads,
            head_dim,
            max_len,
            None if math.isinf(depth) else depth,
            page_size=page_size,
            tail=bool(tail),
            bits=(k_bits, v_bits),
            num_pages=num_pages or None,
            softmax_scale=scale or None,
            sinks=torch.tensor([float(s) for s in sinks]) if len(sinks) else None,
            window_size=(left, -1),
            device=device,
            dtype=dtype,
        )
        cache._adopt(PageTable(lib.cache_file_table(file), cache._table.max_pages))
        storage = cache.storage
        if cache.device.type != "cpu":
            storage = page_pool(cache.num_pages, storage.shape[1], torch.device("cpu"))
        lib.cache_file_read(file, storage, cache.layout)
        if storage is not cache.storage:
            cache.storage.copy_(storage)
        return cache

    # Internals

    def _chosen(self, ids: Sequence[int] | None) -> list[int]:
        """The requests of a call."""
        if ids is None:
            return self._requests
        if not isinstance(ids, (Sequence, Tensor)) or isinstance(ids, str):
            raise bad_type("ids", type(ids).__name__, "allowed: None or a sequence of requests")
        return [whole("request", request) for request in ids]

    def _held(self, requests: Sequence[int]) -> int:
        """Keys that these requests hold between them."""
        held = dict(zip(self._requests, self.lengths, strict=True))
        return sum(held[request] for request in requests)

    def _options(self, batch: int, num_pages: int) -> tuple[list[int], float, float, Tensor | None]:
        numbers = [self.n_heads, batch, self.max_len, num_pages, self.window_left]
        return numbers, math.inf if self.depth is None else self.depth, self.softmax_scale or 0.0, self._host_sinks()

    def _depth_tensor(self, depth: float) -> Tensor:
        """(1,) float32 on the cache's device. It is kept, since the next step asks for the same one; its memory is
        never given back, and has been filled when the call returns, so that any stream may read it."""
        kept = self._depths.get(depth) if type(depth) in (int, float) else None
        if kept is not None:
            return kept
        require_depth(depth)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing or len(self._depths) == MOST_DEPTHS:
            return torch.full((1,), depth, dtype=torch.float32, device=self.device)
        kept = self._depths[depth] = torch.tensor([depth], dtype=torch.float32, device=self.device)
        return kept

    def _host_sinks(self) -> Tensor | None:
        return None if self.sinks is None else self.sinks.cpu()

    def _adopt(self, table: PageTable) -> None:
        requests = table.requests()
        tensors = table.tensors(requests)
        if len(requests) == len(self._requests):
            self._tables.update(*tensors)
        else:
            self._tables = HostAndDevice(*tensors, self.device)
        self._requests, self._table = requests, table

    def _extended(self, requests: Sequence[int], tokens: Sequence[int]) -> Extended:
        """With room for the tokens; shared pages they touch have been copied."""
        table, sources, destinations, same_pages = self._table.extend(requests, tokens)
        if sources:
            self.storage[destinations] = self.storage[sources]
        if same_pages and requests == self._requests:  # as in most steps
            return Extended(table, (self._tables.host[0], table.lengths(requests)), self._tables.device[0])
        host = table.tensors(requests)
        return Extended(table, host, host[0].to(self.device))

    def _adopt_extended(self, extended: Extended, ids: Sequence[int] | None) -> None:
        """Once the tokens are written."""
        if ids is None:
            self._table = extended.table
            self._tables.update(*extended.host)
        else:
            self._adopt(extended.table)

    def _step(
        self,
        q: Tensor,
        tokens_each: int,
        k: Tensor,
        v: Tensor,
        ids: Sequence[int] | None,
        q_lens: Tensor | None,
        options: tuple[Any, ...],
        asked: decode_ops.Asked,
    ) -> decode_ops.OptionalResults:
        requests = self._chosen(ids)
        tokens = [tokens_each] * len(requests)
        if q_lens is not None:
            require_tensor("q_lens", q_lens)
            if q_lens.dtype != torch.int32:
                raise bad_type("q_lens.dtype", q_lens.dtype, "supported: int32")
            if q_lens.shape != (len(requests),):
                raise bad_value("q_lens.shape", tuple(q_lens.shape), f"allowed: ({len(requests)},), requests")
            tokens = q_lens.tolist()
        _, before = self.tables(ids)
        extended = self._extended(requests, tokens)
        results = decode_ops.run_decode_step(
            asked, q, self.storage, self.layout, k, v, None, extended.block_table, before, q_lens, *options
        )
        self._adopt_extended(extended, ids)
        return results


def _packed(name: str, rows: Tensor, cu_seqlens: Tensor | None, requests: int) -> Tensor:
    """(tokens, heads, head_dim); without cu_seqlens the rows come as (batch, tokens, heads, head_dim)."""
    require_tensor(name, rows)
    if cu_seqlens is not None:
        if rows.ndim != 3:
            raise bad_value(f"{name}.ndim", rows.ndim, "allowed: 3 beside cu_seqlens")
        return rows
    if rows.ndim != 4:
        raise bad_value(f"{name}.ndim", rows.ndim, "allowed: 4 where cu_seqlens is left out")
    if rows.shape[0] != requests:
        raise bad_value(f"{name}.shape", tuple(rows.shape), f"dimension 0 must be {requests}, the requests")
    return rows.flatten(0, 1)


def _starts(cu_seqlens: Tensor | None, k: Tensor, requests: int) -> tuple[Tensor, list[int]]:
    """cu_seqlens, checked, and the tokens of each request."""
    if cu_seqlens is None:
        each = k.shape[0] // max(requests, 1)
        return torch.arange(requests + 1, dtype=torch.int32, device=k.device) * each, [each] * requests
    require_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype != torch.int32:
        raise bad_type("cu_seqlens.dtype", cu_seqlens.dtype, "supported: int32")
    if cu_seqlens.shape != (requests + 1,):
        raise bad_value("cu_seqlens.shape", tuple(cu_seqlens.shape), f"allowed: ({requests + 1},), requests + 1")
    starts = cu_seqlens.tolist()
    tokens = [end - start for start, end in itertools.pairwise(starts)]
    if starts[0] != 0 or min(tokens, default=0) < 0 or starts[-1] > k.shape[0]:
        raise bad_value("cu_seqlens", starts, f"from 0, not decreasing, at most {k.shape[0]} tokens")
    return cu_seqlens, tokens
