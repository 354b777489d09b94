"""Seconds of an engine as tables of the simulator, from measured iterations or from layers.

- A table of whole iterations (``llmpq.multillm.cost``).
- Per-layer costs on one device, or on a team of devices that share every layer: layers over the
  devices of the team, and two all-reduces a layer.
- A plan of ours, a pipeline of stages: sequences that decode are split evenly over the steps in
  flight, one more than there are stages, so a round takes the sum over the stages, or as often as
  there are steps the slowest of them. Prompts follow each other, so a chunk takes the slowest
  stage. A stage receives and sends a message in each step.

Seconds are evaluated at some batches, contexts and prompts, and are linear between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from llmpq.costmodel import ClusterCosts
from llmpq.costmodel.base import prompt_s
from llmpq.multillm.cost import IterationModel
from llmpq.multillm.engine.native import Array, EngineLaw
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import engine_limits
from llmpq.sim.costs import BatchShape
from llmpq.sim.plan_costs import PlanCosts
from llmpq.spec.cluster import Device
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan
from llmpq.spec.precision import DTYPE_BYTES, Phase
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE

MAX_SEQUENCES = 256
"""Running sequences of an engine, as in vLLM."""
MIN_PREFILL_TOKENS = 2048
"""Padded tokens of a prefill iteration of vLLM 0.2-0.4: these, or the longest sequence."""
REQUESTS_AHEAD = 2
"""Requests that an engine of ours has at once, in multiples of its plan's batch; the others wait in
the queue of the model."""
WATERMARK = 0.01
"""Share of the blocks that an admission leaves free."""
OVERHEAD_S = 5e-3
"""Scheduler, sampling and output processing of an iteration where no table states them: what the
published tables of SamuLLM have at a batch of 1 in addition to the model's computation."""
SHORT, LONG = 64.0, 2048.0
"""Contexts at which decode is evaluated."""

Seconds = Callable[[int, float], float]
"""Returns the seconds of so many sequences of so many tokens each."""
Uneven = Callable[[int, float, float], float]
"""The same with the longest of them; the tokens are those of a sequence in the mean."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of a model (SamuLLM, Eq. 1 and 2, two for each weight).

    Attributes:
        token: of one token, without attention.
        key: of attention of one token to one key.
    """

    token: float
    key: float

    @classmethod
    def of(cls, model: ModelSpec) -> Operations:
        """Return the operations of a model."""
        layers = [model.layer_types[kind] for kind in model.layer_kinds]
        return cls(
            token=2.0 * sum(layer.active_weight_parameters for layer in layers),
            key=4.0 * sum(layer.num_heads * layer.head_dim for layer in layers),
        )

    def prefill(self, tokens: Array) -> Array:
        """Return the operations of prompts of these lengths."""
        found: Array = self.token * tokens + self.key * tokens**2
        return found


def measured_law(
    iterations: IterationModel,
    operations: Operations,
    *,
    prompt_tokens: float,
    kv_tokens: int,
    max_model_len: int,
) -> EngineLaw:
    """Return vLLM 0.2-0.4 with measured iterations.

    Args:
        iterations: seconds of whole iterations.
        operations: of the model.
        prompt_tokens: usual prompt.
        kv_tokens: tokens whose keys and values the memory holds.
        max_model_len: longest sequence.
    """
    return _separate(
        _prefill_weights(partial(iterations.seconds, Phase.PREFILL), prompt_tokens, MAX_SEQUENCES),
        _decode_weights(partial(iterations.seconds, Phase.DECODE), MAX_SEQUENCES),
        operations,
        kv_tokens,
        max_model_len,
    )


def team_law(
    costs: ClusterCosts,
    device: Device,
    members: int,
    *,
    prompt_tokens: float,
    kv_tokens: int,
    max_model_len: int,
) -> EngineLaw:
    """Return vLLM 0.2-0.4 with per-layer costs of one device, shared by ``members`` like it.

    Args:
        costs: cost models of the model.
        device: one of the devices.
        members: devices that share every layer.
        prompt_tokens: usual prompt.
        kv_tokens: tokens whose keys and values the memories hold together.
        max_model_len: longest sequence.
    """
    model = costs.model

    def seconds(phase: Phase, batch: int, tokens: float) -> float:
        layers = sum(
            costs.layer_s(device, phase, 16, batch, tokens, kind) for kind in model.layer_kinds
        )
        own = layers + costs.master_s(device, phase, batch, tokens)
        rows = batch * (tokens if phase is Phase.PREFILL else 1.0)
        return own / members + _reduce_s(costs, device, members, rows) + OVERHEAD_S

    def prefill_s(batch: int, tokens: float) -> float:
        return seconds(Phase.PREFILL, batch, tokens)

    def decode_s(batch: int, tokens: float, longest: float) -> float:  # noqa: ARG001
        return seconds(Phase.DECODE, batch, tokens)

    return _separate(
        _prefill_weights(prefill_s, prompt_tokens, MAX_SEQUENCES),
        _decode_weights(decode_s, MAX_SEQUENCES),
        Operations.of(model),
        kv_tokens,
        max_model_len,
    )


def plan_law(plan: Plan, costs: ClusterCosts) -> EngineLaw:
    """Return our engine on a plan: mixed steps, blocks for the plan's sequences."""
    own = PlanCosts(plan, costs)
    stages = range(own.layout.num_ranks)
    limits = engine_limits(plan, EngineOptions())
    depth = limits.steps_in_flight
    work = plan.workload

    def stage_s(rank: int, phase: Phase, rows: int, tokens: float) -> float:
        found = own.micro_batch_s(rank, phase, rows, tokens) if own.has_layers(rank, phase) else 0.0
        if rank == 0:
            found += own.master_s(phase, rows, tokens if phase is Phase.PREFILL else 1.0)
        return found

    def decode_s(batch: int, context: float, longest: float) -> float:  # noqa: ARG001
        steps = min(depth, batch)
        rows = -(-batch // steps)
        shape = BatchShape(phase=Phase.DECODE, rows=rows, longest=1, total=rows)
        hops = [own.hop(rank, shape) for rank in stages]
        each = [
            stage_s(rank, Phase.DECODE, rows, context) + 2.0 * hop.end_s
            for rank, hop in zip(stages, hops, strict=True)
        ]
        return max(sum(each) + sum(hop.delay_s for hop in hops), steps * max(each))

    def prompt(tokens: float) -> tuple[float, float]:
        """Return the largest seconds of a stage, without attention and of attention."""
        length = max(1, round(tokens))
        shape = BatchShape(phase=Phase.PREFILL, rows=1, longest=length, total=length)
        each = [prompt_s(partial(stage_s, rank, Phase.PREFILL), tokens) for rank in stages]
        linear = [
            own_s + 2.0 * own.hop(rank, shape).end_s
            for rank, (own_s, _) in zip(stages, each, strict=True)
        ]
        return max(linear), max(attention for _, attention in each)

    usual = float(work.prompt_tokens)
    budget = limits.token_budget
    at = _grid(budget)
    packed = np.interp(np.arange(budget + 1), at, [prompt(tokens)[0] for tokens in at])
    operations = Operations.of(costs.model)
    most = min(limits.max_sequences, REQUESTS_AHEAD * work.batch)
    return EngineLaw(
        mixed=True,
        max_sequences=most,
        token_budget=budget,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        watermark_blocks=int(limits.watermark * limits.num_blocks),
        prefill=np.zeros((most + 1, 2)),
        decode=_decode_weights(decode_s, most, float(work.max_context_tokens)),
        packed=packed,
        attention=prompt(usual)[1] / usual**2,
        flops_token=operations.token,
        flops_key=operations.key,
    )


def _separate(
    prefill: Array, decode: Array, operations: Operations, kv_tokens: int, max_model_len: int
) -> EngineLaw:
    blocks = kv_tokens // KV_BLOCK_SIZE
    return EngineLaw(
        mixed=False,
        max_sequences=MAX_SEQUENCES,
        token_budget=max(MIN_PREFILL_TOKENS, max_model_len),
        num_blocks=blocks,
        block_size=KV_BLOCK_SIZE,
        watermark_blocks=int(WATERMARK * blocks),
        prefill=prefill,
        decode=decode,
        packed=np.zeros(0),
        attention=0.0,
        flops_token=operations.token,
        flops_key=operations.key,
    )


def _grid(most: int) -> Array:
    """Return numbers from 1 to ``most``, each at most a half larger than the one before."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, found[-1] * 3 // 2)))
    return np.array(found, np.float64)


def _decode_weights(seconds: Uneven, most: int, longest: float = LONG) -> Array:
    """Return the weights of 1, ``S`` and ``B s`` by batch [most + 1, 3], linear in the contexts."""
    batches = _grid(most)
    low, high = min(SHORT, longest / 2.0), max(longest, 2.0)
    shapes = ((low, low), (high, high), (low, high))
    at = np.array([[seconds(int(batch), *shape) for shape in shapes] for batch in batches])
    both = np.maximum(0.0, at[:, 1] - at[:, 0]) / (high - low)
    padding = np.minimum(both, np.maximum(0.0, at[:, 2] - at[:, 0]) / (high - low))
    every = np.arange(most + 1).clip(1)
    constant = np.interp(every, batches, np.maximum(0.0, at[:, 0] - both * low))
    slopes = [np.interp(every, batches, one) / every for one in (both - padding, padding)]
    return np.stack([constant, *slopes], axis=1)


def _prefill_weights(seconds: Seconds, tokens: float, most: int) -> Array:
    """Return the weights of 1 and ``B s`` by batch [most + 1, 2], linear about a usual prompt."""
    batches = _grid(most)
    low, high = max(1.0, tokens / 2.0), max(2.0, tokens * 2.0)
    at = np.array([[seconds(int(batch), low), seconds(int(batch), high)] for batch in batches])
    slope = np.maximum(0.0, at[:, 1] - at[:, 0]) / (high - low)
    every = np.arange(most + 1).clip(1)
    constant = np.interp(every, batches, np.maximum(0.0, at[:, 0] - slope * low))
    return np.stack([constant, np.interp(every, batches, slope) / every], axis=1)


def _reduce_s(costs: ClusterCosts, device: Device, members: int, rows: float) -> float:
    """Return the seconds of two ring all-reduces of the hidden states in every layer."""
    if members == 1:
        return 0.0
    link = costs.cluster.link(device, device, costs.specs[device.group])
    size = rows * costs.model.hidden_size * DTYPE_BYTES[costs.format_of(device)]
    one = 2.0 * (members - 1) * (size / members / link.bytes_per_s + link.latency_s)
    return 2.0 * costs.model.num_layers * one
