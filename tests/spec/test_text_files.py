"""Text files as other programs write them, and what --output leaves in place."""

from __future__ import annotations

import codecs
import json
import os
import stat
import sys
import threading

import pytest

from llmpq.costmodel.importers.import_table import csv_rows
from llmpq.errors import SpecError
from llmpq.spec.fields import digest_of, dump_json, read_json, read_text, write_text
from llmpq.spec.tables import read_csv
from llmpq.spec.workload import load_trace

ENCODINGS = {
    "plain": lambda text: text.encode(),
    "mark": lambda text: codecs.BOM_UTF8 + text.encode(),
    "utf-16 little": lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
    "utf-16 big": lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
}


@pytest.fixture(params=ENCODINGS)
def encode(request):
    return ENCODINGS[request.param]


def test_json_is_read(tmp_path, encode):
    file = tmp_path / "cluster.json"
    file.write_bytes(encode('{"name": "Grüße"}\r\n'))
    assert read_json(file) == {"name": "Grüße"}


def test_tables_are_read(tmp_path, encode):
    file = tmp_path / "table.csv"
    file.write_bytes(encode("a,b\r\n1,2\r\n"))
    assert csv_rows(file, ["a", "b"]) == [(2, {"a": "1", "b": "2"})]
    rows, _ = read_csv(file, ("a", "b"))
    assert [cells for _, cells in rows] == [{"a": "1", "b": "2"}]


def test_texts_are_read(tmp_path, encode):
    file = tmp_path / "text.txt"
    file.write_bytes(encode("one\r\ntwo\n"))
    assert read_text(file) == "one\ntwo\n"


def test_traces_are_read(tmp_path, encode):
    file = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 3, "output_length": 2, "hash_ids": [1]}
    file.write_bytes(encode(json.dumps(line) + "\n"))
    (request,) = load_trace(file)
    assert request.prompt_tokens == 3


def test_bytes_that_are_no_text_name_the_remedy(tmp_path):
    file = tmp_path / "cluster.json"
    file.write_bytes(b'{"name": "Gr\xfc\xdfe"}')
    with pytest.raises(SpecError, match=r"at byte 12, expected text in UTF-8: save the file as"):
        read_json(file)


def test_names_of_files_that_are_no_text_are_kept(tmp_path):
    name = os.fsdecode(b"mod\xe8le")  # as an archive of another system leaves it
    write_text(tmp_path / "file.json", dump_json({"model": name}))
    assert read_json(tmp_path / "file.json") == {"model": name}
    assert digest_of(name) != digest_of("modèle")


def test_a_link_stays_and_its_target_is_written(tmp_path):
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("real.json")
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    dangling = tmp_path / "dangling.json"
    dangling.symlink_to("later.json")
    write_text(dangling, "new")
    assert dangling.is_symlink()
    assert (tmp_path / "later.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dangling.json", "later.json", "link.json", "real.json",
    ]  # fmt: skip


def test_a_pipe_gets_the_text(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "new")
    reader.join()
    assert found == ["new"]
    assert pipe.is_fifo()


def test_a_device_gets_the_text():
    # A terminal: its folder takes no other file, whatever the code under test does.
    reader, device = os.openpty()
    write_text(os.ttyname(device), "new")
    assert os.read(reader, 3) == b"new"
    os.close(reader)
    os.close(device)


def test_the_standard_output_prints(capfd):
    sys.stdout.write("before\n")
    write_text("/proc/self/fd/1", "new\n")
    sys.stdout.write("after\n")
    assert capfd.readouterr().out == "before\nnew\nafter\n"
