"""The store gives back what was put in, or nothing: never anything else."""

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
from llmpq.models.files.sources import on_host
from llmpq.quant.loading.buffers import fresh
from llmpq.quant.loading.entry_file import EntryLayout
from llmpq.quant.loading.store import Store, entry_key

TILED = {"b.tiles": (torch.uint8, (128,)), "b.scales": (torch.bfloat16, (2, 16))}
ROWS = {
    "a.codes": (torch.uint8, (3, 7)),
    "a.scales": (torch.bfloat16, (3, 2)),
    "empty": (torch.float32, (0, 4)),
}
LAYOUT = EntryLayout(TILED | ROWS)
ALIGNED = EntryLayout(
    {"a.tiles": (torch.uint8, (192,)), "b.tiles": (torch.uint8, (64,))}
    | {"a.scales": (torch.bfloat16, (3, 32)), "a.zeros": (torch.float32, (5,))}
)
ROWS_ONLY = EntryLayout(ROWS)


def read(store, key, *layouts, lend=on_host):
    """All tensors of an entry; ``None`` when it is not there, or not whole."""
    entry = store.find(key, layouts or (LAYOUT,))
    if entry is None:
        return None
    try:
        return entry.read(list(entry.layout.tensors), lend)
    except SpecError as error:
        store.discard(key, error)
        return None


@pytest.fixture
def store(tmp_path):
    return Store.opened(tmp_path / "store", 10**6)


def tensors(seed=0, layout=LAYOUT):
    seeded = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 100, shape, generator=seeded).to(dtype)
        for name, (dtype, shape) in layout.tensors.items()
    }


def put(store, key, seed=0, layout=LAYOUT):
    writer = store.writer(key, layout)
    for name, tensor in tensors(seed, layout).items():
        writer.add(name, tensor)
    writer.commit()
    return store.directory / f"{key}.safetensors"


def equal(found, expected):
    return found.keys() == expected.keys() and all(
        map(torch.equal, found.values(), expected.values())
    )


def test_what_was_put_in_comes_back(store):
    put(store, "key")
    assert equal(read(store, "key"), tensors())
    assert read(store, "other") is None


def test_entries_are_safetensors_for_this_user_alone(store):
    path = put(store, "key")
    found = load_file(path)
    assert torch.equal(found["a.codes"], tensors()["a.codes"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700


def test_a_folder_that_others_can_enter_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(SpecError, match="found mode 755"):
        Store.opened(tmp_path, 1)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="cannot be made"):
        Store.opened(tmp_path / "file" / "store", 1)


def test_every_damaged_byte_is_noticed_and_the_entry_removed(store, caplog):
    for position in range(put(store, "key").stat().st_size):
        path = put(store, "key")
        data = bytearray(path.read_bytes())
        data[position] ^= 1 << (position % 8)
        path.write_bytes(data)
        assert read(store, "key") is None, position
        assert not path.exists()
    assert "will be quantized again" in caplog.text


def test_truncated_entries_are_noticed(store):
    whole = put(store, "key").read_bytes()
    rng = random.Random(0)
    for size in [0, 1, 7, 8, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(20))]:
        (store.directory / "key.safetensors").write_bytes(whole[:size])
        assert read(store, "key") is None


def test_another_layout_is_another_layer(store):
    put(store, "key")
    other = EntryLayout(TILED | ROWS | {"a.scales": (torch.float16, (3, 2))})
    assert read(store, "key", other) is None


@pytest.mark.parametrize("written", [LAYOUT, ROWS_ONLY])
def test_an_entry_is_read_as_the_layout_that_its_header_tells_of(store, written):
    put(store, "key", layout=written)
    assert equal(read(store, "key", LAYOUT, ROWS_ONLY), tensors(layout=written))
    assert equal(read(store, "key", ROWS_ONLY, LAYOUT), tensors(layout=written))


def test_tensors_may_be_written_in_any_order(store):
    writer = store.writer("key", LAYOUT)
    for name, tensor in reversed(tensors().items()):
        writer.add(name, tensor)
    writer.commit()
    assert equal(read(store, "key"), tensors())


def test_tensors_are_read_alone_into_lent_memory(store):
    put(store, "key")
    given = []

    def lend(shape, dtype):
        given.append(torch.empty(shape, dtype=dtype))
        return given[-1]

    found = store.find("key", [LAYOUT]).read(list(TILED), lend)
    (memory,) = given
    assert equal(found, {name: tensors()[name] for name in TILED})
    places = {name: found[name].untyped_storage().data_ptr() for name in TILED}
    assert places["b.tiles"] == memory.data_ptr()
    assert places["b.scales"] != memory.data_ptr()  # kernels may keep it


def test_large_tensors_come_back_whole_from_disk_and_from_cache(tmp_path):
    large = EntryLayout(
        {
            "b.tiles": (torch.uint8, (5 << 20,)),
            "b.scales": (torch.bfloat16, (3, 160_016)),
            "a.codes": (torch.uint8, (1001, 4099)),
            "a.scales": (torch.float32, (1001, 7)),
        }
    )
    store = Store.opened(tmp_path / "store", 10**9)
    path = put(store, "key", layout=large)
    for drop in (False, True):
        if drop:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert equal(read(store, "key", large, lend=fresh), tensors(layout=large))


def mapped(store, key, *layouts):
    """The sound tensors of an entry, where they lie in its file."""
    entry = store.find(key, layouts or (LAYOUT,))
    assert entry.map()
    return entry.mapped(on_host)


def kilobytes_of_map(path, field):
    """What the system says of this process's map of a file."""
    parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    (text,) = (part for part in parts if str(path) in part.partition("\n")[0])
    return int(re.search(rf"(?m)^{field}: +(\d+) kB", text)[1])


def test_mapped_tensors_are_what_was_put_in_and_in_cache_lines_of_their_own(store):
    put(store, "key", layout=ALIGNED)
    found = mapped(store, "key", ALIGNED)
    assert equal(found, tensors(layout=ALIGNED))
    assert {tensor.data_ptr() % 64 for tensor in found.values()} == {0}
    for tensor in found.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_mapped_tensors_cost_no_page_more_than_their_bytes_and_none_is_copied(tmp_path):
    store = Store.opened(tmp_path / "store", 10**9)
    large = EntryLayout({"b.tiles": (torch.uint8, (5 << 20,)), "b.scales": (torch.float32, (999,))})
    path = put(store, "key", layout=large)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = mapped(store, "key", large)
    pages = -(-path.stat().st_size // 4096) * 4
    assert kilobytes_of_map(path, "Rss") == pages  # all were mapped before anybody touched them
    assert sum(int(tensor.to(torch.float64).sum()) for tensor in found.values()) > 0
    assert kilobytes_of_map(path, "Rss") == pages
    assert kilobytes_of_map(path, "Anonymous") == 0


def test_an_entry_evicted_or_replaced_while_it_is_mapped_stays_what_it_was(store):
    path = put(store, "key")
    found = mapped(store, "key")
    put(store, "key", seed=1)
    assert equal(mapped(store, "key"), tensors(seed=1))
    path.unlink()
    gc.collect()
    assert equal(found, tensors())


def test_writing_into_a_mapped_tensor_would_not_reach_the_file(store):
    path = put(store, "key")
    before = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, about memory that it may not write to
        found = mapped(store, "key")
    found["b.tiles"].zero_()
    assert path.read_bytes() == before
    assert equal(mapped(store, "key"), tensors())


def test_of_a_damaged_mapped_entry_the_other_tensors_are_left(store):
    for name, (begin, end) in LAYOUT.places.items():
        for position in {begin, (begin + end) // 2, end - 1} if end > begin else ():
            path = put(store, "key")
            data = bytearray(path.read_bytes())
            data[position] ^= 16
            path.write_bytes(data)
            expected = {other: tensor for other, tensor in tensors().items() if other != name}
            assert equal(mapped(store, "key"), expected)


def test_a_mapped_entry_that_became_shorter_or_another_is_refused_before_it_is_touched(store):
    path = put(store, "key")
    entry = store.find("key", [LAYOUT])
    assert entry.map()
    os.truncate(path, 8)
    with pytest.raises(SpecError, match="ends at byte"):
        entry.mapped(on_host)
    put(store, "key")
    with pytest.raises(SpecError, match="replaced while it was read"):
        entry.mapped(on_host)


def test_a_file_that_became_shorter_is_not_mapped(store):
    path = put(store, "key")
    entry = store.find("key", [LAYOUT])
    os.truncate(path, 8)
    assert not entry.map()


def test_an_entry_that_is_replaced_while_it_is_read_is_refused(store):
    put(store, "key")
    entry = store.find("key", [LAYOUT])
    put(store, "key", seed=1)
    with pytest.raises(SpecError, match="replaced while it was read"):
        entry.read(list(TILED), on_host)


def test_a_link_is_not_an_entry(store, tmp_path):
    path = put(store, "key")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert read(store, "key") is None


def test_unfinished_entries_do_not_exist(store):
    writer = store.writer("key", LAYOUT)
    writer.add("a.codes", tensors()["a.codes"])
    assert read(store, "key") is None
    writer.abort()
    assert list(store.directory.iterdir()) == []


def test_the_entry_unused_for_longest_goes_first(tmp_path):
    size = put(Store.opened(tmp_path / "probe", 10**6), "key").stat().st_size
    store = Store.opened(tmp_path / "store", 2 * size)
    for age, key in ((300, "old"), (200, "older but used"), (100, "young")):
        path = put(store, key)
        if path.exists():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
        if key == "older but used":
            assert read(store, key) is not None
    assert {path.stem for path in store.directory.iterdir()} == {"older but used", "young"}


def test_what_a_crash_left_is_removed_later(store):
    left = store.directory / "key123.tmp"
    left.touch()
    os.utime(left, (0, 0))
    put(store, "key")
    assert not left.exists()


def test_an_entry_larger_than_the_store_is_not_begun(tmp_path):
    assert Store.opened(tmp_path / "store", 10).writer("key", LAYOUT) is None
    with pytest.raises(SpecError, match="expected at least 0"):
        Store.opened(tmp_path / "store", -1)


def test_ranks_that_write_one_entry_at_once_leave_a_whole_one(store):
    threads = [threading.Thread(target=put, args=(store, "key")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal(read(store, "key"), tensors())
    assert [path.name for path in store.directory.iterdir()] == ["key.safetensors"]


def test_a_folder_that_vanishes_costs_the_entry_and_nothing_else(store, caplog):
    store.directory.rmdir()
    assert store.writer("key", LAYOUT) is None
    assert "cannot write" in caplog.text


def test_keys_differ_in_every_part():
    keys = {entry_key(*parts) for parts in (("f", ["a"]), ("g", ["a"]), ("f", ["b"]), ("f", []))}
    assert len(keys) == 4


def test_checksums_cover_header_and_tensors(store):
    path = put(store, "key")
    found = load_file(path)["checksums"].tolist()
    expected = [zlib.crc32(t.reshape(-1).view(torch.uint8).numpy()) for t in tensors().values()]
    assert found[1:] == expected
