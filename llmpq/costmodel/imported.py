"""Imported tables: latency of devices nobody here owns, from operator databases others measured.

Three layouts: ``aiconfigurator`` (the package aiconfigurator-core, parquet), ``vidur`` (a folder
with ``mlp.csv`` and ``attention.csv``) and ``helix`` (one CSV of whole layers). What a database
lacks is filled by a stated rule and named in the table's provenance: norms and launches as
``llmpq.costmodel.operators`` says; a bitwidth without a measured kernel is the nearest weight-only
or unquantized one, times the ratio of the two in the roofline.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from llmpq.costmodel.aiconfigurator import read_database
from llmpq.costmodel.operators import GemmTimes, expert_shape, layer_samples
from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.errors import SpecError
from llmpq.spec.catalog import device, device_types
from llmpq.spec.model import ModelSpec
from llmpq.spec.precision import Dtype, Phase
from llmpq.spec.tables import LatencySample, LatencyTable

DEVICE_TYPES: Mapping[str, str] = {
    "a100_sxm": "A100-80G",
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "l40s": "L40S",
    "l4": "L4",
}
"""Catalogue types of the databases' devices; another device keeps its own name."""

_HELIX_HEADER = ("model", "machine", "phase", "batch_tokens", "layer_ms")
_HELIX_PHASES = {"prompt": Phase.PREFILL, "decode": Phase.DECODE}
_VIDUR_PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
_VIDUR_SMALL = (
    "input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add", "add",
)  # fmt: skip
_MS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """What to import.

    Attributes:
        model: the model whose layer is assembled.
        device: the database's name of the device.
        device_type: the catalogue's name, written into the table.
        bits: bitwidths wanted.
        dtype: number format of what is not quantized.
        path: the database, where it is not the installed package.
        engine: whose kernels, ``None`` for the first known one that was measured.
        context_tokens: context that layouts without one (helix) were measured at.
    """

    model: ModelSpec
    device: str
    device_type: str
    bits: tuple[int, ...] = (3, 4, 8, 16)
    dtype: Dtype = "bfloat16"
    path: Path | None = None
    engine: str | None = None
    context_tokens: int = 512


def import_table(layout: str, request: ImportRequest) -> LatencyTable:
    """Read a database and return the latency table of one layer of a model.

    Raises:
        SpecError: an unknown layout or device, a database that is not there or is malformed, or a
            model whose layers are no plain sum of operators.
    """
    if layout not in LAYOUTS:
        raise SpecError(f"--from: found '{layout}', expected one of {', '.join(LAYOUTS)}")
    samples, notes = LAYOUTS[layout](request)
    if not samples:
        raise SpecError(f"{layout}: found no samples of {request.device} for this model")
    origin = (
        ("model", request.model.name),
        ("device", request.device_type),
        ("dtype", request.dtype),
        ("imported_from", layout),
    )
    return LatencyTable(samples=tuple(samples), provenance=(*origin, *notes))


Imported = tuple[Sequence[LatencySample], tuple[tuple[str, str], ...]]


def _aiconfigurator(request: ImportRequest) -> Imported:
    shape = expert_shape(request.model.layer_types[0])
    database = read_database(request.path, request.device, request.engine, shape)
    times = replace(
        database.times,
        gemms={bits: one for bits, one in database.times.gemms.items() if bits in request.bits},
    )
    layer = request.model.layer_types[0]
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
            filled.append(
                LatencySample(
                    phase=one.phase, bits=bits, batch=one.batch, tokens=one.tokens,
                    seconds=one.seconds * ratio,
                )
            )  # fmt: skip
        notes.append((f"filled_{bits}_bits", f"{near} bits times the roofline's ratio"))
    return tuple(filled), tuple(notes)


def _helix(request: ImportRequest) -> Imported:
    """Read Helix's layout: whole layers, by tokens of a prompt or by sequences in decode."""
    file = _file(request, "a CSV file with --path")
    samples = []
    for line, row in _csv_rows(file, _HELIX_HEADER):
        if f"{row['model']}/{row['machine']}" != request.device:
            continue
        size, seconds = (
            _number(file, line, row["batch_tokens"]),
            _number(file, line, row["layer_ms"]),
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
    """Read Vidur's layout: operators of one model by tokens, attention by batch and context."""
    folder = _file(request, "the folder of one model with --path")
    layer = request.model.layer_types[0]
    rows = list(_csv_rows(folder / "mlp.csv", ("num_tokens", "num_tensor_parallel_workers")))
    dense: dict[int, list[float]] = {}
    for line, row in rows:
        if row["num_tensor_parallel_workers"] != "1":
            continue
        names = (*_VIDUR_PRODUCTS, *_VIDUR_SMALL)
        total = sum(_median(folder / "mlp.csv", line, row, name) for name in names)
        dense.setdefault(int(row["num_tokens"]), []).append(total)
    if not dense:
        raise SpecError(f"{folder / 'mlp.csv'}: found no row of one worker, expected some")
    if (shape := expert_shape(layer)) is not None:
        raise SpecError(f"vidur: found {shape.words}, expected a dense layer")
    products = tuple(sorted((count, min(times)) for count, times in dense.items()))
    gemm = GemmTimes(points={(1, 1): products})
    samples = []
    for phase, batch, tokens, attention_s in _vidur_attention(folder / "attention.csv"):
        size = batch * tokens if phase is Phase.PREFILL else batch
        if size <= gemm.max_rows:
            seconds = attention_s + gemm.seconds(size, 1, 1)
            samples.append(
                LatencySample(phase=phase, bits=16, batch=batch, tokens=tokens, seconds=seconds)
            )
    return samples, ()


def _vidur_attention(file: Path) -> Iterable[tuple[Phase, int, int, float]]:
    needed = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill")
    for line, row in _csv_rows(file, needed):
        if row.get("num_tensor_parallel_workers", "1") != "1":
            continue
        batch, context = int(_number(file, line, row["batch_size"])), row["kv_cache_size"]
        if row["is_prefill"] == "True":
            if _number(file, line, context) == 0:
                tokens = int(_number(file, line, row["prefill_chunk_size"]))
                yield Phase.PREFILL, batch, tokens, _median(file, line, row, "attn_prefill")
        elif _number(file, line, context) >= 1:
            tokens = int(_number(file, line, context))
            yield Phase.DECODE, batch, tokens, _median(file, line, row, "attn_decode")


def _median(file: Path, line: int, row: Mapping[str, str], name: str) -> float:
    key = f"time_stats.{name}.median"
    if key not in row:
        raise SpecError(f"{file}: found no column '{key}', expected it there")
    return _number(file, line, row[key]) * _MS


def _file(request: ImportRequest, expected: str) -> Path:
    if request.path is None:
        raise SpecError(f"--path: found nothing, expected {expected}")
    return request.path


def _csv_rows(file: Path, needed: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            rows = list(enumerate(reader, start=2))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: cannot be read: {error}") from None
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise SpecError(f"{file}: found no column '{missing[0]}', expected {', '.join(needed)}")
    return rows


def _number(file: Path, line: int, text: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise SpecError(f"{file}: line {line}: found '{text}', expected a number") from None


LAYOUTS = {"aiconfigurator": _aiconfigurator, "helix": _helix, "vidur": _vidur}
"""Readers by the name a command gives."""
