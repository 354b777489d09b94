"""Bytes read past the page cache are those of the file, and what cannot be read so is left."""

import mmap
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmpq.models.files import direct
from llmpq.models.files.direct import PAGE_BYTES, is_cached, pages_around, read_pages
from llmpq.models.files.tensor_files import TensorFiles
from llmpq.quant.loading.buffers import BufferPool

SIZE = 3 * 2**20 + 123


@pytest.fixture
def opened(tmp_path):
    """Return the content of a file, and a descriptor of it that was dropped from the cache."""
    content = random.Random(0).randbytes(SIZE)
    (tmp_path / "file").write_bytes(content)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    yield content, descriptor
    os.close(descriptor)


def pages_for(begin, nbytes):
    return memoryview(mmap.mmap(-1, pages_around(begin, nbytes)))


@pytest.mark.parametrize("begin", [0, 8, PAGE_BYTES - 1, 5 * PAGE_BYTES + 10])
def test_bytes_are_those_of_the_file(opened, begin):
    content, descriptor = opened
    nbytes = SIZE - begin
    pages = pages_for(begin, nbytes)
    done = read_pages(descriptor, begin, nbytes, pages)
    assert done in {0, nbytes}  # 0 on a file system that has no such way
    lead = begin % PAGE_BYTES
    assert bytes(pages[lead : lead + done]) == content[begin : begin + done]


def test_the_file_may_end_before(opened):
    content, descriptor = opened
    wanted = SIZE + 5 * PAGE_BYTES
    pages = pages_for(0, wanted)
    done = read_pages(descriptor, 0, wanted, pages)
    assert done <= SIZE
    assert bytes(pages[:done]) == content[:done]


@pytest.fixture(params=["counted", "probed"])
def way(request, monkeypatch):
    """Ask for the page cache in each of the two ways."""
    if request.param == "probed":
        monkeypatch.setattr(direct, "_CAN_COUNT", False)
        return
    with Path(__file__).open("rb") as file:
        if direct._cached_pages(file.fileno(), 0, 1) is None:
            pytest.skip("this system does not count pages of the cache")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("begin", [0, PAGE_BYTES - 1, 5 * PAGE_BYTES + 10])
@pytest.mark.parametrize(("kept", "expected"), [(0.25, False), (0.75, True)])
def test_most_pages_decide_what_is_cached(opened, begin, kept, expected):
    _, descriptor = opened
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # or pages beyond are read as well
    nbytes = SIZE - begin
    os.pread(descriptor, int(kept * nbytes), begin)
    assert is_cached(descriptor, begin, nbytes) is expected


@pytest.mark.usefixtures("way")
def test_what_is_cached_is_not_read_from_the_disk(opened):
    _, descriptor = opened
    assert not is_cached(descriptor, 0, SIZE)
    os.pread(descriptor, SIZE, 0)
    assert is_cached(descriptor, 0, SIZE)
    assert read_pages(descriptor, 0, SIZE, pages_for(0, SIZE)) == 0


def test_a_file_system_that_refuses_is_left_alone(opened, monkeypatch):
    _, descriptor = opened
    monkeypatch.setattr(direct.os, "O_DIRECT", os.O_APPEND)  # accepted, and then refused below

    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(direct.os, "preadv", refuse)
    flags = direct.fcntl.fcntl(descriptor, direct.fcntl.F_GETFL)
    assert read_pages(descriptor, 0, SIZE, pages_for(0, SIZE)) == 0
    assert direct.fcntl.fcntl(descriptor, direct.fcntl.F_GETFL) == flags


def test_memory_amid_a_page_is_left_alone(opened):
    _, descriptor = opened
    memory = pages_for(0, SIZE + PAGE_BYTES)
    assert read_pages(descriptor, 0, SIZE, memory[8:]) == 0


@pytest.mark.parametrize("is_dropped", [True, False])
def test_tensors_are_the_same_either_way(tmp_path, is_dropped):
    stored = {name: torch.randn(700, 1000) for name in ("a", "b", "c")}
    path = tmp_path / "model.safetensors"
    save_file(stored, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    if is_dropped:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    files, pool = TensorFiles(tmp_path), BufferPool(2**23)
    for name, tensor in stored.items():
        found = files.load(files.source(name), pool.lend, is_temporary=True)
        assert torch.equal(found, tensor)
