"""KV blocks in host memory and in files: whole, of their key, and never an error of the disk."""

from __future__ import annotations

import json
import resource
import stat
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching.blocks import BlockCopy, OffloadLimits
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.kv.offload import (
    MAX_COPIES,
    BlockFiles,
    OffloadedKV,
    copies_of_frame,
    copy_frame,
)
from llmpq.dist.transport.frames import MAX_TEXT_BYTES, Frame, FrameKind
from llmpq.errors import StageError
from llmpq.models import KVShape

KEYS = [bytes([number]) * 32 for number in range(20)]
BLOCKS, HOST, DISK, SIZE = 5, 3, 4, 4
LIMITS = OffloadLimits(host_blocks=HOST, disk_blocks=DISK, host_window_blocks=HOST)
SHAPES = (
    KVShape(heads=2, head_dim=16),
    KVShape(heads=1, head_dim=32, window=6),
    KVShape(heads=0, head_dim=8),
)


def filled_cache(kv_bits=None, *, has_windows=False):
    cache = KVCache(
        SHAPES,
        1,
        num_blocks=BLOCKS,
        num_window_blocks=BLOCKS if has_windows else None,
        dtype=torch.float32,
        block_size=SIZE,
        kv_bits=kv_bits,
    )
    torch.manual_seed(0)
    for layer, size in enumerate(cache.token_bytes[:2], 1):  # the third layer has no heads
        tokens = tokens_of(cache, range(BLOCKS))
        data = torch.randint(0, 100, (BLOCKS * SIZE, size), dtype=torch.uint8)
        cache.unpack(layer, tokens, data)
    return cache


def tokens_of(cache, blocks):
    return cache.index_of([(block,) for block in blocks], [0] * len(blocks), [SIZE] * len(blocks))


def content(cache, block, *, has_window):
    """The bytes of a block in the layers that have it."""
    tokens = tokens_of(cache, [block])
    layers = [layer for layer in (1, 2) if cache.has_window(layer) == has_window]
    return [cache.pack(layer, tokens).tolist() for layer in layers]


def file_copy(source, target, key=KEYS[0]):
    return BlockCopy(*source, *target, key, False)


def opened(folder, digest=b"d" * 32, **options):
    return BlockFiles(folder / "rank-0", digest, **options)


COPIES = st.lists(
    st.tuples(
        st.sampled_from(
            [("blocks", "host"), ("host", "blocks"), ("blocks", "disk"), ("host", "disk"),
             ("disk", "blocks")]
        ),
        st.integers(0, 2), st.integers(0, 2), st.booleans(),
    ),
    max_size=40,
)  # fmt: skip


@pytest.mark.parametrize("kv_bits", [None, 8, 4])
@given(asked=COPIES, buffer_bytes=st.sampled_from([0, 1 << 20]))
def test_copies_in_any_order_move_the_bytes_of_blocks(
    tmp_path_factory, kv_bits, asked, buffer_bytes
):
    """Against a model: what each place holds, whether or not it is written by then."""
    cache = filled_cache(kv_bits, has_windows=True)
    limits = OffloadLimits(host_blocks=3, disk_blocks=3, host_window_blocks=3, disk_window_blocks=3)
    files = opened(tmp_path_factory.mktemp("files"), buffer_bytes=buffer_bytes)
    kept = OffloadedKV(cache, limits, files)
    places = {
        ("blocks", block, window): content(cache, block, has_window=window)
        for block in range(BLOCKS)
        for window in (False, True)
    }
    keys = dict.fromkeys(places, KEYS[0])
    copies, expected = [], []
    for (source, target), place, other, window in asked:
        held = (source, place, window)
        if source == "host" and held not in places:
            continue  # the scheduler loads what it saved
        key = keys.get(held, KEYS[0])
        if source == "blocks":
            key = keys[held] = KEYS[len(copies) % len(KEYS)]
        if held in places:
            places[target, other, window] = places[held]
            keys[target, other, window] = key
        else:
            expected.append(len(copies))
        copies.append(BlockCopy(source, place, target, other, key, window))
    assert kept.copy(copies) == expected
    kept.close()
    for block in range(BLOCKS):
        for window in (False, True):
            found = content(cache, block, has_window=window)
            assert found == places["blocks", block, window]


def test_host_memory_is_that_of_the_limits():
    cache = filled_cache(has_windows=True)
    kept = OffloadedKV(cache, LIMITS, None)
    assert kept.nbytes == HOST * SIZE * sum(cache.token_bytes)


def test_files_belong_to_one_user_and_have_the_size_of_their_block(tmp_path):
    cache = filled_cache()
    kept = OffloadedKV(cache, LIMITS, opened(tmp_path))
    for number in range(6):
        kept.copy([file_copy(("blocks", 0), ("disk", number % DISK), KEYS[number])])
    kept.close()
    folder = tmp_path / "rank-0"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == [f"block-{number}" for number in range(DISK)]
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_size == 128 + SIZE * sum(cache.token_bytes)


@pytest.mark.parametrize("damage", ["none", "missing", "cut", "longer", "byte", "header", "key"])
def test_a_damaged_file_is_a_miss(tmp_path, damage):
    cache = filled_cache()
    kept = OffloadedKV(cache, LIMITS, opened(tmp_path))
    kept.copy([file_copy(("blocks", 0), ("disk", 2), KEYS[1])])
    kept.close()
    path, key = tmp_path / "rank-0/block-2", KEYS[1]
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "key":
        key = KEYS[2]
    elif damage != "none":
        data[{"byte": 300, "header": 20}.get(damage, 0)] ^= damage in ("byte", "header")
        sizes = {"cut": data[:-1], "longer": data + b"0"}
        path.write_bytes(sizes.get(damage, data))
    before, stored = content(cache, 1, has_window=False), content(cache, 0, has_window=False)
    unread = kept.copy([file_copy(("disk", 2), ("blocks", 1), key)])
    assert unread == ([] if damage == "none" else [0])
    assert content(cache, 1, has_window=False) == (stored if damage == "none" else before)


def test_files_of_another_model_plan_or_rank_are_a_miss(tmp_path):
    cache = filled_cache()
    kept = OffloadedKV(cache, LIMITS, opened(tmp_path))
    kept.copy([file_copy(("blocks", 0), ("disk", 0))])
    kept.close()
    read = [file_copy(("disk", 0), ("blocks", 1))]
    assert OffloadedKV(cache, LIMITS, opened(tmp_path, b"e" * 32)).copy(read) == [0]
    assert OffloadedKV(cache, LIMITS, opened(tmp_path)).copy(read) == []


def test_files_of_ranks_that_ended_are_found_by_the_next_ones(tmp_path):
    kept = OffloadedKV(filled_cache(), LIMITS, opened(tmp_path))
    for number in range(6):
        kept.copy([file_copy(("blocks", 0), ("disk", number % DISK), KEYS[number])])
    kept.close()
    folder = tmp_path / "rank-0"
    (folder / "block-1").write_bytes(b"damaged")
    (folder / "block-9").write_bytes((folder / "block-2").read_bytes())  # beyond the budget
    (folder / "block-0.tmp").write_bytes(b"cut short")
    again = OffloadedKV(filled_cache(), LIMITS, opened(tmp_path))
    assert set(again.stored()) == {(False, KEYS[4], 0), (False, KEYS[2], 2), (False, KEYS[3], 3)}
    assert sorted(path.name for path in folder.iterdir()) == ["block-0", "block-2", "block-3"]
    assert OffloadedKV(filled_cache(), LIMITS, opened(tmp_path, b"e" * 32)).stored() == []
    assert OffloadedKV(filled_cache(), LIMITS, None).stored() == []


def test_a_full_disk_is_one_warning_and_a_miss(tmp_path, caplog):
    cache = filled_cache()
    files = opened(tmp_path)
    kept = OffloadedKV(cache, LIMITS, files)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # no file can be larger
    try:
        kept.copy([file_copy(("blocks", 0), ("disk", place)) for place in range(3)])
        files.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*(tmp_path / "rank-0").iterdir()] == []
    assert kept.copy([file_copy(("disk", 1), ("blocks", 1))]) == [0]
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert "what cannot be written is computed again" in caplog.text
    kept.copy([file_copy(("blocks", 0), ("disk", 1))])  # there is room again
    files.flush()
    assert kept.copy([file_copy(("disk", 1), ("blocks", 1))]) == []


def test_steps_do_not_wait_for_a_slow_disk(tmp_path, monkeypatch):
    write, may_go_on, begun = BlockFiles._write, threading.Event(), threading.Event()

    def slow(self, *block):
        begun.set()
        assert may_go_on.wait(60)
        write(self, *block)

    monkeypatch.setattr(BlockFiles, "_write", slow)
    cache, size = filled_cache(), SIZE * sum(filled_cache().token_bytes)
    files = opened(tmp_path, buffer_bytes=3 * size)
    kept = OffloadedKV(cache, LIMITS, files)
    kept.copy([file_copy(("blocks", 0), ("disk", 0), KEYS[0])])
    assert begun.wait(60)
    expected = content(cache, 1, has_window=False)
    # The place that is being written gets another block; both are read from memory.
    kept.copy([file_copy(("blocks", 1), ("disk", 0), KEYS[1])])
    kept.copy([file_copy(("blocks", 2), ("disk", 1), KEYS[2])])
    assert [*(tmp_path / "rank-0").iterdir()] == []
    assert kept.copy([file_copy(("disk", 0), ("blocks", 3), KEYS[0])]) == [0]
    assert kept.copy([file_copy(("disk", 0), ("blocks", 3), KEYS[1])]) == []
    assert content(cache, 3, has_window=False) == expected

    # The buffer is full: the next block waits until one is written.
    fourth = [file_copy(("blocks", 2), ("disk", 2), KEYS[3])]
    waiting = threading.Thread(target=kept.copy, args=(fourth,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    may_go_on.set()
    waiting.join(60)
    kept.close()
    again = OffloadedKV(cache, LIMITS, opened(tmp_path))
    assert set(again.stored()) == {(False, KEYS[1], 0), (False, KEYS[2], 1), (False, KEYS[3], 2)}
    assert again.copy([file_copy(("disk", 0), ("blocks", 4), KEYS[1])]) == []
    assert content(cache, 4, has_window=False) == expected


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path, caplog):
    (tmp_path / "rank-0").write_text("a file")
    kept = OffloadedKV(filled_cache(), LIMITS, opened(tmp_path))
    kept.copy([file_copy(("blocks", 0), ("disk", 0))])
    kept.close()
    assert kept.copy([file_copy(("disk", 0), ("blocks", 1))]) == [0]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "copy",
    [
        file_copy(("blocks", BLOCKS), ("host", 0)),
        file_copy(("blocks", 0), ("host", HOST)),
        file_copy(("host", -1), ("blocks", 0)),
        file_copy(("blocks", 0), ("disk", DISK)),
        file_copy(("blocks", 0), ("host", 0))._replace(has_window=True),
    ],
)
def test_places_that_do_not_exist_are_an_error(tmp_path, copy):
    kept = OffloadedKV(filled_cache(), LIMITS, opened(tmp_path))
    with pytest.raises(StageError, match="found a copy of place"):
        kept.copy([copy])


def test_a_frame_has_the_copies_and_what_was_not_read():
    copies = [
        BlockCopy("host", 2**31, "disk", 2**31, KEYS[place % 20], True)
        for place in range(MAX_COPIES)
    ]
    frame = copy_frame(copies, range(MAX_COPIES))
    assert len(frame.text) <= MAX_TEXT_BYTES
    assert copies_of_frame(frame) == (copies, [*range(MAX_COPIES)])


@pytest.mark.parametrize(
    "found",
    [
        [],
        [[["blocks", 0, "host", 0, ""]], []],
        [[["blocks", 0, "tape", 0, "", False]], []],
        [[["blocks", 0, "host", 0, "x", False]], []],
        [[["blocks", None, "host", 0, "", False]], []],
        [[], [[]]],
    ],
)
def test_an_unreadable_frame_is_an_error(found):
    frame = Frame(kind=FrameKind.COPY, text=json.dumps(found).encode())
    with pytest.raises(StageError, match="unreadable copies"):
        copies_of_frame(frame)
