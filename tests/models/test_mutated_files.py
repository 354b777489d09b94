"""Model directories with random damage are read or raise an error, in bounded memory."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc

import pytest
import torch

from llmpq.errors import SpecError
from llmpq.models import Checkpoint, TensorFiles

torch.set_num_threads(1)

INDEX = "model.safetensors.index.json"
COUNTS = [200, pytest.param(10_000, marks=pytest.mark.slow)]
VALUES = [
    None,
    -1,
    0,
    7,
    2**63,
    2**200,
    1.5,
    True,
    "F32",
    "",
    "../x",
    "/etc/passwd",
    [],
    [0, 8],
    {},
]


def damage_bytes(rng, data):
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(len(data), 3000))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randint(1, 9)]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randint(1, 9))
        else:
            data = data[: rng.randrange(1, len(data) + 1)]
    return bytes(data)


def damage_object(rng, fields):
    """Change a random value somewhere in a JSON object."""
    target = fields
    while True:
        key = rng.choice(list(target) if isinstance(target, dict) else range(len(target)))
        if not (isinstance(target[key], dict | list) and target[key] and rng.random() < 0.8):
            break
        target = target[key]
    if rng.random() < 0.2:
        del target[key]
    else:
        target[key] = rng.choice(VALUES)
    return fields


def damage_header(rng, data):
    length = int.from_bytes(data[:8], "little")
    raw = json.dumps(damage_object(rng, json.loads(data[8 : 8 + length]))).encode()
    return len(raw).to_bytes(8, "little") + raw + data[8 + length :]


def damage_index(rng, data):
    return json.dumps(damage_object(rng, json.loads(data))).encode()


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_directories_raise_an_error_or_are_read(tiny_model, tmp_path, count):
    source = tiny_model("llama", max_shard_size="20KB")
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    originals = {path.name: path.read_bytes() for path in folder.glob("*.safetensors*")}
    limit = 40 * max(map(len, originals.values())) + 2**20
    rng = random.Random(count)
    outcomes = {True: 0, False: 0}
    unnamed: list[SpecError] = []
    Checkpoint(folder)
    tracemalloc.start()
    for _ in range(count):
        name = rng.choice(list(originals))
        kinds = [damage_bytes, damage_index if name == INDEX else damage_header]
        (folder / name).write_bytes(rng.choice(kinds)(rng, originals[name]))
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            files = TensorFiles(folder)
            for tensor in files.names:
                files.load(files.source(tensor))
            outcomes[True] += 1
        except SpecError as error:
            outcomes[False] += 1
            unnamed += [error] if str(folder) not in str(error) else []
        assert tracemalloc.get_traced_memory()[1] - before < limit
        (folder / name).write_bytes(originals[name])
    tracemalloc.stop()
    assert not unnamed
    assert min(outcomes.values()) > count // 50
