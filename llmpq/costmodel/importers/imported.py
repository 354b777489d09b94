"""Imported tables: latency of devices without a profile, from published operator databases.

Three layouts: ``aiconfigurator`` (the package aiconfigurator-core, parquet), ``vidur`` (a folder
with ``mlp.csv`` and ``attention.csv``) and ``helix`` (one CSV of whole layers). What a database
lacks is filled by a rule that the table's provenance names: a bitwidth without a measured kernel is
the nearest weight-only or unquantized one, times the ratio of the two in the roofline. Tables of
the installed aiconfigurator price devices without any other table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from llmpq.costmodel.importers import vidur
from llmpq.costmodel.importers.aiconfigurator import PACKAGE, read_database
from llmpq.costmodel.importers.csv_rows import csv_rows, number
from llmpq.costmodel.importers.operators import expert_shape, layer_samples, shard_of
from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.errors import SpecError
from llmpq.spec.catalog import device, device_types
from llmpq.spec.model import ModelSpec
from llmpq.spec.precision import BITS, Dtype, Phase
from llmpq.spec.tables import CommTable, LatencySample, LatencyTable

DEVICE_TYPES: Mapping[str, str] = {
    "a100_sxm": "A100-80G",
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "l40s": "L40S",
    "l4": "L4",
}
"""Catalogue types of the databases' devices; another device keeps its own name."""

HINT = "pip install 'llmpq[profiles]' to plan these devices with measured kernels"
_NAMES = {ours: theirs for theirs, ours in DEVICE_TYPES.items()}
_HELIX_HEADER = ("model", "machine", "phase", "batch_tokens", "layer_ms")
_HELIX_PHASES = {"prompt": Phase.PREFILL, "decode": Phase.DECODE}
_MS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """Device, engine and layout to import from a database of measured operators.

    Attributes:
        device, device_type: the database's name of the device, and the catalogue's.
        path: the database, where it is not the installed package.
        engine: whose kernels, ``None`` for the first known one that was measured.
        context_tokens: context that layouts without one (helix) were measured at.
        tensor_parallel: devices that share a layer; the table's seconds are those of all of them,
            with the all-reduces between them.
    """

    model: ModelSpec
    device: str
    device_type: str
    bits: tuple[int, ...] = (3, 4, 8, 16)
    dtype: Dtype = "bfloat16"
    path: Path | None = None
    engine: str | None = None
    context_tokens: int = 512
    tensor_parallel: int = 1


def import_table(layout: str, request: ImportRequest) -> LatencyTable:
    """Read a database and return the latency table of one layer of a model.

    Raises:
        SpecError: an unknown layout or device, a database that is not there or is malformed, or a
            model whose layers are no plain sum of operators.
    """
    if layout not in LAYOUTS:
        raise SpecError(f"--from: found '{layout}', expected one of {', '.join(LAYOUTS)}")
    samples, notes = LAYOUTS[layout](request)
    degree = request.tensor_parallel
    if not samples:
        raise SpecError(f"{layout}: found no samples of {request.device} for this model")
    origin = (
        ("model", request.model.name),
        ("device", request.device_type),
        ("dtype", request.dtype),
        ("imported_from", layout),
        *((("tensor_parallel", str(degree)),) if degree > 1 else ()),
    )
    return LatencyTable(samples=tuple(samples), provenance=(*origin, *notes))


def import_links(layout: str, path: Path | None, between: tuple[str, str]) -> CommTable:
    """Read measured transfers between two devices as a link table; only ``vidur`` has any.

    ``between`` names the nodes that the table is for; twice the same for two devices of one node.

    Raises:
        SpecError: another layout, or a file that is not there or malformed.
    """
    if layout != "vidur":
        raise SpecError(
            f"--between: found --from {layout}, expected vidur: no other layout measured transfers "
            "between two devices (aiconfigurator has collectives only); or use llmpq-profile link"
        )
    if path is None:
        raise SpecError("--path: found nothing, expected a send_recv.csv")
    return vidur.link_table(path, between)


Imported = tuple[Sequence[LatencySample], tuple[tuple[str, str], ...]]


def _aiconfigurator(request: ImportRequest) -> Imported:
    shape = expert_shape(request.model.layer_types[0])
    degree = request.tensor_parallel
    layer = shard_of(request.model.layer_types[0], degree)
    database = read_database(request.path, request.device, request.engine, shape, degree)
    times = replace(
        database.times,
        gemms={bits: one for bits, one in database.times.gemms.items() if bits in request.bits},
    )
    samples = layer_samples(layer, request.model.hidden_size, times)
    heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
    kernels = (f"{bits} bits {database.kernels[bits]}" for bits in sorted(times.gemms))
    notes = [
        ("engine", database.engine),
        ("kernels", "; ".join(kernels)),
        (
            "filled_norms_and_launches",
            f"{times.stream_bytes_per_s:.4g} bytes/s and {times.launch_s:.3g} s a small kernel",
        ),
    ]
    for phase, one in times.attention.items():
        near, factor = one.nearest(heads)
        if near != heads:
            text = f"heads {heads} from {near}, times {factor:.3g}"
            notes.append((f"filled_{phase.value}_attention", text))
    # An 8-bit float kernel multiplies in 8 bits: its times say nothing of fewer bits.
    summed = {one.bits for one in samples}
    sources = {bits for bits in summed if not database.kernels[bits].startswith("fp8")}
    filled, words = _fill_bits(request, samples, sources)
    return (*samples, *filled), (*notes, *words)


def _fill_bits(
    request: ImportRequest, samples: Sequence[LatencySample], sources: Set[int]
) -> tuple[tuple[LatencySample, ...], tuple[tuple[str, str], ...]]:
    """Fill bitwidths without a kernel from the nearest measured one, by the roofline's ratio."""
    measured = {one.bits for one in samples}
    absent = [bits for bits in request.bits if bits not in measured]
    if not absent or not sources:
        return (), ()
    if request.device_type not in device_types():
        return (), (("left_out", f"{absent} bits: no kernel, no catalogue entry to fill from"),)
    roofline = RooflineLatencyModel(
        model=request.model, device=device(request.device_type), dtype=request.dtype, kv_bits=16
    )
    filled, notes = [], []
    for bits in absent:
        near = min(sources, key=lambda one: (abs(one - bits), one))
        for one in samples:
            if one.bits != near:
                continue
            asked = (one.batch, float(one.tokens), 0)
            ratio = roofline.layer_s(one.phase, bits, *asked)
            ratio /= roofline.layer_s(one.phase, near, *asked)
            filled.append(replace(one, bits=bits, seconds=one.seconds * ratio))
        notes.append((f"filled_{bits}_bits", f"{near} bits times the roofline's ratio"))
    return tuple(filled), tuple(notes)


def _helix(request: ImportRequest) -> Imported:
    """Read Helix's layout: whole layers, by tokens of a prompt or by sequences in decode."""
    file = _file(request, "a CSV file with --path")
    _require_one_device(request, "helix: its layers were measured on one device")
    samples = []
    for line, row in csv_rows(file, _HELIX_HEADER):
        if f"{row['model']}/{row['machine']}" != request.device:
            continue
        size, seconds = (
            number(file, line, row["batch_tokens"]),
            number(file, line, row["layer_ms"]),
        )
        if row["phase"] not in _HELIX_PHASES:
            raise SpecError(
                f"{file}: line {line}: phase '{row['phase']}', expected prompt or decode"
            )
        if size < 1 or seconds <= 0:
            continue  # the origin of the curve
        phase = _HELIX_PHASES[row["phase"]]
        shape = (1, int(size)) if phase is Phase.PREFILL else (int(size), request.context_tokens)
        samples.append(
            LatencySample(
                phase=phase, bits=16, batch=shape[0], tokens=shape[1], seconds=seconds * _MS
            )
        )
    return samples, (("decode_context", f"{request.context_tokens} tokens, assumed"),)


def _vidur(request: ImportRequest) -> Imported:
    folder = _file(request, "the folder of one model with --path")
    if (shape := expert_shape(request.model.layer_types[0])) is not None:
        raise SpecError(f"vidur: found {shape.words}, expected a dense layer")
    _require_one_device(request, "vidur: a model's folder has no all-reduces")
    return vidur.layer_samples(folder), ()


def _require_one_device(request: ImportRequest, reason: str) -> None:
    if request.tensor_parallel > 1:
        raise SpecError(
            f"--tensor_parallel: found {request.tensor_parallel}, expected 1 with {reason}"
        )


def _file(request: ImportRequest, expected: str) -> Path:
    if request.path is None:
        raise SpecError(f"--path: found nothing, expected {expected}")
    return request.path


LAYOUTS = {"aiconfigurator": _aiconfigurator, "helix": _helix, "vidur": _vidur}
"""Readers by the name a command gives."""


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
