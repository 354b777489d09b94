"""Time every kernel backend against a plain matmul of the same shape and dtype.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/kernel_times.py

Older processors: set ATEN_CPU_CAPABILITY=avx2, MKL_ENABLE_INSTRUCTIONS=AVX2, and ONEDNN_MAX_CPU_ISA
to AVX2, or to AVX2_VNNI for one with AVX-VNNI.

Activations are Gaussian, with eight channels at ``--outlier-scale`` times the rest. Rounds are
interleaved in random order and medians are reported, so that a busy machine disturbs all backends
alike. With one thread it is this thread's processor time that counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from llmpq.kernels import BACKENDS
from llmpq.kernels.cpu.dense import DENSE_BACKEND, can_prepack, prepack, prepacked_linear
from llmpq.kernels.cpu.native import instruction_set
from llmpq.quant import quantize
from llmpq.spec.precision import Precision, default_precision

PLAIN = "plain"
OUTLIER_CHANNELS = 8
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Median of one kernel at one shape; ``ratio`` is to the unquantized matmul."""

    dtype: str
    out_features: int
    in_features: int
    rows: int
    kernel: str
    median_ms: float
    ratio: float


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and write JSON when asked."""
    options = _parse(argv)
    torch.set_num_threads(options.threads)
    samples = []
    for dtype in options.dtypes:
        for size in options.sizes:
            for found in _measure(size, DTYPES[dtype], options):
                samples.append(found)
                sys.stdout.write(
                    f"{dtype} {size}x{size} M={found.rows:<4} {found.kernel:<22}"
                    f"{found.median_ms:9.3f} ms  x{found.ratio:.2f}\n"
                )
                sys.stdout.flush()
    if options.json is not None:
        provenance = {
            "torch": torch.__version__,
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "platform": platform.platform(),
            "kernels": instruction_set(),
            "outlier_scale": options.outlier_scale,
            "threads": options.threads,
            "repeats": options.repeats,
            "seed": options.seed,
        }
        document = {"provenance": provenance, "samples": [asdict(s) for s in samples]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096], help="N = K")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 512])
    parser.add_argument("--kernels", nargs="+", help="only these, such as 'cpu_packed 4'")
    parser.add_argument("--outlier-scale", type=float, default=40.0, help="1: no outliers")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=sorted(DTYPES))
    parser.add_argument("--repeats", type=int, default=15, help="rounds of all kernels")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write samples and provenance here")
    return parser.parse_args(argv)


def _measure(size: int, dtype: torch.dtype, options: argparse.Namespace) -> Iterator[Sample]:
    rng = torch.Generator().manual_seed(options.seed)
    weight = (torch.randn(size, size, generator=rng) * 0.05).to(dtype)
    calls = {
        name: call
        for name, call in _calls(weight)
        if name == PLAIN or options.kernels is None or name in options.kernels
    }
    for rows in options.rows:
        x = torch.randn(rows, size, generator=rng)
        x[:, :: max(1, size // OUTLIER_CHANNELS)] *= options.outlier_scale
        x = x.to(dtype)
        medians = _interleaved_medians(calls, x, options)
        for kernel, median in medians.items():
            yield Sample(
                dtype=str(dtype).removeprefix("torch."),
                out_features=size,
                in_features=size,
                rows=rows,
                kernel=kernel,
                median_ms=median * 1e3,
                ratio=median / medians[PLAIN],
            )


def _calls(weight: torch.Tensor) -> Iterator[tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
    """Yield the plain matmul, then every backend at every bitwidth it runs."""
    yield PLAIN, lambda x: F.linear(x, weight)
    if can_prepack(weight):
        yield f"{DENSE_BACKEND} 16", partial(prepacked_linear, weight=prepack(weight), bias=None)
    for bits in (8, 4, 3):
        precision: Precision = default_precision(bits)
        packed = quantize(weight, precision, weight.dtype)
        for name, backend in BACKENDS.items():
            if not backend.supports("cpu", precision, weight.dtype, *weight.shape):
                continue
            prepared = backend.prepare(packed)
            yield f"{name} {bits}", partial(backend.linear, weight=prepared, bias=None)


def _interleaved_medians(
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]],
    x: torch.Tensor,
    options: argparse.Namespace,
) -> dict[str, float]:
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    shuffler = random.Random(options.seed)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for call in calls.values():
            call(x)
        for _ in range(options.repeats):
            order = list(calls)
            shuffler.shuffle(order)
            for name in order:
                start = clock()
                calls[name](x)
                seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
