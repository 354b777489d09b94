"""Every kernel backend of a device: its error against exact arithmetic, its bytes, its time."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from llmpq.kernels import BACKENDS, KernelBackend, PackedWeight, PreparedWeight
from llmpq.kernels.base import open_device, packed_row_bytes
from llmpq.kernels.gpu.cuda import CudaInt4Backend, CudaInt8Backend
from llmpq.kernels.gpu.triton_int import TritonIntBackend, dequantize, multiply
from llmpq.spec.precision import Precision, default_precision
from scripts.gpu_checks.harness import FailedError, Row, Setting, SkippedError

# Relative error of a product, of the norm of the answer, by the dtype of x.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}
INT8_TOLERANCE = 0.015  # Gaussian activations rounded to 8 bits a row
ROWS = (1, 7, 16, 33, 130, 600)
TIMED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TIMED_SHAPES = {  # (N, K) of the linear operators of an 8-billion-parameter Llama
    "q, o": (4096, 4096),
    "k, v": (1024, 4096),
    "gate, up": (14336, 4096),
    "down": (4096, 14336),
}
# Look for outliers on the host, which no graph can hold; the reference would only fill its pool.
WAITS = ("cuda_int8", "bnb_int8", "reference")
CACHE_BYTES = 192 << 20  # more than any second-level cache: a decode step finds no weight in one
ALLOCATION_BYTES = 512  # the allocator's unit
COMPILED = (TritonIntBackend.name, CudaInt4Backend.name)
MOST_COMPILERS = 16


class Case(NamedTuple):
    """A weight and the dtype of what it is multiplied by."""

    precision: Precision
    dtype: torch.dtype
    rows: int
    columns: int


def compile_all(setting: Setting) -> Iterator[Row]:
    """Compile all kernels of the other checks, in as many processes as there are cores."""
    if setting.device.type != "cuda":
        raise SkippedError("no CUDA device")
    jobs = [
        (case, tuple(rows), name)
        for case, rows in _compiled_cases(setting)
        for name in COMPILED
        if BACKENDS[name].supports(setting.device, case.precision, case.dtype, *case[2:])
    ]
    workers = min(MOST_COMPILERS, len(os.sched_getaffinity(0)), len(jobs))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running = {pool.submit(_compile, setting.device, *job): job for job in jobs}
        for done in as_completed(running):
            case, rows, name = running[done]
            yield {
                "backend": name,
                "precision": str(case.precision),
                "dtype": str(case.dtype),
                "N": case.rows,
                "K": case.columns,
                "rows": len(rows),
                "s": round(done.result(), 1),
            }


def _compiled_cases(setting: Setting) -> Iterator[tuple[Case, Sequence[int]]]:
    """The slowest to compile first: one weight and several numbers of rows a job."""
    if not setting.is_quick:
        for outputs, inputs in TIMED_SHAPES.values():
            for bits in (3, 4, 8):
                case = Case(default_precision(bits), torch.bfloat16, outputs, inputs)
                for first in range(0, len(TIMED_ROWS), 3):
                    yield case, TIMED_ROWS[first : first + 3]
    for case in _cases(setting):
        for first in range(0, len(ROWS), 2):
            yield case, ROWS[first : first + 2]


def _compile(device: torch.device, case: Case, rows: Sequence[int], name: str) -> float:
    """Multiply once for every number of rows, which compiles to Triton's folder."""
    start = time.perf_counter()
    open_device(device)
    backend = BACKENDS[name]
    weight = backend.prepare(random_packed(case, device))
    for count in rows:
        x = torch.zeros(count, case.columns, device=device, dtype=case.dtype)
        bias = torch.zeros(case.rows, device=device, dtype=case.dtype)
        backend.linear(x, weight, bias)
        backend.linear(x, weight, None)
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def errors(setting: Setting) -> Iterator[Row]:
    """Products of every backend against float64, over shapes, precisions and dtypes."""
    wrong = total = 0
    for case in _cases(setting):
        packed = random_packed(case, setting.device)
        exact = packed.dequantize(torch.float64)
        for backend in _offered(setting, case):
            weight = backend.prepare(packed)
            worst: Row = {}
            for tokens in ROWS[:4] if setting.is_quick else ROWS:
                error = _error(backend, weight, exact, tokens, case.dtype)
                row = _row(backend, case) | {"M": tokens, "error": error}
                total += 1
                if not error < _tolerance(row):
                    wrong += 1
                    yield row | {"wrong": "yes"}
                elif not worst or error > worst["error"]:
                    worst = row
            if worst:
                yield worst
    if wrong:
        raise FailedError(f"{wrong} of {total} products are wrong")


def memory(setting: Setting) -> Iterator[Row]:
    """Bytes that preparing a weight allocates, against what its backend declares."""
    size = 256 if setting.is_quick else 4096
    wrong = 0
    for bits in (3, 4, 8):
        case = Case(default_precision(bits), torch.bfloat16, size, size)
        for backend in _offered(setting, case):
            row = _row(backend, case) | _bytes_kept(backend, case, setting.device)
            wrong += not 0 <= row["allocated"] - row["declared"] <= row["slack"]
            yield row
    if wrong:
        raise FailedError(f"{wrong} weights keep other bytes than declared")


def times(setting: Setting) -> Iterator[Row]:
    """Microseconds of products and the GB/s of reading the weight, against ``F.linear`` in bf16.

    ``graph`` is the GPU's own time, from a captured graph; ``eager`` includes launching from
    Python. The weights of a row of calls take more than the caches hold. A ratio below 1 is faster
    than bf16.
    """
    shapes = {"small": (256, 256)} if setting.is_quick else TIMED_SHAPES
    counts = TIMED_ROWS[:2] if setting.is_quick else TIMED_ROWS
    for label, (outputs, inputs) in shapes.items():
        dense = torch.randn(outputs, inputs, device=setting.device, dtype=torch.bfloat16)
        copies = _copies(dense)
        base: dict[int, dict[str, float | None]] = {}
        for tokens in counts:
            x = torch.randn(tokens, inputs, device=setting.device, dtype=torch.bfloat16)
            base[tokens] = _timed([partial(F.linear, x, one) for one in copies], True)
            common: Row = {"shape": label, "M": tokens, "way": "bf16"}
            yield common | _micro(base[tokens]) | _speed(base[tokens], dense.nbytes)
        del copies
        for bits in (3, 4, 8):
            case = Case(default_precision(bits), torch.bfloat16, outputs, inputs)
            for backend in _offered(setting, case):
                prepared = backend.prepare(random_packed(case, setting.device))
                weights = _weight_copies(prepared)
                for tokens in counts:
                    x = torch.randn(tokens, inputs, device=setting.device, dtype=torch.bfloat16)
                    for way, calls, can_capture in _ways(backend, weights, x):
                        taken = _timed(calls, can_capture)
                        yield {
                            "shape": label,
                            "M": tokens,
                            "way": f"{bits} bits {way}",
                            **_micro(taken),
                            **_speed(taken, prepared.nbytes),
                            **_ratios(taken, base[tokens]),
                        }


def random_packed(case: Case, device: torch.device) -> PackedWeight:
    """Return a weight of random codes; all bit patterns are codes."""
    precision, dtype, rows, columns = case
    rng = torch.Generator(device).manual_seed(precision.bits)
    groups = columns // precision.effective_group(columns)
    size = (rows, packed_row_bytes(columns, precision.bits))
    codes = torch.randint(0, 256, size, generator=rng, device=device, dtype=torch.uint8)
    zeros = torch.randn(rows, groups, generator=rng, device=device).mul(0.01).to(dtype)
    scales = torch.rand(rows, groups, generator=rng, device=device).add(1).mul(0.01).to(dtype)
    return PackedWeight(
        out_features=rows,
        in_features=columns,
        precision=precision,
        codes=codes,
        scales=scales,
        zeros=None if precision.symmetric else zeros,
    )


def _cases(setting: Setting) -> Iterator[Case]:
    large, middle, odd = (4096, 4096), (1000, 1536), (134, 264)
    if setting.is_quick:
        large, middle = (48, 256), (40, 128)
    for bits in (3, 4, 8):
        usual = default_precision(bits)
        for shape in (large, middle, odd):
            yield Case(usual, torch.bfloat16, *shape)
        yield Case(usual, torch.float16, *middle)
        yield Case(Precision(bits=bits, group_size=32), torch.bfloat16, *middle)
        yield Case(Precision(bits=bits, group_size=24, symmetric=True), torch.float16, *odd)


def _offered(setting: Setting, case: Case) -> Iterator[KernelBackend]:
    backends = list(BACKENDS.values())
    if setting.device.type == "cpu":  # what a CPU can try of the backends for GPUs
        backends += [TritonIntBackend("cpu"), CudaInt8Backend("cpu")]
    for backend in backends:
        if backend.supports(setting.device, case.precision, case.dtype, *case[2:]):
            yield backend


def _error(
    backend: KernelBackend, weight: PreparedWeight, exact: Tensor, tokens: int, dtype: torch.dtype
) -> float:
    rng = torch.Generator(exact.device).manual_seed(tokens)
    x = torch.randn(tokens, exact.shape[1], generator=rng, device=exact.device).to(dtype)
    bias = torch.randn(exact.shape[0], generator=rng, device=exact.device).to(dtype)
    expected = F.linear(x.double(), exact, bias.double())
    got = backend.linear(x, weight, bias).double()
    return ((got - expected).norm() / expected.norm()).item()


def _tolerance(row: Row) -> float:
    own = {str(dtype): limit for dtype, limit in TOLERANCE.items()}[str(row["dtype"])]
    exact = ("reference", TritonIntBackend.name)  # in their activations
    rounds = row["precision"] == str(default_precision(8)) and row["backend"] not in exact
    return max(own, INT8_TOLERANCE) if rounds else own


def _row(backend: KernelBackend, case: Case) -> Row:
    return {
        "backend": backend.name,
        "precision": str(case.precision),
        "dtype": str(case.dtype),
        "N": case.rows,
        "K": case.columns,
    }


def _bytes_kept(backend: KernelBackend, case: Case, device: torch.device) -> Row:
    packed = random_packed(case, device)
    weight = backend.prepare(packed)  # whatever a first call allocates for good is there now
    kept = weight.nbytes
    if device.type == "cuda":
        del packed, weight
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        weight = backend.prepare(random_packed(case, device))
        torch.cuda.synchronize(device)
        kept = torch.cuda.memory_allocated(device) - before
    return {
        "declared": backend.stored_bytes(case.precision, case.dtype, case.rows, case.columns),
        "allocated": kept,
        "slack": ALLOCATION_BYTES * len(weight.tensors),
    }


def _ways(
    backend: KernelBackend, weights: Sequence[PreparedWeight], x: Tensor
) -> Iterator[tuple[str, list[Callable[[], Tensor]], bool]]:
    if backend.name == "reference" and x.shape[0] != TIMED_ROWS[0]:
        return
    calls = [partial(backend.linear, x, weight, None) for weight in weights]
    yield backend.name, calls, backend.name not in WAITS
    if isinstance(backend, TritonIntBackend) and x.shape[0] >= TIMED_ROWS[-3]:
        yield "triton fused", [partial(multiply, x, weight, None) for weight in weights], True
        yield "triton written out", [partial(_written_out, x, weight) for weight in weights], True


def _written_out(x: Tensor, weight: PreparedWeight) -> Tensor:
    return F.linear(x, dequantize(weight, x.dtype))


def _copies(tensor: Tensor) -> list[Tensor]:
    count = 2 if tensor.device.type == "cpu" else -(-CACHE_BYTES // tensor.nbytes)
    return [tensor, *(tensor.clone() for _ in range(count - 1))]


def _weight_copies(weight: PreparedWeight) -> list[PreparedWeight]:
    if weight.tensors[0].device.type == "cpu":
        return [weight]
    count = -(-CACHE_BYTES // weight.nbytes)
    copies = [weight]
    for _ in range(count - 1):
        tensors = tuple(tensor.clone() for tensor in weight.tensors)
        copies.append(
            PreparedWeight(
                backend=weight.backend,
                out_features=weight.out_features,
                in_features=weight.in_features,
                precision=weight.precision,
                tensors=tensors,
            )
        )
    return copies


def _timed(calls: Sequence[Callable[[], Tensor]], can_capture: bool) -> dict[str, float | None]:
    """Return the seconds of one call, launched one by one and from a graph."""

    def eagerly() -> None:
        for call in calls:
            call()

    is_cuda = calls[0]().device.type == "cuda"
    eager_s = _median_s(eagerly, is_cuda) / len(calls)
    if not is_cuda or not can_capture:
        return {"eager": eager_s, "graph": None}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eagerly()
    return {"eager": eager_s, "graph": _median_s(graph.replay, True) / len(calls)}


def _median_s(work: Callable[[], object], is_cuda: bool, rounds: int = 7) -> float:
    taken = []
    for _ in range(2 if not is_cuda else rounds):
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _micro(taken: dict[str, float | None]) -> Row:
    return {f"{name} us": None if s is None else s * 1e6 for name, s in taken.items()}


def _speed(taken: dict[str, float | None], nbytes: int) -> Row:
    own_s = taken["graph"] or taken["eager"]
    return {"GB/s": None if own_s is None else nbytes / own_s / 1e9}


def _ratios(taken: dict[str, float | None], base: dict[str, float | None]) -> Row:
    ratios: Row = {}
    for name, own_s in taken.items():
        base_s = base[name]
        ratios[f"{name} ratio"] = None if own_s is None or base_s is None else own_s / base_s
    return ratios
