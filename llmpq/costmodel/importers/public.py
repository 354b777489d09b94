"""Public tables: measured latencies of devices nobody here owns, without a file to name.

Where neither the cluster nor the profile folder has a table for a device, the installed operator
database (the ``profiles`` extra) is asked, and a layer of the model assembled from it. What it does
not know stays with the roofline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmpq.costmodel.importers.aiconfigurator import PACKAGE
from llmpq.costmodel.importers.imported import DEVICE_TYPES, ImportRequest, import_table
from llmpq.costmodel.tables.cache import Cache, digest
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.model import ModelSpec
from llmpq.spec.precision import BITS, Dtype, Phase
from llmpq.spec.tables import LatencySample, LatencyTable

HINT = "pip install 'llmpq[profiles]' to plan these devices with measured kernels"
_NAMES = {ours: theirs for theirs, ours in DEVICE_TYPES.items()}


def is_known(device_type: str) -> bool:
    """Return whether the public database measured a device of this type, installed or not."""
    return device_type in _NAMES


def is_installed() -> bool:
    """Return whether the public database is here, and what reads it."""
    return all(find_spec(name) is not None for name in (PACKAGE, "pyarrow"))


def is_measured(device_type: str, dtype: Dtype) -> bool:
    """Return whether there may be a table of this type of device here."""
    return dtype != "float32" and is_known(device_type) and is_installed()


@lru_cache(maxsize=32)
def public_table(
    model: ModelSpec,
    device_type: str,
    dtype: Dtype,
    cache: Cache | None = None,
    *,
    known_only: bool = False,
    members: int = 1,
) -> LatencyTable | None:
    """Return the table of a model's layer on a device, ``None`` where none can be assembled.

    With ``members`` the layer is shared by so many devices (tensor parallelism).

    Assembling takes a second or so, and a planner asks more than once: the last ones are kept.
    With ``known_only`` nothing is assembled: what an earlier run kept, or ``None``.
    """
    if not is_measured(device_type, dtype):
        return None
    request = ImportRequest(
        model=model,
        device=_NAMES[device_type],
        device_type=device_type,
        bits=BITS,
        dtype=dtype,
        tensor_parallel=members,
    )
    key = digest(*(part.encode() for part in (repr(request), *_database(request.device))))
    known = None if cache is None else cache.read(key)
    if known is not None:
        return _restored(known)
    if known_only:
        return None
    try:
        table = import_table("aiconfigurator", request)
    except SpecError:
        # Such as attention that nobody measured on this device: the roofline still answers.
        return None
    if cache is not None:
        cache.write(key, _stored(table))
    return table


def _database(device: str) -> Iterator[str]:
    """Yield what a table of a device depends on beside the model: files and the catalogue."""
    yield repr(catalog.device(DEVICE_TYPES[device]))
    found = find_spec(PACKAGE)
    for root in (found.submodule_search_locations or ()) if found else ():
        for file in sorted((Path(root) / "systems" / "data" / device).glob("*/*/*/*.parquet")):
            status = file.stat()
            yield f"{file} {status.st_size} {status.st_mtime_ns}"


def _stored(table: LatencyTable) -> dict[str, npt.NDArray[Any]]:
    rows = [
        (list(Phase).index(one.phase), one.bits, one.batch, one.tokens) for one in table.samples
    ]
    return {
        "shapes": np.array(rows),
        "seconds": np.array([one.seconds for one in table.samples]),
        "provenance": np.frombuffer(json.dumps(table.provenance).encode(), dtype=np.uint8),
    }


def _restored(arrays: dict[str, npt.NDArray[Any]]) -> LatencyTable:
    phases = tuple(Phase)
    rows = zip(arrays["shapes"].tolist(), arrays["seconds"].tolist(), strict=True)
    return LatencyTable(
        samples=tuple(
            LatencySample(
                phase=phases[phase], bits=bits, batch=batch, tokens=tokens, seconds=seconds
            )
            for (phase, bits, batch, tokens), seconds in rows
        ),
        provenance=tuple((key, value) for key, value in json.loads(arrays["provenance"].tobytes())),
    )


def public_source(device_type: str) -> str:
    """Return how messages name a public table."""
    return f"aiconfigurator {_NAMES[device_type]}"
