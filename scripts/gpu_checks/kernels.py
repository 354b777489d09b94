"""Every kernel backend of a device: its error against exact arithmetic, its bytes, its time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from llmpq.kernels import BACKENDS, KernelBackend, PackedWeight, PreparedWeight
from llmpq.kernels.gpu.cuda import CudaInt8Backend
from llmpq.kernels.gpu.triton_int import TritonIntBackend, dequantize, multiply
from llmpq.kernels.packed import packed_row_bytes
from llmpq.spec.precision import Precision, default_precision
from scripts.gpu_checks.harness import FailedError, Row, Setting

# Relative error of a product, of the norm of the answer, by the dtype of x.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}
INT8_TOLERANCE = 0.015  # Gaussian activations rounded to 8 bits a row
ROWS = (1, 7, 16, 33, 130, 600)
TIMED_ROWS = (1, 16, 128, 1024)
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


class Case(NamedTuple):
    """A weight and the dtype of what it is multiplied by."""

    precision: Precision
    dtype: torch.dtype
    rows: int
    columns: int


def errors(setting: Setting) -> list[Row]:
    """Products of every backend against float64, over shapes, precisions and dtypes."""
    found: list[Row] = []
    for case in _cases(setting):
        packed = random_packed(case, setting.device)
        exact = packed.dequantize(torch.float64)
        for backend in _offered(setting, case):
            weight = backend.prepare(packed)
            for tokens in ROWS[:4] if setting.is_quick else ROWS:
                error = _error(backend, weight, exact, tokens, case.dtype)
                found.append(_row(backend, case) | {"M": tokens, "error": error})
    wrong = [row for row in found if not row["error"] < _tolerance(row)]
    if wrong:
        raise FailedError(f"{len(wrong)} of {len(found)} products are wrong", wrong)
    return _worst(found)


def memory(setting: Setting) -> list[Row]:
    """Bytes that preparing a weight allocates, against what its backend declares."""
    size = 256 if setting.is_quick else 4096
    rows: list[Row] = []
    for bits in (3, 4, 8):
        case = Case(default_precision(bits), torch.bfloat16, size, size)
        for backend in _offered(setting, case):
            rows.append(_row(backend, case) | _bytes_kept(backend, case, setting.device))
    off = [row for row in rows if not 0 <= row["allocated"] - row["declared"] <= row["slack"]]
    if off:
        raise FailedError("kept other bytes than declared", off)
    return rows


def times(setting: Setting) -> list[Row]:
    """Seconds of a product as a ratio to ``F.linear`` in bf16; below 1 is faster.

    ``graph`` is the GPU's own time, from a captured graph; ``eager`` includes launching from
    Python. The weights of a row of calls take more than the caches hold.
    """
    shapes = {"small": (256, 256)} if setting.is_quick else TIMED_SHAPES
    rows: list[Row] = []
    for label, (outputs, inputs) in shapes.items():
        for tokens in TIMED_ROWS[:2] if setting.is_quick else TIMED_ROWS:
            x = torch.randn(tokens, inputs, device=setting.device, dtype=torch.bfloat16)
            dense = torch.randn(outputs, inputs, device=setting.device, dtype=torch.bfloat16)
            base = _timed([partial(F.linear, x, one) for one in _copies(dense)], True)
            common: Row = {"shape": label, "N": outputs, "K": inputs, "M": tokens}
            rows.append(common | {"way": "bf16"} | _micro(base))
            for way, calls, can_capture in _ways(setting, x, outputs, inputs):
                taken = _timed(calls, can_capture)
                rows.append(common | {"way": way} | _micro(taken) | _ratios(taken, base))
    return rows


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
        for dtype in (torch.float16, torch.float32):
            yield Case(usual, dtype, *middle)
        yield Case(Precision(bits=bits, group_size=32), torch.bfloat16, *middle)
        yield Case(Precision(bits=bits, group_size=24, symmetric=True), torch.float16, *odd)


def _offered(setting: Setting, case: Case) -> Iterator[KernelBackend]:
    backends = list(BACKENDS.values())
    if setting.device.type == "cpu":  # what a CPU can try of the backends for GPUs
        backends += [TritonIntBackend("cpu"), CudaInt8Backend("cpu")]
    for backend in backends:
        if backend.supports(setting.device.type, case.precision, case.dtype, *case[2:]):
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
    rounds = row["precision"] == str(default_precision(8)) and row["backend"] != "reference"
    return max(own, INT8_TOLERANCE) if rounds else own


def _worst(found: Sequence[Row]) -> list[Row]:
    """Keep the largest error of every weight."""
    worst: dict[tuple[object, ...], Row] = {}
    for row in found:
        key = tuple(value for name, value in row.items() if name not in ("M", "error"))
        if key not in worst or row["error"] > worst[key]["error"]:
            worst[key] = row
    return list(worst.values())


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
    setting: Setting, x: Tensor, outputs: int, inputs: int
) -> Iterator[tuple[str, list[Callable[[], Tensor]], bool]]:
    for bits in (3, 4, 8):
        case = Case(default_precision(bits), torch.bfloat16, outputs, inputs)
        for backend in _offered(setting, case):
            if backend.name == "reference" and x.shape[0] not in TIMED_ROWS[:1]:
                continue
            prepared = backend.prepare(random_packed(case, setting.device))
            weights = _weight_copies(prepared)
            calls = [partial(backend.linear, x, weight, None) for weight in weights]
            yield f"{bits} bits {backend.name}", calls, backend.name not in WAITS
            if isinstance(backend, TritonIntBackend):
                fused = [partial(multiply, x, weight, None) for weight in weights]
                yield f"{bits} bits triton fused", fused, True
                written = [partial(_written_out, x, weight) for weight in weights]
                yield f"{bits} bits triton written out", written, True


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


def _ratios(taken: dict[str, float | None], base: dict[str, float | None]) -> Row:
    ratios: Row = {}
    for name, own_s in taken.items():
        base_s = base[name]
        ratios[f"{name} ratio"] = None if own_s is None or base_s is None else own_s / base_s
    return ratios
