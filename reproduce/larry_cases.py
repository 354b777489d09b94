"""Servers and requests of the evaluation of LARRY and SAL (Sec. 5 to 7).

The servers are rooflines of the catalogue. Two H100 with tensor parallelism are one device with
twice the figures and two all-reduces of the hidden states in every layer; 8-bit floating-point
products are native: weights of one byte, and 1.6 times the arithmetic rate of bfloat16.

Lengths are pairs drawn from the Azure traces. The arrivals of the paper (Azure Functions) are not
public here: arrivals switch between a calm and a busy rate.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from llmpq.costmodel.exact_bytes import layer_weight_bytes, master_bytes, token_kv_bytes
from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.sim.engine_costs import StageLaw, StepSize
from llmpq.spec import catalog
from llmpq.spec.devices.figures import DeviceSpec, PrecisionCost
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE
from llmpq.spec.workload import TraceRequest, draw_arrivals, slice_trace, with_arrivals
from reproduce.worker_costs import WorkerCosts

KV_SHARE = 0.9
"""Part of the memory that weights, activations and blocks may take (vLLM's default)."""
FP8 = PrecisionCost(bits=8, compute=0.625, stream=0.9, overhead=1.0, dequantize=0.0)
BF16_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A model on a server.

    Attributes:
        name: of both.
        costs: seconds of a step.
        num_blocks: KV blocks of 16 tokens.
    """

    name: str
    costs: WorkerCosts
    num_blocks: int


def a100_server() -> Server:
    """Return Llama-3-8B in bfloat16 on one A100 with 40 GB."""
    return llama_8b_server("A100-40G")


def llama_8b_server(device_name: str) -> Server:
    """Return Llama-3-8B in bfloat16 on one device of the catalogue."""
    device = catalog.device(device_name)
    return _server(f"Llama-3-8B, {device_name}", "meta-llama/Meta-Llama-3-8B", device, 16, 1)


def h100_server() -> Server:
    """Return Llama-3-70B in FP8 on two H100 with tensor parallelism."""
    one = catalog.device("H100")
    two = replace(
        one,
        memory_bytes=2 * one.memory_bytes,
        runtime_bytes=2 * one.runtime_bytes,
        flops=tuple((name, 2 * rate) for name, rate in one.flops),
        memory_bytes_per_s=2 * one.memory_bytes_per_s,
        precision_costs=(FP8,),
    )
    return _server("Llama-3-70B FP8, 2 x H100", "meta-llama/Meta-Llama-3-70B", two, 8, 2)


def _server(name: str, model_name: str, device: DeviceSpec, bits: int, members: int) -> Server:
    model = catalog.model(model_name)
    latency = RooflineLatencyModel(model=model, device=device, dtype="bfloat16", kv_bits=16)
    layers = len(model.layer_kinds)

    def send_s(rows: float) -> float:
        if members == 1:
            return 0.0
        size = rows * model.hidden_size * BF16_BYTES
        return 2.0 * (device.link_latency_s + size / device.link_bytes_per_s)

    def prefill_s(rows: int, tokens: float) -> float:
        layer_s = latency.layer_s(Phase.PREFILL, bits, rows, tokens, 0)
        return layers * (layer_s + send_s(rows * tokens))

    def decode_s(rows: int, tokens: float) -> float:
        return layers * (latency.layer_s(Phase.DECODE, bits, rows, tokens, 0) + send_s(rows))

    law = StageLaw(prefill_s, decode_s)
    master_s = cache(latency.master_s)

    def seconds(shape: StepSize) -> float:
        phase = Phase.PREFILL if shape.prompts else Phase.DECODE
        return law(shape) + master_s(phase, shape.rows, shape.tokens / shape.rows)

    weights = layers * layer_weight_bytes(model, 0, bits, "bfloat16")
    ends = master_bytes(model, "bfloat16")
    room = KV_SHARE * device.memory_bytes - device.runtime_bytes - weights - ends
    token_bytes = layers * token_kv_bytes(model, 0, 1, 16)
    blocks = int(room / (token_bytes * KV_BLOCK_SIZE))
    return Server(name=name, costs=WorkerCosts(seconds), num_blocks=blocks)


def draw_requests(
    trace: Sequence[TraceRequest], count: int, seed: int, arrivals: str, servers: int = 1
) -> tuple[TraceRequest, ...]:
    """Return requests with a mean rate of 1 a second for each server.

    Args:
        trace: an Azure trace.
        count: number of requests.
        seed: of lengths and arrivals.
        arrivals: a name of ``draw_arrivals``, or ``trace`` for consecutive requests of the trace
            with its own arrivals.
        servers: number of servers; the busy and calm times do not depend on it.
    """
    chance = random.Random(seed)
    if arrivals == "trace":
        first = chance.randrange(len(trace) - count)
        part = slice_trace(trace, first, first + count)
        mean = servers * part[-1].arrival_s / count
        return with_arrivals(part, [item.arrival_s / mean for item in part])
    chosen = chance.choices(trace, k=count)
    return with_arrivals(chosen, draw_arrivals(arrivals, count, float(servers), seed=seed))
