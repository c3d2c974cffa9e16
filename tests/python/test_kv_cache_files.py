"""Saved caches: what is loaded is what was saved, in Python's safetensors too, and a damaged file is an error."""

import re

import pytest
import safetensors.torch
import torch
from attention_reference import assert_same_bytes
from cache_testing import assert_unchanged, filled, layer, poisoned, snapshot

from fold_attention import FoldKVCache

OPTIONS = {"depth": 9.1, "softmax_scale": 0.1, "window_size": (300, 0), "bits": (16, 8), "page_size": 128}


@pytest.fixture
def cache():
    lengths = [300, 0, 1025]
    layers = [layer(max(n, 1), seed=n) for n in lengths]
    cache = filled(lengths, layers, num_pages=20, room=100, sinks=torch.tensor([0.5, -1.0, 2.0, 1e-30]), **OPTIONS)
    cache.fork(cache.requests[2], 600)
    return cache


def test_roundtrip(cache, tmp_path):
    path = tmp_path / "cache.safetensors"
    before = snapshot(cache)
    cache.save(path)
    assert_unchanged(cache, before)
    loaded = FoldKVCache.load(path)
    for name in (
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "max_len",
        "bits",
        "page_size",
        "tail",
        "num_pages",
        "window_left",
    ):
        assert getattr(loaded, name) == getattr(cache, name), name
    assert (loaded.softmax_scale, loaded.lengths) == (cache.softmax_scale, cache.lengths)
    assert loaded.free_pages == cache.free_pages, "shared pages are shared again"
    assert set(loaded.requests).isdisjoint(cache.requests)
    q, k, v = (x.unflatten(0, (4, 3)) for x in layer(12, seed=5))
    for _ in range(2):
        assert_same_bytes(cache.attend(q[:, 0]), loaded.attend(q[:, 0]), "out")
        assert_same_bytes(cache.decode(q, k, v), loaded.decode(q, k, v), "out after new tokens")
    loaded.save(path)
    assert FoldKVCache.load(path).lengths == cache.lengths


def test_a_file_of_defaults_and_of_nothing(tmp_path):
    for batch in (0, 3):
        cache = FoldKVCache(batch, 4, 2, 64, 100)
        cache.save(tmp_path / "cache")
        loaded = FoldKVCache.load(tmp_path / "cache", dtype=torch.bfloat16)
        assert (loaded.depth, loaded.softmax_scale, loaded.sinks, loaded.lengths) == (None, None, None, [0] * batch)
        assert loaded.dtype == torch.bfloat16


def test_the_file_is_ordinary_safetensors(cache, tmp_path):
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    tensors = safetensors.torch.load_file(path)
    assert sorted(tensors) == ["block_table", "lengths", "pages", "sinks"]
    assert tensors["lengths"].tolist() == cache.lengths
    assert len(tensors["pages"]) == cache.num_pages - cache.free_pages, "every page in use, once"
    table = cache.tables()[0]
    for row, saved in zip(table, tensors["block_table"], strict=True):
        n = int((row >= 0).sum())
        assert bool((saved[n:] == -1).all())
        assert_same_bytes(cache.storage[row[:n].long()], tensors["pages"][saved[:n].long()], "pages")


def test_saving_over_a_file_keeps_it_if_that_fails(cache, tmp_path):
    path = tmp_path / "cache"
    cache.save(path)
    before = path.read_bytes()
    (tmp_path / "cache.partial").mkdir()  # stands where the new file would be written
    with pytest.raises(ValueError, match="a place that can be written"):
        cache.save(path)
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="a place that can be written"):
        cache.save(tmp_path / "no" / "such" / "folder")


def rewritten(path, change):
    """The file with its tensors and metadata changed by `change(tensors, metadata)`."""
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, metadata)
    safetensors.torch.save_file(tensors, path, metadata)


def set_metadata(name, value):
    return lambda _, metadata: metadata.__setitem__(name, value)


def set_tensor(name, value):
    return lambda tensors, _: tensors.__setitem__(name, value(tensors[name]))


def edited(*index, value):
    def edit(tensor):
        tensor[index] = value
        return tensor

    return edit


CORRUPTIONS = {
    "another format": (set_metadata("format", "fold-kv-cache 2"), "format=fold-kv-cache 2; supported: "),
    "no format": (lambda _, metadata: metadata.pop("format"), 'no "format"; a saved FoldAttention cache'),
    "text for a number": (set_metadata("head_dim", "64x"), "head_dim=64x; a number"),
    "a number out of range": (
        set_metadata("n_heads", "99999999999999999999"),
        "n_heads=99999999999999999999; a number",
    ),
    "another head dim": (set_metadata("head_dim", "80"), "head_dim=80; supported: 64, 128, 256"),
    "pages of another size": (set_metadata("head_dim", "128"), "bytes of a page"),
    "fewer pages than used": (set_metadata("num_pages", "3"), "at most num_pages=3"),
    "too many pages": (set_metadata("num_pages", "1099511627776"), "num_pages=1099511627776; allowed"),
    "a NaN depth": (set_metadata("depth", "nan"), "depth=nan"),
    "a wrong flag": (set_metadata("tail", "1"), "tail=1; true or false"),
    "a length beyond max_len": (set_tensor("lengths", edited(0, value=1126)), "0 to max_len=1125"),
    "a negative length": (set_tensor("lengths", edited(0, value=-1)), "lengths[0]=-1"),
    "a length beyond its pages": (set_tensor("lengths", edited(0, value=400)), "page=-1; 0 to"),
    "a page that is not there": (set_tensor("block_table", edited(0, 0, value=2147480000)), "page=2147480000; 0 to"),
    "a page in two places": (set_tensor("block_table", edited(0, 0, value=1)), "page=1; each page once in a request"),
    "a page of another place": (set_tensor("block_table", edited(0, 0, value=4)), "the same place in every request"),
    "pages of no one": (set_tensor("pages", lambda x: torch.cat([x, x[:1]])), "pages that a request holds"),
    "a row too few": (set_tensor("block_table", lambda x: x[1:].contiguous()), "one row per length, 4"),
    "another dtype": (set_tensor("lengths", lambda x: x.int()), "int32 of rank 1; int64 of rank 1"),
    "another rank": (set_tensor("block_table", lambda x: x[0].contiguous()), "int32 of rank 1; int32 of rank 2"),
    "no pages": (lambda tensors, _: tensors.pop("pages"), 'tensor="pages"; one that the file holds'),
    "sinks of other heads": (set_tensor("sinks", lambda x: x[1:].contiguous()), "sinks=3 numbers; 4, one per head"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_file_that_contradicts_itself(cache, tmp_path, kind):
    path = tmp_path / "cache"
    cache.save(path)
    change, message = CORRUPTIONS[kind]
    rewritten(path, change)
    with pytest.raises(ValueError, match=re.escape(message)):
        FoldKVCache.load(path)


def test_a_truncated_file(cache, tmp_path):
    """Every length of the header, and lengths in the data."""
    path = tmp_path / "cache"
    cache.save(path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for n in (*range(0, header + 1, 7), header, (header + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match="; "):
            FoldKVCache.load(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="bytes of data"):
        FoldKVCache.load(path)
    with pytest.raises(ValueError, match="a file that can be read"):
        FoldKVCache.load(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"a file that can be read|at least 8"):
        FoldKVCache.load(tmp_path)


def test_flipped_bits_are_an_error_or_a_cache(cache, tmp_path):
    """Damage to the header never crashes: an error in the library's form, or a cache that can be used."""
    path = tmp_path / "cache"
    small = poisoned(1, 64, page_size=64)
    small.append(torch.randn(1, 5, 2, 64), torch.randn(1, 5, 2, 64))
    small.save(path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = torch.Generator().manual_seed(0)
    refused = accepted = 0
    for at in range(header):
        bit = int(torch.randint(7, (1,), generator=draw))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        try:
            loaded = FoldKVCache.load(path)
            loaded.attend(torch.randn(1, loaded.n_heads, loaded.head_dim))
        except ValueError as error:
            refused += re.search(r"=.*; ", str(error), re.DOTALL) is not None
            continue
        accepted += 1
    assert refused + accepted == header
    assert refused > header // 2
