"""Imported tables: latency of devices without a profile, from published operator databases.

Three layouts: ``aiconfigurator`` (the package aiconfigurator-core, parquet), ``vidur`` (a folder
with ``mlp.csv`` and ``attention.csv``) and ``helix`` (one CSV of whole layers). What a database
lacks is filled by a rule that the table's provenance names: a bitwidth without a measured kernel is
the nearest weight-only or unquantized one, times the ratio of the two in the roofline. Tables of
the installed aiconfigurator price devices without any other table.

Vidur: ``mlp.csv`` times the products, norms and activations of a layer, ``attention.csv`` its
attention, ``send_recv.csv`` messages between two devices. Every time is a median in milliseconds,
in columns named ``time_stats.<operator>.median``. Rows of tensor-parallel layers are left out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from llmpq.costmodel.importers.aiconfigurator import PACKAGE, read_database
from llmpq.costmodel.importers.operators import GemmTimes, expert_shape, layer_samples, shard_of
from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.errors import SpecError
from llmpq.spec.catalog import device, device_types
from llmpq.spec.fields import encoding_of_file
from llmpq.spec.model import ModelSpec
from llmpq.spec.precision import BITS, Dtype, Phase
from llmpq.spec.tables import CommSample, CommTable, LatencySample, LatencyTable


def csv_rows(file: Path, needed: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Return the rows of a file with their line numbers.

    Raises:
        SpecError: the file cannot be read, or lacks one of the ``needed`` columns.
    """
    try:
        with file.open(encoding=encoding_of_file(file), newline="") as lines:
            reader = csv.DictReader(lines)
            rows = list(enumerate(reader, start=2))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: cannot be read: {error}") from None
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise SpecError(f"{file}: found no column '{missing[0]}', expected {', '.join(needed)}")
    return rows


def number(file: Path, line: int, text: str) -> float:
    """Return a cell as a number; raises ``SpecError`` if it is none."""
    try:
        return float(text)
    except (TypeError, ValueError):
        raise SpecError(f"{file}: line {line}: found '{text}', expected a number") from None


VIDUR_PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
VIDUR_SMALL = (
    "input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add", "add",
)  # fmt: skip
"""Small operators of a layer; its residual is added twice and timed once."""
VIDUR_ATTENTION_EXTRAS = ("attn_input_reshape", "attn_kv_cache_save", "attn_output_reshape")
"""What surrounds the attention kernel, in the versions of the layout that time it."""
_WORKERS = "num_tensor_parallel_workers"
_MS = 1e-3


def vidur_samples(folder: Path) -> tuple[LatencySample, ...]:
    """Return samples of the whole layer at every shape whose attention was measured.

    Raises:
        SpecError: a file is not there, lacks a column, or has no row of one worker.
    """
    dense = _vidur_dense(folder / "mlp.csv")
    samples = []
    for phase, batch, tokens, attention_s in _vidur_attention(folder / "attention.csv"):
        rows = batch * tokens if phase is Phase.PREFILL else batch
        if rows <= dense.max_rows:
            seconds = attention_s + dense.seconds(rows, 1, 1)
            samples.append(
                LatencySample(phase=phase, bits=16, batch=batch, tokens=tokens, seconds=seconds)
            )
    return tuple(samples)


def link_table(file: Path, between: tuple[str, str]) -> CommTable:
    """Return the transfers of a ``send_recv.csv`` as a link table.

    Two different nodes take what was measured with one device a node, twice the same node what was
    measured inside one. The file times one direction; a fit of links takes it for both.

    Raises:
        SpecError: the file is not there, lacks a column, or has too few such transfers.
    """
    timed = "time_stats.send_recv.median"
    is_inside = between[0] == between[1]
    seconds: dict[int, list[float]] = {}
    for line, row in csv_rows(file, (timed, "size", "devices_per_node", "num_workers")):
        devices = number(file, line, row["devices_per_node"])
        if number(file, line, row["num_workers"]) != 2 or (devices > 1) != is_inside:
            continue
        size = int(number(file, line, row["size"]))
        seconds.setdefault(size, []).append(number(file, line, row[timed]) * _MS)
    if len(seconds) < 2:
        where = "inside one node" if is_inside else "between two nodes"
        raise SpecError(
            f"{file}: found {len(seconds)} sizes of messages between two workers {where}, "
            "expected at least two"
        )
    samples = (
        CommSample(source=between[0], target=between[1], size_bytes=size, seconds=median(times))
        for size, times in sorted(seconds.items())
    )
    return CommTable(
        samples=tuple(samples),
        provenance=(("imported_from", "vidur"), ("filled_direction", "back is as fast as out")),
    )


def _vidur_dense(file: Path) -> GemmTimes:
    found: dict[int, list[float]] = {}
    for line, row in csv_rows(file, ("num_tokens", _WORKERS)):
        if row[_WORKERS] == "1":
            total = sum(
                _vidur_median(file, line, row, name) for name in (*VIDUR_PRODUCTS, *VIDUR_SMALL)
            )
            found.setdefault(int(number(file, line, row["num_tokens"])), []).append(total)
    if not found:
        raise SpecError(f"{file}: found no row of one worker, expected some")
    return GemmTimes(
        points={(1, 1): tuple(sorted((count, min(times)) for count, times in found.items()))}
    )


def _vidur_attention(file: Path) -> Iterator[tuple[Phase, int, int, float]]:
    needed = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill")
    for line, row in csv_rows(file, needed):
        if row.get(_WORKERS, "1") != "1":
            continue
        batch = int(number(file, line, row["batch_size"]))
        context = int(number(file, line, row["kv_cache_size"]))
        if row["is_prefill"] == "True":
            tokens = int(number(file, line, row["prefill_chunk_size"]))
            if context == 0:  # a later chunk of a prompt is no prefill of ours
                seconds = _vidur_median(file, line, row, "attn_prefill")
                yield Phase.PREFILL, batch, tokens, seconds + _vidur_extras(file, line, row)
        elif context >= 1:
            seconds = _vidur_median(file, line, row, "attn_decode")
            yield Phase.DECODE, batch, context, seconds + _vidur_extras(file, line, row)


def _vidur_extras(file: Path, line: int, row: Mapping[str, str]) -> float:
    keys = (f"time_stats.{name}.median" for name in VIDUR_ATTENTION_EXTRAS)
    return sum(number(file, line, row[key]) for key in keys if row.get(key)) * _MS


def _vidur_median(file: Path, line: int, row: Mapping[str, str], name: str) -> float:
    key = f"time_stats.{name}.median"
    if key not in row:
        raise SpecError(f"{file}: found no column '{key}', expected it there")
    return number(file, line, row[key]) * _MS


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
    return link_table(path, between)


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
    return vidur_samples(folder), ()


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
