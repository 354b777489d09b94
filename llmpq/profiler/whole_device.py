"""Measure a device in itself: copies, products by format and bitwidth, launches, the host link.

Products are timed as a run meets them: weights are read from memory, not from a cache, since so
many of them take turns that none stays. Everything is timed in interleaved rounds; the median
counts.

Shapes: ``[M, K]`` rows and input features, ``[N, K]`` weights.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from llmpq.dist.kv.blocks import blocks_of, slot_blocks
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.metrics.stats import synchronize
from llmpq.kernels.registry import choose_backend
from llmpq.models import DecoderStage, PackedBatch, kv_shapes
from llmpq.models.adapter import build_layer
from llmpq.quant.quantizers.rtn import quantize
from llmpq.spec.devices.timings import DeviceTimings, ProductTiming
from llmpq.spec.precision import default_precision

ROWS = (1, 16, 64, 512)
FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
OVERHEAD_DEPTHS = (2, 6)
HEAD_DIM = 64
LAYER_PRODUCTS = 7
"""Square products of a layer of Llama whose two widths are equal."""
SHORT_TOKENS = 32
LEAST_ROUNDS = 3
MAX_ROUNDS = 25
LINK_BYTES = 64 * 2**20
SMALL_LINK_BYTES = 16 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceJob:
    """What to measure: the device, features of a square weight, and the seconds to spend.

    ``distinct_bytes`` of weights take turns, more than any cache holds.
    """

    device: torch.device
    features: int = 2048
    distinct_bytes: int = 128 * 2**20
    budget_s: float = 60.0


@dataclass(slots=True)
class _Trial:
    """Something to time again and again."""

    call: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return median(self.seconds)


@torch.inference_mode()
def measure_device(
    job: DeviceJob, progress: Callable[[float], None] = lambda _: None
) -> DeviceTimings:
    """Measure a device; ``progress`` is called with the share of the budget that is spent."""
    device = job.device
    trials: dict[tuple[str, int, int], _Trial] = {}
    stored: dict[tuple[str, int], int] = {}
    known = {name: dtype for name, dtype in FORMATS.items() if computes(device, dtype)}
    main = min(known, key=lambda name: _probe_s(job, known[name]))
    for name, dtype in known.items():
        for bits in (16, 8, 4, 3) if name == main else (16,):
            calls, size = _products(job, dtype, bits)
            stored[name, bits] = size
            for rows, call in calls:
                trials[name, bits, rows] = _Trial(call)
    others = _other_trials(job, known[main])
    _run([*trials.values(), *others.values()], job, progress)
    few, many = (others[f"layers {depth}"].median_s for depth in OVERHEAD_DEPTHS)
    overhead_s = max(0.0, many - few) / (OVERHEAD_DEPTHS[1] - OVERHEAD_DEPTHS[0])
    shares = [
        min(1.0, LAYER_PRODUCTS * trials[main, 16, rows].median_s / max(1e-9, layer_s - overhead_s))
        for rows in (ROWS[0], ROWS[-1])
        if (layer_s := others[f"whole {rows}"].median_s)
    ]
    shape = {"out_features": job.features, "in_features": job.features}
    host = {}
    if "link" in others:
        latency_s = others["small link"].median_s
        rest_s = max(1e-9, others["link"].median_s - latency_s)
        host = {"host_bytes_per_s": LINK_BYTES / rest_s, "host_latency_s": latency_s}
    return DeviceTimings(
        kind=device.type,  # type: ignore[arg-type]  # one of those of devices
        memory_bytes=memory_bytes(device),
        threads=torch.get_num_threads() if device.type == "cpu" else 1,
        copy_bytes_per_s=2.0 * job.distinct_bytes / others["copy"].median_s,
        products=tuple(
            ProductTiming(
                dtype=name, bits=bits, rows=rows, stored_bytes=stored[name, bits],
                seconds=trial.median_s, **shape,
            )
            for (name, bits, rows), trial in trials.items()
        ),
        layer_overhead_s=overhead_s,
        decode_share=shares[0],
        prefill_share=shares[1],
        compute_capability=_capability(device),
        **host,
    )  # fmt: skip


def _probe_s(job: DeviceJob, dtype: torch.dtype) -> float:
    """Return the least seconds of a product of many rows in a format, of three."""
    x = torch.ones(ROWS[-1], job.features, dtype=dtype, device=job.device)
    weight = torch.ones(job.features, job.features, dtype=dtype, device=job.device)
    seconds = []
    for _ in range(3):
        synchronize(job.device)
        before_s = time.perf_counter()
        nn.functional.linear(x, weight)
        synchronize(job.device)
        seconds.append(time.perf_counter() - before_s)
    return min(seconds)


def computes(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device multiplies in a format by itself, not by emulation."""
    if dtype is torch.bfloat16 and (capability := _capability(device)) is not None:
        return capability >= (8, 0)
    try:
        small = torch.ones(8, 8, dtype=dtype, device=device)
        return bool((small @ small == 8).all())
    except (RuntimeError, TypeError):
        return False


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a device, for a CPU that of its host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).total_memory)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def _products(
    job: DeviceJob, dtype: torch.dtype, bits: int
) -> tuple[Iterator[tuple[int, Callable[[], object]]], int]:
    """Return a product for each of ``ROWS``, and the bytes of one weight."""
    features, device = job.features, job.device
    weight = torch.randn(features, features).mul_(features**-0.5).to(dtype).to(device)
    if bits == 16:
        size = weight.nbytes
        count = max(1, -(-job.distinct_bytes // size))
        dense = itertools.cycle([weight.clone() for _ in range(count)])

        def multiply(x: Tensor) -> Tensor:
            return nn.functional.linear(x, next(dense))

    else:
        precision = default_precision(bits)
        backend = choose_backend(device.type, precision, dtype, features, features)
        packed = quantize(weight, precision, dtype)
        size = backend.stored_bytes(precision, dtype, features, features)
        count = max(1, -(-job.distinct_bytes // size))
        prepared = itertools.cycle([backend.prepare(packed) for _ in range(count)])

        def multiply(x: Tensor) -> Tensor:
            return backend.linear(x, next(prepared), None)

    inputs = [torch.randn(rows, features).to(dtype).to(device) for rows in ROWS]

    def calls() -> Iterator[tuple[int, Callable[[], object]]]:
        for rows, x in zip(ROWS, inputs, strict=True):
            yield rows, lambda x=x: multiply(x)  # type: ignore[misc]  # bound on purpose

    return calls(), size


def _other_trials(job: DeviceJob, main: torch.dtype) -> dict[str, _Trial]:
    """Return a copy inside the device, layers small and whole, and the host link."""
    device = job.device
    source = torch.ones(job.distinct_bytes // 4, device=device)
    target = torch.empty_like(source)
    found = {"copy": _Trial(lambda: target.copy_(source))}
    for depth in OVERHEAD_DEPTHS:
        found[f"layers {depth}"] = _Trial(_layers(depth, HEAD_DIM, 1, torch.float32, device))
    for rows in (ROWS[0], ROWS[-1]):
        found[f"whole {rows}"] = _Trial(_layers(1, job.features, rows, main, device))
    if device.type != "cpu":
        for name, size in (("link", LINK_BYTES), ("small link", SMALL_LINK_BYTES)):
            host = torch.ones(size, dtype=torch.uint8)
            there = torch.empty(size, dtype=torch.uint8, device=device)
            # A frame leaves one device for host memory and enters the next from it.
            found[name] = _Trial(lambda host=host, there=there: host.copy_(there.copy_(host)))  # type: ignore[misc]
    return found


def _layers(
    depth: int, features: int, rows: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """Return a step of ``rows`` tokens through layers of ``LAYER_PRODUCTS`` square weights each.

    Its sequences are short, so that attention is next to nothing.
    """
    heads = features // HEAD_DIM
    config = LlamaConfig(
        hidden_size=features, intermediate_size=features, num_attention_heads=heads,
        num_key_value_heads=heads, num_hidden_layers=depth, vocab_size=8,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    layers = []
    for index in range(depth):
        layer = build_layer(config, index).to(dtype).to_empty(device=device)
        for parameter in layer.parameters():
            parameter.data.normal_(std=0.02)
        layers.append(layer)
    stage = DecoderStage(config, layers, 0)
    count = max(1, rows // SHORT_TOKENS)
    tokens = rows // count
    cache = KVCache(
        kv_shapes(config, 0, depth), 0, num_blocks=count * blocks_of(tokens), dtype=dtype,
        device=device,
    )  # fmt: skip
    batch = PackedBatch(
        block_tables=[slot_blocks(slot, tokens, tokens) for slot in range(count)],
        starts=[0] * count,
        counts=[tokens] * count,
    )
    hidden = torch.randn(1, rows, features, device=device).to(dtype)
    return lambda: stage(hidden, batch, cache)


def _run(trials: list[_Trial], job: DeviceJob, progress: Callable[[float], None]) -> None:
    for trial in trials:
        trial.call()  # compiles and allocates
    start_s = time.perf_counter()
    for number in range(MAX_ROUNDS):
        for trial in trials:
            trial.call()
            synchronize(job.device)
            before_s = time.perf_counter()
            trial.call()
            synchronize(job.device)
            trial.seconds.append(time.perf_counter() - before_s)
        spent = (time.perf_counter() - start_s) / job.budget_s
        progress(min(1.0, max(spent, (number + 1) / MAX_ROUNDS)))
        if spent >= 1.0 and number + 1 >= LEAST_ROUNDS:
            return
