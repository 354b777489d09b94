"""The operator database of aiconfigurator-core: parquet files of measured kernels, by device.

Only the package's data files are read; its code is not imported. A bitwidth without a
kernel in the chosen engine may come from another engine of the same device, named with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmpq.costmodel.importers.operators import (
    AttentionTimes,
    ExpertShape,
    GemmTimes,
    OperatorTimes,
    TimesBySize,
)
from llmpq.errors import SpecError
from llmpq.spec.precision import Phase

PACKAGE = "aiconfigurator_core"
ENGINES = ("trtllm", "vllm", "sglang")
KERNELS: Mapping[int, tuple[str, ...]] = {
    16: ("bfloat16", "float16"),
    8: ("int8_wo", "fp8"),
    4: ("int4_wo",),
}
"""Number formats that stand for a bitwidth, the one closest to weight-only first."""

GEMM_FILE = "gemm_perf.parquet"
PREFILL_FILE = "context_attention_perf.parquet"
DECODE_FILE = "generation_attention_perf.parquet"
EXPERTS_FILE = "moe_perf.parquet"
ALL_REDUCE_FILE = "custom_allreduce_perf.parquet"
ROUTING = "power_law_1.2"
"""How the measured tokens were spread over the experts: unevenly, as real ones are."""
_MS = 1e-3
_OPERATORS = ("gemm", "attention")

GemmPoints = dict[tuple[int, int], TimesBySize]


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """Measured operators of one device and where they come from.

    ``kernels`` has number format, engine and version behind every bitwidth; ``engine`` those of the
    attention, and of the products where it has them.
    """

    times: OperatorTimes
    kernels: Mapping[int, str]
    engine: str


def read_database(
    path: Path | None,
    device: str,
    engine: str | None,
    experts: ExpertShape | None = None,
    degree: int = 1,
) -> Database:
    """Read the measured operators of one device, which ``degree`` devices of its kind may share.

    ``path`` is the package's folder, ``None`` for the installed one; ``engine`` is ``None`` for the
    first of ``ENGINES`` that was measured.

    Raises:
        SpecError: the package is absent, the device or engine unknown, or a file malformed.
    """
    root = _package_root(path)
    base = root / "systems" / "data" / device
    if not base.is_dir():
        known = sorted(one.name for one in base.parent.glob("*/") if (one / "gemm").is_dir())
        raise SpecError(f"--device: found '{device}', expected one of {', '.join(known)}")
    engine = _engine(base, engine)
    gemms, kernels = _gemms(base, engine)
    stream, launch = _small_figures(root / "systems" / f"{device}.yaml")
    folder = _newest(base / "attention" / engine, PREFILL_FILE)
    attention = {
        Phase.PREFILL: _attention(folder / PREFILL_FILE, Phase.PREFILL),
        Phase.DECODE: _attention(folder / DECODE_FILE, Phase.DECODE),
    }
    times = OperatorTimes(
        gemms=gemms,
        attention=attention,
        stream_bytes_per_s=stream,
        launch_s=launch,
        experts={} if experts is None else _experts(base, engine, experts),
        all_reduce=None if degree == 1 else _all_reduce(base, engine, degree),
    )
    return Database(times=times, kernels=kernels, engine=f"{engine} {folder.name}")


def _package_root(path: Path | None) -> Path:
    if path is not None:
        return path
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise SpecError(
            "import from aiconfigurator: the package aiconfigurator-core is not installed; "
            "pip install 'llmpq[profiles]', or name its folder with --path"
        )
    return Path(found.submodule_search_locations[0])


def _engine(base: Path, wanted: str | None) -> str:
    measured = [one for one in ENGINES if all((base / op / one).is_dir() for op in _OPERATORS)]
    if not measured:
        raise SpecError(f"{base}: found no engine with matrix products and attention")
    if wanted is not None and wanted not in measured:
        raise SpecError(f"--engine: found '{wanted}', expected one of {', '.join(measured)}")
    return wanted or measured[0]


def _gemms(base: Path, engine: str) -> tuple[dict[int, GemmTimes], dict[int, str]]:
    """Return matrix products by bitwidth: of the engine, else of another of the same device."""
    folders = [_newest(base / "gemm" / engine, GEMM_FILE)]
    others = (one.parent for one in (base / "gemm").glob(f"*/*/{GEMM_FILE}"))
    folders += sorted(set(others) - set(folders))
    gemms: dict[int, GemmTimes] = {}
    kernels: dict[int, str] = {}
    formats = {one: set(_read_parquet(one / GEMM_FILE, ("gemm_dtype",))[0]) for one in folders}
    for bits, names in KERNELS.items():
        choices = ((name, folder) for name in names for folder in folders)
        found = next((one for one in choices if one[0] in formats[one[1]]), None)
        if found is not None:
            name, folder = found
            gemms[bits] = GemmTimes(points=_gemm_points(folder / GEMM_FILE, name))
            kernels[bits] = f"{name} ({folder.parent.name} {folder.name})"
    return gemms, kernels


def _gemm_points(file: Path, name: str) -> GemmPoints:
    columns = _read_parquet(file, ("n", "k", "m", "latency"), among={"gemm_dtype": (name,)})
    return {
        (int(out), int(inner)): tuple(sorted(points.items()))
        for (out, inner), points in _grouped(columns[:2], columns[2], columns[3])
    }


def _grouped(
    keys: Sequence[Sequence[Any]], sizes: Sequence[Any], milliseconds: Sequence[float]
) -> Iterator[tuple[tuple[Any, ...], dict[Any, float]]]:
    """Yield the seconds by size of every key; of a size measured twice the last in the file."""
    columns = [np.asarray(one) for one in keys]
    order = np.lexsort(columns[::-1])
    columns = [one[order] for one in columns]
    edges = np.flatnonzero(np.any([np.diff(one) != 0 for one in columns], axis=0)) + 1
    seconds = (np.asarray(milliseconds, dtype=float)[order] * _MS).tolist()
    ordered = [sizes[index] for index in order.tolist()]
    bounds = [0, *edges.tolist(), len(order)] if len(order) else [0]
    for first, end in pairwise(bounds):
        key = tuple(one[first].item() for one in columns)
        yield key, dict(zip(ordered[first:end], seconds[first:end], strict=True))


def _experts(base: Path, engine: str, shape: ExpertShape) -> dict[int, TimesBySize]:
    """Return the experts by bitwidth, on one device alone: the engine's, else another's."""
    files = sorted((base / "moe").glob(f"*/*/{EXPERTS_FILE}"), reverse=True)
    files.sort(key=lambda one: one.parent.parent.name != engine)
    found: dict[int, TimesBySize] = {}
    for file in files:
        formats = _expert_points(file, shape)
        for bits, names in KERNELS.items():
            name = next((one for one in names if one in formats), None)
            if name is not None and bits not in found:
                found[bits] = tuple(sorted(formats[name].items()))
    return found


def _expert_points(file: Path, shape: ExpertShape) -> dict[str, dict[int, float]]:
    names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    columns = _read_parquet(file, ("moe_dtype", "distribution", "num_tokens", "latency", *names))
    wanted = (shape.hidden, shape.inner, shape.active, shape.count, 1, 1)
    formats: dict[str, dict[int, float]] = {}
    for name, spread, tokens, milliseconds, *key in zip(*columns, strict=True):
        if spread == ROUTING and tuple(key) == wanted:
            known = formats.setdefault(name, {})
            known[tokens] = min(known.get(tokens, inf), milliseconds * _MS)
    return formats


def _all_reduce(base: Path, engine: str, degree: int) -> TimesBySize:
    """Return the engine's all-reduces between so many devices; of several kernels the fastest."""
    file = _newest(base / "comm" / engine, ALL_REDUCE_FILE) / ALL_REDUCE_FILE
    columns = _read_parquet(
        file,
        ("num_gpus", "message_size", "latency"),
        among={"allreduce_dtype": KERNELS[16]},
    )
    found: dict[int, float] = {}
    for devices, values, milliseconds in zip(*columns, strict=True):
        if devices == degree:
            found[values] = min(found.get(values, inf), milliseconds * _MS)
    if not found:
        known = sorted(set(columns[0]))
        raise SpecError(
            f"--tensor_parallel: found {degree}, expected one of {known}: {file} has no others"
        )
    return tuple(sorted(found.items()))


def _attention(file: Path, phase: Phase) -> AttentionTimes:
    plain = {"attn_dtype": KERNELS[16], "kv_cache_dtype": KERNELS[16], "window_size": (0, None)}
    heads = ("num_heads", "num_key_value_heads", "head_dim")
    names = (*heads, "batch_size", "isl", "step", "latency")
    *shape, batch, prompt, step, milliseconds = _read_parquet(file, names, among=plain)
    sizes = [
        (int(count), int(tokens + more))
        for count, tokens, more in zip(batch, prompt, step, strict=True)
    ]
    points = {
        (int(key[0]), int(key[1]), int(key[2])): found
        for key, found in _grouped(shape, sizes, milliseconds)
    }
    if not points:
        raise SpecError(f"{file}: found no attention in 16 bits")
    return AttentionTimes(phase=phase, points=points)


def _read_parquet(
    file: Path, names: Sequence[str], among: Mapping[str, Sequence[object]] | None = None
) -> tuple[list[Any], ...]:
    """Return the named columns of the rows whose other columns are ``among`` the given values.

    A column that only chooses rows may be absent. Asked for one column alone, its distinct values.
    """
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise SpecError(
            "import from aiconfigurator: pyarrow is not installed; pip install 'llmpq[profiles]'"
        ) from None
    try:
        # Not ``read_table``: it loads the machinery of many-file datasets first.
        with parquet.ParquetFile(file) as opened:
            held = set(opened.schema_arrow.names)
            missing = [name for name in names if name not in held]
            if missing:
                raise SpecError(f"{file}: found no column '{missing[0]}', expected it there")
            choosing = {name: one for name, one in (among or {}).items() if name in held}
            table = opened.read(columns=[*names, *choosing])
    except OSError as error:
        raise SpecError(f"{file}: cannot be read: {error}") from None
    kept = np.ones(len(table), dtype=bool)
    for name, values in choosing.items():
        codes, words = _encoded(table[name])
        kept &= np.isin(codes, [code for code, word in enumerate(words) if word in values])
    columns = []
    for name in names:
        codes, words = _encoded(table[name])
        columns.append(words if len(names) == 1 else [words[code] for code in codes[kept].tolist()])
    return tuple(columns)


def _encoded(column: Any) -> tuple[npt.NDArray[np.int64], list[Any]]:
    """Return a column as codes ``[P]`` and what they stand for.

    Without pyarrow's sets, filters and ``to_numpy``: they load pandas where it is installed.
    """
    words: list[Any] = []
    parts = []
    for chunk in column.dictionary_encode(null_encoding="encode").chunks:
        parts.append(np.from_dlpack(chunk.indices).astype(np.int64) + len(words))
        words += chunk.dictionary.to_pylist()
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64), words


def _newest(folder: Path, file: str) -> Path:
    """Return the newest version that holds ``file``; a version may cover few operators."""
    versions = sorted(
        (one.parent for one in folder.glob(f"*/{file}")),
        key=lambda one: [int(number) for number in re.findall(r"\d+", one.name)],
    )
    if not versions:
        raise SpecError(f"{folder}: found no version with {file}, expected one folder a version")
    return versions[-1]


def _small_figures(file: Path) -> tuple[float, float]:
    """Return the database's own rate (bytes per second) and constant (s) of small kernels."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{file}: cannot be read: {error}") from None
    values = []
    for name in ("mem_bw", "mem_bw_empirical_scaling_factor", "mem_empirical_constant_latency"):
        found = re.search(rf"^\s*{name}:\s*([0-9.e+-]+)", text, re.MULTILINE)
        if found is None:
            raise SpecError(f"{file}: found no '{name}', expected a number")
        values.append(float(found.group(1)))
    return values[0] * values[1], values[2]
