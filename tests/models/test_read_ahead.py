"""What is asked of the disk ahead of reading: enough, in order, once, and never a wrong byte."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from llmpq.errors import SpecError
from llmpq.models import TensorFiles
from llmpq.models.read_ahead import ReadAhead
from llmpq.models.sources import on_host

ROW_BYTES = 1024


@pytest.fixture
def folder(tmp_path):
    tensors = {
        f"t{i}": torch.randint(0, 255, (i + 1, ROW_BYTES), dtype=torch.uint8) for i in range(6)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def asked(monkeypatch):
    """Byte ranges in the order in which they were asked for; they still are."""
    found = []
    real = TensorFiles.will_need

    def noted(self, part):
        found.append(part)
        real(self, part)

    monkeypatch.setattr(TensorFiles, "will_need", noted)
    return found


def sources_of(files):
    return [files.source(f"t{i}") for i in range(6)]


def test_tensors_are_those_that_the_files_hold(folder):
    files = TensorFiles(folder)
    ahead = ReadAhead(files, window_bytes=3 * ROW_BYTES)
    ahead.follow(sources_of(files))
    for source in sources_of(files):
        assert torch.equal(ahead.load(source, on_host), files.load(source))


def test_the_window_is_asked_for_beyond_the_tensor_that_is_read(folder, asked):
    files = TensorFiles(folder)
    sources = sources_of(files)
    ahead = ReadAhead(files, window_bytes=3 * ROW_BYTES)
    ahead.follow(sources)
    ahead.load(sources[0], on_host)  # one row; two and three more reach the window
    assert [part.begin for part in asked] == [s.ranges[0].begin for s in sources[:3]]
    ahead.load(sources[1], on_host)
    assert len(asked) == 3  # three rows are still ahead
    ahead.load(sources[2], on_host)
    assert len(asked) == 4


def test_every_byte_is_asked_for_once_and_in_order(folder, asked):
    files = TensorFiles(folder)
    ahead = ReadAhead(files, window_bytes=2 * ROW_BYTES)
    for source in sources_of(files):  # announced one before it is read, as layers are
        ahead.follow([source])
        ahead.load(source, on_host)
    assert [part.begin for part in asked] == [s.ranges[0].begin for s in sources_of(files)]
    assert sum(part.nbytes for part in asked) == sum(s.nbytes for s in sources_of(files))


def test_large_tensors_are_asked_for_in_pieces(folder, asked, monkeypatch):
    monkeypatch.setattr("llmpq.models.read_ahead._PIECE_BYTES", ROW_BYTES // 2)
    files = TensorFiles(folder)
    ahead = ReadAhead(files, window_bytes=ROW_BYTES)
    ahead.follow([files.source("t5")])
    ahead.load(files.source("t5"), on_host)
    begin = files.source("t5").ranges[0].begin
    assert [part.begin for part in asked] == [begin + i * ROW_BYTES // 2 for i in range(12)]


def test_a_file_that_is_gone_is_one_clear_error(folder):
    files = TensorFiles(folder)
    sources = sources_of(files)
    ahead = ReadAhead(files)
    ahead.follow(sources)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SpecError, match=r"model\.safetensors: cannot be read"):
        ahead.load(sources[0], on_host)
