"""What share of a device's peaks measured matrix products reach, from aiconfigurator's tables.

``aiconfigurator-core`` (Apache-2.0, on the package index) carries measured matrix products of A100,
H100, H200 and L40S as ``systems/data/<device>/gemm/<engine>/<version>/gemm_perf.parquet``. Install
it with pyarrow in an environment of its own and pass such a file. Nothing is written.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import pyarrow.parquet

from llmpq.spec import catalog
from llmpq.spec.devices.figures import DeviceSpec
from scripts.reproduce.output import Record, emit, table

HALF = "bfloat16"
SMALLEST_LAYER = 4096
"""Rows and columns of the weights looked at, at least: those of large models."""
LARGE_ROWS = 2048
"""Rows from which on a product counts as large."""
WEIGHT_ONLY = {"int8_wo": 8, "int4_wo": 4}
ROWS = (1, 32, 128, 8192)

Seconds = Mapping[tuple[int, int, int], float]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the shares; return 0."""
    parser = argparse.ArgumentParser(prog="scripts.reproduce.gemm_shares", description=__doc__)
    parser.add_argument("measurements", type=Path, metavar="FILE.parquet")
    parser.add_argument("--device", required=True, metavar="TYPE", help="its catalogue name")
    parser.add_argument("--bandwidth", type=float, metavar="BYTES_PER_S", help="if another variant")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    options = parser.parse_args(argv)
    spec = catalog.device(options.device)
    peak = options.bandwidth or spec.memory_bytes_per_s
    record = shares(read_products(options.measurements), spec, peak)
    emit(_text(spec, record), record, as_json=options.json)
    return 0


def read_products(path: Path) -> dict[str, dict[tuple[int, int, int], float]]:
    """Return the seconds of every product by number format and ``(m, n, k)``."""
    found: dict[str, dict[tuple[int, int, int], float]] = {}
    for row in pyarrow.parquet.read_table(path).to_pylist():
        m, n, k = row["m"], row["n"], row["k"]
        if min(n, k) >= SMALLEST_LAYER:
            found.setdefault(row["gemm_dtype"], {})[m, n, k] = row["latency"] * 1e-3
    return found


def shares(products: Mapping[str, Seconds], spec: DeviceSpec, bytes_per_s: float) -> Record:
    """Return the shares of both peaks, and how much faster weight-only kernels are."""
    half = products[HALF]
    flops = spec.peak_flops(HALF)
    speedups: Record = {}
    for name, bits in WEIGHT_ONLY.items():
        for rows in ROWS:
            ratios = [
                half[shape] / seconds
                for shape, seconds in products.get(name, {}).items()
                if shape[0] == rows and shape in half
            ]
            if ratios:
                speedups[f"{bits} bits, {rows} rows"] = median(ratios)
    return {
        "compute": median(
            2.0 * m * n * k / seconds / flops
            for (m, n, k), seconds in half.items()
            if m >= LARGE_ROWS
        ),
        "bandwidth": median(
            2.0 * n * k / seconds / bytes_per_s for (m, n, k), seconds in half.items() if m == 1
        ),
        "speedups": speedups,
    }


def _text(spec: DeviceSpec, record: Record) -> str:
    rows = [
        ["share of arithmetic", f"{spec.compute_efficiency:.2f}", f"{record['compute']:.2f}"],
        ["share of bandwidth", f"{spec.memory_efficiency:.2f}", f"{record['bandwidth']:.2f}"],
    ]
    rows += [
        [f"speed-up at {name}", "-", f"{value:.2f}"] for name, value in record["speedups"].items()
    ]
    return f"## {spec.type}\n\n{table(['', 'catalogue', 'measured'], rows)}"


if __name__ == "__main__":
    raise SystemExit(main())
