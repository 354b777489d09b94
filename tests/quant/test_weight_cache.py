"""The cache returns the tensors that were written, or none: never anything else."""

import gc
import os
import random
import re
import stat
import threading
import warnings
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmpq.errors import SpecError
from llmpq.quant.loading.weight_cache import EntryLayout, WeightCache, entry_key

LAYOUT = EntryLayout(
    {
        "a.codes": (torch.uint8, (3, 7)),
        "a.scales": (torch.bfloat16, (3, 2)),
        "b.tiles": (torch.uint8, (128,)),
        "b.scales": (torch.bfloat16, (2, 16)),
    }
)


@pytest.fixture
def cache(tmp_path):
    return WeightCache.opened(tmp_path / "store", 10**6)


def tensors(seed=0, layout=LAYOUT):
    seeded = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 100, shape, generator=seeded).to(dtype)
        for name, (dtype, shape) in layout.tensors.items()
    }


def put(cache, key, seed=0, layout=LAYOUT):
    writer = cache.write(key, layout)
    for name, tensor in tensors(seed, layout).items():
        writer.add(name, tensor)
    writer.commit()
    return cache.directory / f"{key}.safetensors"


def equal(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def test_tensors_are_read_as_they_were_written(cache):
    put(cache, "key")
    assert equal(cache.read("key", LAYOUT), tensors())
    assert cache.read("other", LAYOUT) is None


def test_entries_are_safetensors_for_this_user_alone(cache):
    path = put(cache, "key")
    found = load_file(path)
    assert torch.equal(found["a.codes"], tensors()["a.codes"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700


def test_a_folder_that_others_can_enter_is_an_error(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(SpecError, match="found mode 755"):
        WeightCache.opened(tmp_path, 1)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="cannot be made"):
        WeightCache.opened(tmp_path / "file" / "store", 1)


def test_every_damaged_byte_is_noticed_and_the_entry_deleted(cache, caplog):
    for position in range(put(cache, "key").stat().st_size):
        path = put(cache, "key")
        data = bytearray(path.read_bytes())
        data[position] ^= 1 << (position % 8)
        path.write_bytes(data)
        assert cache.read("key", LAYOUT) is None, position
        assert not path.exists()
    assert "will be quantized again" in caplog.text


def test_truncated_entries_are_noticed(cache):
    whole = put(cache, "key").read_bytes()
    rng = random.Random(0)
    for size in [0, 1, 7, 8, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(20))]:
        (cache.directory / "key.safetensors").write_bytes(whole[:size])
        assert cache.read("key", LAYOUT) is None


def test_an_entry_of_another_layout_is_deleted(cache):
    path = put(cache, "key")
    other = EntryLayout(LAYOUT.tensors | {"a.scales": (torch.float16, (3, 2))})
    assert cache.read("key", other) is None
    assert not path.exists()


def test_tensors_may_be_written_in_any_order(cache):
    writer = cache.write("key", LAYOUT)
    for name, tensor in reversed(tensors().items()):
        writer.add(name, tensor)
    writer.commit()
    assert equal(cache.read("key", LAYOUT), tensors())


def test_large_tensors_are_read_whole_from_disk_and_from_the_page_cache(tmp_path):
    large = EntryLayout(
        {
            "b.tiles": (torch.uint8, (5 << 20,)),
            "b.scales": (torch.bfloat16, (3, 160_016)),
            "a.codes": (torch.uint8, (1001, 4100)),
            "a.scales": (torch.float32, (1001, 7)),
        }
    )
    cache = WeightCache.opened(tmp_path / "store", 10**9)
    path = put(cache, "key", layout=large)
    for drop in (False, True):
        if drop:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert equal(cache.read("key", large), tensors(layout=large))


def kilobytes_of_map(path, field):
    """Return a field of the system's record of this process's map of a file."""
    parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    (text,) = (part for part in parts if str(path) in part.partition("\n")[0])
    return int(re.search(rf"(?m)^{field}: +(\d+) kB", text)[1])


def test_tensors_are_mapped_without_a_copy(tmp_path):
    cache = WeightCache.opened(tmp_path / "store", 10**9)
    large = EntryLayout({"b.tiles": (torch.uint8, (5 << 20,)), "b.scales": (torch.float32, (999,))})
    path = put(cache, "key", layout=large)
    found = cache.read("key", large)
    assert found["b.tiles"].data_ptr() % 64 == 0
    assert sum(int(tensor.to(torch.float64).sum()) for tensor in found.values()) > 0
    assert kilobytes_of_map(path, "Rss") == -(-path.stat().st_size // 4096) * 4
    assert kilobytes_of_map(path, "Anonymous") == 0


def test_an_entry_deleted_or_replaced_while_it_is_mapped_stays_what_it_was(cache):
    path = put(cache, "key")
    found = cache.read("key", LAYOUT)
    put(cache, "key", seed=1)
    assert equal(cache.read("key", LAYOUT), tensors(seed=1))
    path.unlink()
    gc.collect()
    assert equal(found, tensors())


def test_writing_into_a_mapped_tensor_does_not_change_the_file(cache):
    path = put(cache, "key")
    before = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about memory that it must not write to
        found = cache.read("key", LAYOUT)
    found["b.tiles"].zero_()
    assert path.read_bytes() == before
    assert equal(cache.read("key", LAYOUT), tensors())


def test_a_link_is_not_an_entry(cache, tmp_path):
    path = put(cache, "key")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.read("key", LAYOUT) is None


def test_unfinished_entries_are_not_found(cache):
    writer = cache.write("key", LAYOUT)
    writer.add("a.codes", tensors()["a.codes"])
    assert cache.read("key", LAYOUT) is None
    writer.abort()
    assert list(cache.directory.iterdir()) == []


def test_the_entry_unused_for_longest_is_deleted_first(tmp_path):
    size = put(WeightCache.opened(tmp_path / "probe", 10**6), "key").stat().st_size
    cache = WeightCache.opened(tmp_path / "store", 2 * size)
    for age, key in ((300, "old"), (200, "older but used"), (100, "young")):
        path = put(cache, key)
        if path.exists():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
        if key == "older but used":
            assert cache.read(key, LAYOUT) is not None
    assert {path.stem for path in cache.directory.iterdir()} == {"older but used", "young"}


def test_abandoned_files_are_deleted_later(cache):
    left = cache.directory / "key123.tmp"
    left.touch()
    os.utime(left, (0, 0))
    put(cache, "key")
    assert not left.exists()


def test_an_entry_larger_than_the_limit_is_not_begun(tmp_path):
    assert WeightCache.opened(tmp_path / "store", 10).write("key", LAYOUT) is None
    with pytest.raises(SpecError, match="expected at least 0"):
        WeightCache.opened(tmp_path / "store", -1)


def test_ranks_that_write_one_entry_at_once_leave_a_whole_one(cache):
    threads = [threading.Thread(target=put, args=(cache, "key")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal(cache.read("key", LAYOUT), tensors())
    assert [path.name for path in cache.directory.iterdir()] == ["key.safetensors"]


def test_without_its_folder_the_cache_writes_nothing_and_warns(cache, caplog):
    cache.directory.rmdir()
    assert cache.write("key", LAYOUT) is None
    assert "cannot write" in caplog.text


def test_keys_differ_in_every_part():
    keys = {entry_key(*parts) for parts in (("f", ["a"]), ("g", ["a"]), ("f", ["b"]), ("f", []))}
    assert len(keys) == 4


def test_checksums_cover_header_and_tensors(cache):
    path = put(cache, "key")
    found = load_file(path)["checksums"].tolist()
    expected = [zlib.crc32(t.reshape(-1).view(torch.uint8).numpy()) for t in tensors().values()]
    assert found[0] == zlib.crc32(LAYOUT.header)
    assert found[1:] == expected
