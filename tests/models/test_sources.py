"""Tensor sources: byte ranges, and detection of changed files."""

import mmap
import os

import pytest
import torch
from safetensors.torch import save_file

from llmpq.errors import SpecError
from llmpq.models import TensorFiles
from llmpq.models.tensor_files import on_host


@pytest.fixture
def saved(tmp_path):
    seeded = torch.Generator().manual_seed(0)
    tensors = {
        "cube": torch.randn(3, 4, 5, generator=seeded),
        "half": torch.randn(7, generator=seeded).to(torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "none": torch.zeros(0, 2),
        "flags": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


def test_sources_read_the_stored_tensors(saved):
    folder, tensors = saved
    files = TensorFiles(folder)
    for name, expected in tensors.items():
        source = files.source(name)
        assert source.nbytes == expected.nbytes
        found = files.load(source)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_rows_are_slices(saved):
    folder, tensors = saved
    files = TensorFiles(folder)
    rows = [files.load(row) for row in files.source("cube").rows()]
    assert torch.equal(torch.stack(rows), tensors["cube"])


def test_transposed_source_exchanges_the_last_two_dimensions(saved):
    folder, tensors = saved
    files = TensorFiles(folder)
    source = files.source("cube").transposed()
    assert source.shape == (3, 5, 4)
    assert torch.equal(files.load(source), tensors["cube"].mT)
    rows = [files.load(row) for row in source.rows()]
    assert torch.equal(torch.stack(rows), tensors["cube"].mT)
    blocks = files.load_blocks(next(source.rows()), on_host, rows=2)
    assert torch.equal(torch.cat(list(blocks)), tensors["cube"][0].mT)


def test_source_reads_into_memory_of_the_caller(saved):
    folder, tensors = saved
    files = TensorFiles(folder)
    slab = torch.zeros(60)
    found = files.load(files.source("cube"), lambda shape, dtype: slab.view(dtype).view(shape))
    assert found.data_ptr() == slab.data_ptr()
    assert torch.equal(slab.view(3, 4, 5), tensors["cube"])


@pytest.mark.parametrize("shift", [0, 8])  # direct reads need memory that begins at a page
@pytest.mark.parametrize("rows", [(0, 4000), (1, 3), (77, 3999)])
def test_direct_reads_return_what_was_stored(tmp_path, shift, rows):
    tensor = torch.randn(4000, 301, generator=torch.Generator().manual_seed(0))
    save_file({"small": torch.zeros(3), "large": tensor}, tmp_path / "model.safetensors")

    def allocate(shape, dtype):
        assert len(shape) == 1
        memory = mmap.mmap(-1, shape[0] + mmap.PAGESIZE)
        return torch.frombuffer(memory, dtype=dtype, count=shape[0], offset=shift)

    files = TensorFiles(tmp_path)
    source = files.source("large").block(*rows)
    blocks = list(files.load_blocks(source, allocate, rows=1500))
    assert [len(block) for block in blocks[:-1]] == [1500] * (len(blocks) - 1)
    assert torch.equal(torch.cat(blocks), tensor[slice(*rows)])


@pytest.mark.parametrize("change", ["truncate", "write", "replace", "remove"])
def test_file_changed_since_the_check_raises_an_error(saved, change):
    folder, tensors = saved
    files = TensorFiles(folder)
    path = folder / "model.safetensors"
    if change == "truncate":
        os.truncate(path, path.stat().st_size - 8)
    elif change == "write":
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(0, 0))
    elif change == "replace":
        save_file(tensors, folder / "new")
        (folder / "new").replace(path)
    else:
        path.unlink()
    with pytest.raises(SpecError, match=r"model\.safetensors"):
        files.load(files.source("cube"))


def fingerprint(folder, name="cube"):
    """Return the fingerprint of a tensor, once the file is old enough to have one."""
    for _ in range(10**6):
        files = TensorFiles(folder)
        found = files.fingerprint([files.source(name)])
        if found is not None:
            return found
    raise AssertionError("a file never settles")


def test_fingerprint_of_unchanged_files_is_equal(saved):
    folder, _ = saved
    assert fingerprint(folder) == fingerprint(folder)
    assert fingerprint(folder) != fingerprint(folder, "half")


def test_write_with_restored_mtime_changes_the_fingerprint(saved):
    folder, _ = saved
    path = folder / "model.safetensors"
    before, times = fingerprint(folder), path.stat()
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x01")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_mtime_ns == times.st_mtime_ns
    assert fingerprint(folder) != before


def test_files_changed_since_opening_have_no_fingerprint(saved):
    folder, _ = saved
    fingerprint(folder)
    files = TensorFiles(folder)
    (folder / "model.safetensors").chmod(0o600)
    assert files.fingerprint([files.source("cube")]) is None
