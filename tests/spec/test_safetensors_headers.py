"""Safetensors headers: accepted if the library accepts them, else a SpecError."""

from __future__ import annotations

import io
import json
import random

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from llmpq.errors import SpecError
from llmpq.spec.model_files.weight_headers import (
    MAX_SAFETENSORS_BYTES,
    parse_header,
    read_safetensors_header,
)

MUTATIONS = [2000, pytest.param(100_000, marks=pytest.mark.slow)]


def _parse(fields, data_bytes):
    return parse_header(json.dumps(fields).encode(), data_bytes=data_bytes, where="file")


def _tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def header_of(path):
    with path.open("rb") as stream:
        return read_safetensors_header(stream, file_bytes=path.stat().st_size, where=str(path))


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {
        "a.weight": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor(1, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "half": torch.ones(5, dtype=torch.bfloat16),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_a_header_has_names_shapes_and_offsets(stored):
    header = header_of(stored)
    assert {name: entry.shape for name, entry in header.entries.items()} == {
        "a.weight": (2, 3),
        "b": (),
        "empty": (0, 4),
        "half": (5,),
    }
    assert header.entries["half"].dtype == "BF16"


@pytest.mark.parametrize(
    ("fields", "data_bytes", "message"),
    [
        ([], 0, "expected an object"),
        ({"__metadata__": {"format": 1}}, 0, "__metadata__ is not an object of strings"),
        ({"t": 1}, 0, "tensor 't'.*dtype, shape and data_offsets"),
        ({"t": _tensor() | {"extra": 1}}, 8, "dtype, shape and data_offsets"),
        ({"t": _tensor(dtype="F99")}, 8, "found dtype"),
        ({"t": _tensor(dtype=["F32"])}, 8, "found dtype"),
        ({"t": _tensor(shape=(-2,))}, 8, "found shape"),
        ({"t": _tensor(shape=(True, 2))}, 8, "found shape"),
        ({"t": _tensor(shape=(2.0,))}, 8, "found shape"),
        ({"t": _tensor(shape=(2**62, 2**62))}, 8, "expected .* bytes"),
        ({"t": _tensor(offsets=(8, 0))}, 8, "expected 8 bytes"),
        ({"t": _tensor(offsets=(0, 8, 16))}, 8, "found offsets"),
        ({"t": _tensor(offsets=(0, 4))}, 8, "expected 8 bytes"),
        ({"t": _tensor(offsets=(8, 16))}, 16, "a gap"),
        ({"t": _tensor()}, 4, "ends at byte 8 of 4"),
        ({"t": _tensor()}, 12, "end at byte 8 of 12"),
        ({"a": _tensor(), "b": _tensor(offsets=(4, 12))}, 12, "tensor 'b'.*inside the tensor"),
    ],
)
def test_inconsistent_header_raises_an_error(fields, data_bytes, message):
    with pytest.raises(SpecError, match=message):
        _parse(fields, data_bytes)


@pytest.mark.parametrize("raw", [b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":1,"a":2}', b"9" * 5000])
def test_header_that_is_not_json_raises_an_error(raw):
    with pytest.raises(SpecError, match="header is"):
        parse_header(raw, data_bytes=0, where="file")


@pytest.mark.parametrize("length", [0, 1, 50, MAX_SAFETENSORS_BYTES + 1, 2**63, 2**64 - 1])
def test_header_of_impossible_length_raises_an_error_before_reading(tmp_path, length):
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}" + b" " * 20)
    with pytest.raises(SpecError, match=f"found a header of {length} bytes"):
        header_of(path)


def test_header_over_the_limit_raises_an_error(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as stream:  # sparse: takes no disk space
        stream.write((MAX_SAFETENSORS_BYTES + 1).to_bytes(8, "little"))
        stream.truncate(MAX_SAFETENSORS_BYTES + 100)
    with pytest.raises(SpecError, match="found a header of"):
        header_of(path)


@pytest.mark.parametrize("data", [b"", b"\x02", b"\x02" + bytes(7)])
def test_truncated_file_raises_an_error(tmp_path, data):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(SpecError):
        header_of(path)


def _mutate_bytes(rng, data):
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(4)
        at = rng.randrange(min(len(data), 400)) if data else 0
        if kind == 0 and data:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randint(1, 8)]
        elif kind == 2:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 8)))
        else:
            data = data[: rng.randrange(len(data) + 1)]
    return bytes(data)


def _mutate_fields(rng, data):
    length = int.from_bytes(data[:8], "little")
    fields, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    name = rng.choice(sorted(fields))
    values = [None, -1, 0, 1, 7, 2**31, 2**63, 2**70, 1.5, True, "F32", "", [], [0], [0, 8], {}]
    target = fields[name]
    key = rng.choice(sorted(target))
    if isinstance(target[key], list) and target[key] and rng.random() < 0.6:
        target[key][rng.randrange(len(target[key]))] = rng.choice(values)
    elif rng.random() < 0.2:
        del target[key]
    else:
        target[key] = rng.choice(values)
    raw = json.dumps(fields).encode()
    return len(raw).to_bytes(8, "little") + raw + body


@pytest.mark.parametrize("count", MUTATIONS)
def test_mutated_files_raise_an_error_or_read_like_the_library(stored, count):
    rng = random.Random(count)
    original = stored.read_bytes()
    accepted = refused = 0
    for _ in range(count):
        mutate = rng.choice([_mutate_bytes, _mutate_fields])
        data = mutate(rng, original)
        try:
            header = read_safetensors_header(io.BytesIO(data), file_bytes=len(data), where="file")
        except SpecError:
            refused += 1
            continue
        accepted += 1
        read = dict(safetensors.deserialize(data))  # raises where the library would refuse
        assert {n: (e.dtype, list(e.shape)) for n, e in header.entries.items()} == {
            n: (t["dtype"], t["shape"]) for n, t in read.items()
        }
        body = data[header.data_begin :]
        for name, entry in header.entries.items():
            assert read[name]["data"] == body[entry.begin : entry.end]
    assert accepted > count // 100
    assert refused > count // 2
