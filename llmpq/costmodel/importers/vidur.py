"""Vidur's layout: operators of one model by tokens, attention by batch and context, transfers.

``mlp.csv`` times the products, norms and activations of a layer, ``attention.csv`` its attention,
``send_recv.csv`` messages between two devices. Every time is a median in milliseconds, in columns
named ``time_stats.<operator>.median``. Rows of tensor-parallel layers are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from llmpq.costmodel.importers.csv_rows import csv_rows, number
from llmpq.costmodel.importers.operators import GemmTimes
from llmpq.errors import SpecError
from llmpq.spec.precision import Phase
from llmpq.spec.tables import CommSample, CommTable, LatencySample

PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
SMALL = (
    "input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add", "add",
)  # fmt: skip
"""Small operators of a layer; its residual is added twice and timed once."""
ATTENTION_EXTRAS = ("attn_input_reshape", "attn_kv_cache_save", "attn_output_reshape")
"""What surrounds the attention kernel, in the versions of the layout that time it."""
_WORKERS = "num_tensor_parallel_workers"
_MS = 1e-3


def layer_samples(folder: Path) -> tuple[LatencySample, ...]:
    """Return samples of the whole layer at every shape whose attention was measured.

    Raises:
        SpecError: a file is not there, lacks a column, or has no row of one worker.
    """
    dense = _dense(folder / "mlp.csv")
    samples = []
    for phase, batch, tokens, attention_s in _attention(folder / "attention.csv"):
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


def _dense(file: Path) -> GemmTimes:
    found: dict[int, list[float]] = {}
    for line, row in csv_rows(file, ("num_tokens", _WORKERS)):
        if row[_WORKERS] == "1":
            total = sum(_median(file, line, row, name) for name in (*PRODUCTS, *SMALL))
            found.setdefault(int(number(file, line, row["num_tokens"])), []).append(total)
    if not found:
        raise SpecError(f"{file}: found no row of one worker, expected some")
    return GemmTimes(
        points={(1, 1): tuple(sorted((count, min(times)) for count, times in found.items()))}
    )


def _attention(file: Path) -> Iterator[tuple[Phase, int, int, float]]:
    needed = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill")
    for line, row in csv_rows(file, needed):
        if row.get(_WORKERS, "1") != "1":
            continue
        batch = int(number(file, line, row["batch_size"]))
        context = int(number(file, line, row["kv_cache_size"]))
        if row["is_prefill"] == "True":
            tokens = int(number(file, line, row["prefill_chunk_size"]))
            if context == 0:  # a later chunk of a prompt is no prefill of ours
                seconds = _median(file, line, row, "attn_prefill")
                yield Phase.PREFILL, batch, tokens, seconds + _extras(file, line, row)
        elif context >= 1:
            seconds = _median(file, line, row, "attn_decode")
            yield Phase.DECODE, batch, context, seconds + _extras(file, line, row)


def _extras(file: Path, line: int, row: Mapping[str, str]) -> float:
    keys = (f"time_stats.{name}.median" for name in ATTENTION_EXTRAS)
    return sum(number(file, line, row[key]) for key in keys if row.get(key)) * _MS


def _median(file: Path, line: int, row: Mapping[str, str], name: str) -> float:
    key = f"time_stats.{name}.median"
    if key not in row:
        raise SpecError(f"{file}: found no column '{key}', expected it there")
    return number(file, line, row[key]) * _MS
