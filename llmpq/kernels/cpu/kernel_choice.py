"""Which kernel is the fastest for a number of rows: measured once for each machine.

With few rows the codes are decoded while multiplying, again for every eight rows; with more rows it
pays to decode a panel once. The crossing depends on the processor, so both algorithms are timed on
a small weight (ten milliseconds) when the first weight is prepared. The result is stored next to
the compiled library under the processor's name, for every process of the machine. Both algorithms
give the same bits. Whether many rows are multiplied as float32 is measured likewise: some
processors multiply bf16 pairs at half the rate of float32. The order of its sums differs.
``cpu.dense`` measures its own algorithms in the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import torch

try:
    import fcntl
except ImportError:  # no Unix
    fcntl = None  # type: ignore[assignment]

from llmpq.kernels.base import PackedWeight, PreparedWeight, packed_row_bytes
from llmpq.kernels.cpu.native import (
    bf16_product,
    instruction_set,
    kernels_path,
    prepared_tiles,
    to_tiles,
)
from llmpq.spec.precision import default_precision

TRIED_ROWS = (2, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64)
ROUNDS = 7
MANY_ROWS = 128
"""Rows of the product that decides whether many rows are multiplied as float32."""
_SHAPE = (512, 1024)  # [N, K]: as large as a core's own cache allows, as decoding loads it


@cache
def gemv_max_rows(bits: int) -> int:
    """Return up to how many rows of bf16 activations are multiplied as the codes are decoded.

    0 at 8 bits, whose codes are always decoded first.
    """
    return 0 if bits == 8 else kept_limit(f"{bits} bits", partial(_measure, bits))


@cache
def is_float_faster() -> bool:
    """Return whether many rows of bf16 activations are multiplied as float32."""
    return bool(kept_limit("float32", _measure_float))


def kept_limit(name: str, measure: Callable[[], int]) -> int:
    """Return what ``measure`` found on this machine, by this process or an earlier one."""
    kept = kernels_path(instruction_set()).with_suffix(".json")
    key = f"{_processor()}, {name}"
    known = _read(kept)
    if key not in known:
        with _alone(kept):
            known = _read(kept)
            if key not in known:
                known[key] = measure()
                _write(kept, known)
    return known[key]


@contextlib.contextmanager
def _alone(kept: Path) -> Iterator[None]:
    """Let one process at a time measure; without a writable folder every process measures."""
    try:
        descriptor = os.open(
            kept.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
    except OSError:
        yield
        return
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _measure_float() -> int:
    weight = _tried_weight(4)
    x = torch.ones(MANY_ROWS, _SHAPE[1], dtype=torch.bfloat16)
    pairs, wide = (
        fastest(partial(bf16_product, x, weight, None, 0, in_float=in_float, threads=1))
        for in_float in (False, True)
    )
    return int(wide < pairs)


def _measure(bits: int) -> int:
    weight = _tried_weight(bits)

    def timed(count: int) -> tuple[float, float]:
        x = torch.ones(count, _SHAPE[1], dtype=torch.bfloat16)
        few = fastest(partial(bf16_product, x, weight, None, count, threads=1))
        many = [
            partial(bf16_product, x, weight, None, 0, in_float=in_float, threads=1)
            for in_float in (False, True)
        ]
        return few, min(map(fastest, many))

    return break_even_rows(timed)


def _tried_weight(bits: int) -> PreparedWeight:
    rows, columns = _SHAPE
    precision = default_precision(bits)
    groups = columns // precision.effective_group(columns)
    scales = torch.ones(rows, groups, dtype=torch.bfloat16)
    codes = torch.zeros(rows, packed_row_bytes(columns, bits), dtype=torch.uint8)
    packed = PackedWeight(
        out_features=rows,
        in_features=columns,
        precision=precision,
        codes=codes,
        scales=scales,
        zeros=torch.zeros_like(scales),
    )
    return prepared_tiles(to_tiles(packed), "cpu_packed")


def break_even_rows(timed: Callable[[int], tuple[float, float]]) -> int:
    """Return up to how many rows the kernel for few rows is faster.

    Args:
        timed: returns the seconds of both kernels for a number of rows.
    """
    limit, gained, most_gained = 1, 0.0, 0.0
    for count in TRIED_ROWS:
        few, many = timed(count)
        # Summed over the counts so far, so that one outlier does not decide.
        gained += 1 - few / many
        if gained > most_gained:
            limit, most_gained = count, gained
    return limit


def fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some calls."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _read(kept: Path) -> dict[str, int]:
    """Return the stored results; none when the file is missing or malformed."""
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    sound = range(max(TRIED_ROWS) + 1)
    return {str(key): value for key, value in found.items() if value in sound}


def _write(kept: Path, known: dict[str, int]) -> None:
    """Store the results; a machine that cannot store them measures again."""
    made = kept.with_suffix(f".{time.monotonic_ns()}.tmp")
    try:
        made.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        made.replace(kept)
    except OSError:
        made.unlink(missing_ok=True)
