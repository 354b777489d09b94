"""Public tables: latency tables assembled from an installed operator database.

They price devices for which neither the cluster nor the profile folder has a table, where the
``profiles`` extra is installed; devices that it lacks are priced by the roofline.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

from llmpq.costmodel.importers.aiconfigurator import PACKAGE
from llmpq.costmodel.importers.imported import DEVICE_TYPES, ImportRequest, import_table
from llmpq.errors import SpecError
from llmpq.spec.model import ModelSpec
from llmpq.spec.precision import BITS, Dtype
from llmpq.spec.tables import LatencyTable

HINT = "pip install 'llmpq[profiles]' to plan these devices with measured kernels"
_NAMES = {ours: theirs for theirs, ours in DEVICE_TYPES.items()}


def is_known(device_type: str) -> bool:
    """Return whether the public database measured a device of this type, installed or not."""
    return device_type in _NAMES


def is_installed() -> bool:
    """Return whether the public database and its reader are installed."""
    return all(find_spec(name) is not None for name in (PACKAGE, "pyarrow"))


@lru_cache(maxsize=32)
def public_table(
    model: ModelSpec, device_type: str, dtype: Dtype, *, members: int = 1
) -> LatencyTable | None:
    """Return the table of a model's layer on a device, ``None`` where none can be assembled.

    ``members`` devices share the layer (tensor parallelism). The last tables are kept: assembling
    takes a quarter of a second.
    """
    if dtype == "float32" or not is_known(device_type) or not is_installed():
        return None
    request = ImportRequest(
        model=model,
        device=_NAMES[device_type],
        device_type=device_type,
        bits=BITS,
        dtype=dtype,
        tensor_parallel=members,
    )
    try:
        return import_table("aiconfigurator", request)
    except SpecError:
        # Such as attention that was not measured on this device: the roofline still answers.
        return None


def public_source(device_type: str) -> str:
    """Return how messages name a public table."""
    return f"aiconfigurator {_NAMES[device_type]}"
