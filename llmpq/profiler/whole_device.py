"""Measure a device in itself: layers by format and bitwidth, copies, launches, the host link.

The layers are Llama's with groups of queries and run as in a rank: with the kernels that loading
chooses, and decode steps compiled or captured where possible. Short steps read weights from memory,
not from a cache, as in a run: they pass through so many layers that none stays. Everything is timed
in interleaved rounds; the median counts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from llmpq.batching.blocks import blocks_of, slot_blocks
from llmpq.dist.engine.compiled_steps import step_runner_of
from llmpq.dist.engine.cuda_graphs import DecodeGraphs
from llmpq.dist.engine.executor import StageRunner
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.metrics.measurement import TakenShare
from llmpq.dist.metrics.stats import synchronize
from llmpq.dist.transport.frames import Row
from llmpq.kernels.base import open_device
from llmpq.kernels.cpu.experts import HostPool
from llmpq.kernels.cpu.step import UnsupportedStepError
from llmpq.kernels.registry import choose_backend
from llmpq.models import DecoderStage, Master, kv_shapes
from llmpq.models.adapter import Skeleton
from llmpq.profiler.bench import DISTINCT_BYTES, layers_beyond_caches, master_steps_s
from llmpq.profiler.grid import Shape
from llmpq.profiler.layer import warn_if_noisy
from llmpq.quant.loading.loader import use_huge_pages
from llmpq.quant.modules.experts import row_experts
from llmpq.quant.modules.layer import (
    GatedActivation,
    QuantExperts,
    QuantLinear,
    fuse_norms_,
    quantize_layer_,
)
from llmpq.quant.quantizers.rtn import quantize
from llmpq.spec.devices.timings import (
    HEAD_DIM,
    MLP_RATIO,
    DeviceTimings,
    LayerTiming,
    kv_heads_of,
    layer_matrices,
    narrow_features,
)
from llmpq.spec.families import DEFAULT_MODEL_TYPE
from llmpq.spec.precision import (
    DTYPE_BYTES,
    Dtype,
    Phase,
    Precision,
    default_precision,
    linear_bytes,
)

FORMATS: dict[Dtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""In order of preference."""
MOST_SLOWER = 3.0
"""How much longer products of the preferred format may take: runs have it for its fewer bytes."""
DECODE_BATCHES = (1, 4, 16)
FEW_TOKENS, MANY_TOKENS = 64, 512
"""Tokens of a step of prompts."""
SHORT_TOKENS, LONG_TOKENS = 32, 512
"""Tokens of a prompt with next to no attention, and of a prompt or context with much."""
WIDTHS = (16, 8, 4, 3)
OVERHEAD_DEPTHS = (2, 6)
MAX_ROUNDS = 25
GATHERED, GATHER_BITS = 8, 4
"""Experts of a row, and their bits, where the rate of scattered reads is measured."""
GATHER_ROUNDS, MOST_GATHERED = 6, 1024
LINK_BYTES = 64 * 2**20
SMALL_LINK_BYTES = 16 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceJob:
    """What to measure: the device, features of a layer, and the seconds to spend.

    ``distinct_bytes`` of weights take turns in short steps, more than caches hold.
    """

    device: torch.device
    features: int = 2048
    distinct_bytes: int = DISTINCT_BYTES
    budget_s: float = 60.0


@dataclass(slots=True)
class _TimedCall:
    """Something to time again and again."""

    call: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerTrial:
    """A step through some layers."""

    dtype: Dtype
    bits: int
    shape: Shape
    depth: int
    trial: _TimedCall

    def timing(self, overhead_s: float) -> LayerTiming:
        """Return the seconds of one layer without its overhead; they are at least half of all."""
        layer_s = self.trial.median_s / self.depth
        return LayerTiming(
            dtype=self.dtype, bits=self.bits, phase=self.shape.phase, batch=self.shape.batch,
            tokens=self.shape.tokens, seconds=max(layer_s / 2, layer_s - overhead_s),
        )  # fmt: skip


@torch.inference_mode()
def measure_device(
    job: DeviceJob, progress: Callable[[float], None] = lambda _: None
) -> DeviceTimings:
    """Measure a device; ``progress`` is called with the share of the budget that is spent.

    Logs a warning if other programs took the CPU meanwhile.
    """
    device = open_device(job.device)
    job = replace(job, device=device)
    known = [name for name, dtype in FORMATS.items() if computes(device, dtype)]
    probed_s = {name: _probe_s(job, FORMATS[name]) for name in known}
    main = next(name for name in known if probed_s[name] <= MOST_SLOWER * min(probed_s.values()))
    layers = [
        *(trial for bits in WIDTHS for trial in _main_trials(job, main, bits)),
        *(_many_tokens(job, name) for name in known if name != main),
    ]
    half = replace(job, features=narrow_features(job.features))
    narrow = [_many_tokens(half, main, bits) for bits in WIDTHS if half.features]
    others = _other_trials(job)
    taken = TakenShare()
    _run([*(one.trial for one in (*layers, *narrow)), *others.values()], job, progress)
    share = taken.share()
    warn_if_noisy(0.0, share)
    few, many = (others[f"layers {depth}"].median_s for depth in OVERHEAD_DEPTHS)
    overhead_s = max(0.0, many - few) / (OVERHEAD_DEPTHS[1] - OVERHEAD_DEPTHS[0])
    stage_s = max(0.0, few - OVERHEAD_DEPTHS[0] * overhead_s)
    host = {}
    if "link" in others:
        latency_s = others["small link"].median_s
        rest_s = max(1e-9, others["link"].median_s - latency_s)
        host = {"host_bytes_per_s": LINK_BYTES / rest_s, "host_latency_s": latency_s}
    gather = gather_bytes_per_s(job, main) if device.type == "cpu" else None
    return DeviceTimings(
        kind=device.type,  # type: ignore[arg-type]  # one of those of devices
        memory_bytes=memory_bytes(device),
        threads=torch.get_num_threads() if device.type == "cpu" else 1,
        copy_bytes_per_s=2.0 * job.distinct_bytes / others["copy"].median_s,
        features=job.features,
        layers=tuple(one.timing(overhead_s) for one in layers),
        narrow=tuple(one.timing(overhead_s) for one in narrow),
        layer_overhead_s=overhead_s,
        step_overhead_s=stage_s + _master_s(device),
        compute_capability=_capability(device),
        gather_bytes_per_s=gather,
        cpu_taken=share,
        **host,
    )


def _probe_s(job: DeviceJob, dtype: torch.dtype) -> float:
    """Return the least seconds of a product of many rows in a format, of three."""
    x = torch.ones(MANY_TOKENS, job.features, dtype=dtype, device=job.device)
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


def _main_trials(job: DeviceJob, dtype: Dtype, bits: int) -> Iterator[_LayerTrial]:
    """Return long steps through one layer, and short ones, which hardly reuse weights, through all.

    Caches hold one layer, but not those of a stage.
    """
    prompts = [_short_prompts(MANY_TOKENS)]
    steps = [_short_prompts(FEW_TOKENS)]
    steps += [Shape(phase=Phase.DECODE, batch=batch, tokens=1) for batch in DECODE_BATCHES]
    if bits == 16:
        prompts.append(Shape(phase=Phase.PREFILL, batch=1, tokens=LONG_TOKENS))
        steps.append(Shape(phase=Phase.DECODE, batch=DECODE_BATCHES[-1], tokens=LONG_TOKENS))
    precision, value_bytes = default_precision(bits), DTYPE_BYTES[dtype]
    shapes = layer_matrices(job.features)
    size = sum(linear_bytes(*shape, precision, value_bytes) for shape in shapes)
    layers = _layers(job, dtype, bits, layers_beyond_caches(size, job.distinct_bytes))
    yield from _trials(job, dtype, bits, layers[:1], prompts)
    yield from _trials(job, dtype, bits, layers, steps)


def _many_tokens(job: DeviceJob, dtype: Dtype, bits: int = 16) -> _LayerTrial:
    """Return many tokens of prompts through one layer."""
    layers = _layers(job, dtype, bits, 1)
    return next(_trials(job, dtype, bits, layers, [_short_prompts(MANY_TOKENS)]))


def _short_prompts(tokens: int) -> Shape:
    return Shape(phase=Phase.PREFILL, batch=tokens // SHORT_TOKENS, tokens=SHORT_TOKENS)


def _other_trials(job: DeviceJob) -> dict[str, _TimedCall]:
    """Return a copy inside the device, small layers, and the host link."""
    device = job.device
    source = torch.ones(job.distinct_bytes // 4, device=device)
    target = torch.empty_like(source)
    found = {"copy": _TimedCall(lambda: target.copy_(source))}
    small, one = replace(job, features=HEAD_DIM), Shape(phase=Phase.DECODE, batch=1, tokens=1)
    for depth in OVERHEAD_DEPTHS:
        layers = _layers(small, "float32", 16, depth)
        found[f"layers {depth}"] = next(_trials(small, "float32", 16, layers, [one])).trial
    if device.type != "cpu":
        for name, size in (("link", LINK_BYTES), ("small link", SMALL_LINK_BYTES)):
            host = torch.ones(size, dtype=torch.uint8)
            there = torch.empty(size, dtype=torch.uint8, device=device)
            # A frame leaves one device for host memory and enters the next from it.
            found[name] = _TimedCall(lambda host=host, there=there: host.copy_(there.copy_(host)))  # type: ignore[misc]
    return found


def gather_bytes_per_s(
    job: DeviceJob, dtype: Dtype, cores: Sequence[int] | None = None
) -> float | None:
    """Return the rate at which threads of a pool read and multiply experts of 4 bits, row by row.

    Each row has ``GATHERED`` experts of its own, and all rows together more than a cache holds.
    ``None`` where experts have no compiled kernels.

    Args:
        job: features of the rows, and bytes of all experts.
        dtype: of the rows.
        cores: of the threads; by default as many of this process as torch has threads.
    """
    features, hidden = max(HEAD_DIM, job.features * 3 // 8 // HEAD_DIM * HEAD_DIM), job.features
    precision, kind = default_precision(GATHER_BITS), FORMATS[dtype]
    shapes = ((2 * features, hidden), (hidden, features))
    size = sum(linear_bytes(*shape, precision, DTYPE_BYTES[dtype]) for shape in shapes)
    count = min(MOST_GATHERED, max(2, -(-job.distinct_bytes // size // GATHERED)) * GATHERED)
    try:
        if cores is None:
            cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
        pool = HostPool(len(cores), cores)
    except UnsupportedStepError:
        return None
    try:
        ups, downs = (
            [_random_linear(shape, precision, kind) for _ in range(count)] for shape in shapes
        )
        use_huge_pages(nn.ModuleList([*ups, *downs]))
        experts = QuantExperts(ups, downs, GatedActivation(nn.SiLU()))
        layer = pool.layer(kind, hidden, GATHERED, row_experts(experts, [True] * count))
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).int()
        weights, x = torch.ones(1, GATHERED), torch.randn(1, hidden).to(kind)
        y, before_s = torch.empty_like(x), []
        for _ in range(GATHER_ROUNDS):
            start_s = time.perf_counter()
            for chosen in order.view(-1, 1, GATHERED):
                pool.submit(layer, (x, chosen, weights), y)()
            before_s.append(time.perf_counter() - start_s)
        return count * size / median(before_s[1:])
    except UnsupportedStepError:
        return None
    finally:
        pool.close()


def _random_linear(shape: tuple[int, int], precision: Precision, dtype: torch.dtype) -> QuantLinear:
    """Return a quantized operator with random weights."""
    weight = torch.randn(shape).mul_(0.02).to(dtype)
    kernel = choose_backend(weight.device, precision, dtype, *shape)
    return QuantLinear(quantize(weight, precision, dtype), None, kernel)


def _master_s(device: torch.device) -> float:
    """Return the seconds of the master's work for one row, with next to no weights."""
    master, memory = _small_master(device), torch.ones(1, 1, device=device)
    shape = _short_prompts(SHORT_TOKENS)
    runs = [master_steps_s(master, shape, memory) for _ in range(MAX_ROUNDS)]
    # The first step computes prompts, and the one after it prepares decode.
    return median(step_s for run in runs[1:] for step_s in run[2:])


def _small_master(device: torch.device) -> Master:
    """Return a master with next to no work: few features and tokens."""
    master = Master(_config(HEAD_DIM, 1)).to_empty(device=device)
    for parameter in master.parameters():
        parameter.fill_(1.0)
    fuse_norms_(master)
    return master


def _layers(job: DeviceJob, dtype: Dtype, bits: int, depth: int) -> list[nn.Module]:
    """Return layers with the matrices of ``layer_matrices``, with random weights."""
    config = _config(job.features, depth)
    skeleton = Skeleton.of(config)
    most = max(rows * columns for rows, columns in layer_matrices(job.features))
    values = torch.randn(most, device=job.device).mul_(0.02).to(FORMATS[dtype])
    layers = []
    for index in range(depth):
        layer = skeleton.build_layer(config, index).to(FORMATS[dtype])
        layer.to_empty(device=job.device)
        for parameter in layer.parameters():
            parameter.copy_(values[: parameter.numel()].view_as(parameter))
        quantize_layer_(layer, bits, FORMATS[dtype])
        fuse_norms_(layer)  # as loading does: compiled steps take no other norms
        layers.append(layer)
    use_huge_pages(*layers)
    return layers


def _config(features: int, depth: int) -> PreTrainedConfig:
    heads = features // HEAD_DIM
    config = AutoConfig.for_model(
        DEFAULT_MODEL_TYPE, hidden_size=features, intermediate_size=MLP_RATIO * features,
        num_attention_heads=heads, num_key_value_heads=kv_heads_of(features),
        num_hidden_layers=depth, vocab_size=8,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return config


def _trials(
    job: DeviceJob, dtype: Dtype, bits: int, layers: Sequence[nn.Module], shapes: Sequence[Shape]
) -> Iterator[_LayerTrial]:
    """Return steps of some shapes through the layers, as a stage runs them."""
    config = _config(job.features, len(layers))
    stage = DecoderStage(config, layers, 0)
    cache = KVCache(
        kv_shapes(config, 0, len(layers)), 0,
        num_blocks=max(shape.batch * blocks_of(shape.tokens) for shape in shapes),
        dtype=FORMATS[dtype], device=job.device,
    )  # fmt: skip
    steps = step_runner_of(stage, cache)
    if isinstance(steps, DecodeGraphs):
        decode = [shape for shape in shapes if shape.phase is Phase.DECODE]
        most = max((shape.tokens for shape in decode), default=1)
        steps.capture({shape.batch for shape in decode}, most)
    runner = StageRunner(
        layers=stage, cache=cache, device=job.device, is_last=False, steps=steps,
        chunk_tokens=sys.maxsize,
    )  # fmt: skip
    for shape in shapes:
        new = shape.tokens if shape.phase is Phase.PREFILL else 1
        hidden = torch.randn(1, shape.batch * new, job.features, device=job.device)
        rows = [
            Row(
                blocks=slot_blocks(slot, shape.tokens, shape.tokens),
                first=shape.tokens - new,
                length=shape.tokens,
            )
            for slot in range(shape.batch)
        ]
        call = partial(runner.run, hidden.to(FORMATS[dtype]), rows)
        yield _LayerTrial(
            dtype=dtype, bits=bits, shape=shape, depth=len(layers), trial=_TimedCall(call)
        )


def _run(
    trials: Sequence[_TimedCall],
    job: DeviceJob,
    progress: Callable[[float], None],
    now: Callable[[], float] = time.perf_counter,
) -> None:
    """Time the trials in rounds until the budget is spent: each once, slow ones less often."""
    for trial in trials:
        trial.call()  # compiles and allocates
    start_s = now()
    for number in range(MAX_ROUNDS):
        is_spent = True
        for trial in trials:
            left_s = job.budget_s - (now() - start_s)
            if trial.seconds and 2.0 * trial.seconds[-1] > left_s:
                continue
            is_spent = False
            trial.call()
            synchronize(job.device)
            before_s = now()
            trial.call()
            synchronize(job.device)
            trial.seconds.append(now() - before_s)
        if is_spent:
            return
        progress(min(1.0, max((now() - start_s) / job.budget_s, (number + 1) / MAX_ROUNDS)))
