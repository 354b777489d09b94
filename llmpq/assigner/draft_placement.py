"""Whether a draft model pays for a plan, and on which device (Leviathan et al. 2023, Sec. 3).

A round of decoding makes ``E(k) = (1 - a^(k+1)) / (1 - a)`` tokens of every sequence from ``k``
draft tokens, where ``a`` is the chance that one is right, once those before it are. It takes the
way of a micro-batch of ``1 + k`` rows a sequence through all stages, or all micro-batches on the
slowest stage, whichever is longer. The draft model makes ``k`` passes before each micro-batch while
the master waits, and computes every prompt once.

It runs in the master's process: on the master's device, or on an accelerator of its node that has
no stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from llmpq.batching.speculation import MAX_STEP_TOKENS
from llmpq.costmodel import ClusterCosts
from llmpq.errors import SpecError
from llmpq.sim import BatchShape
from llmpq.sim.plan_costs import PlanCosts
from llmpq.spec.cluster import Device
from llmpq.spec.plan import Plan
from llmpq.spec.precision import Phase
from llmpq.spec.schedule import PlannedDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """A draft model to place.

    Attributes:
        costs: of the draft model on the plan's cluster, its head included.
        source: directory of its weights, or its name.
        bits: of its layers, ``None`` as stored.
        acceptance_rate: chance that a draft token is right, once those before it are.
        most: draft tokens of a sequence.
    """

    costs: ClusterCosts
    source: str
    bits: int | None
    acceptance_rate: float
    most: int


def place_draft(plan: Plan, costs: ClusterCosts, request: DraftRequest) -> PlannedDraft | None:
    """Return the device and the number of draft tokens of the shortest decoding.

    Args:
        plan: stages that do both phases.
        costs: of its model.
        request: the draft model.

    Returns:
        ``None`` where the plan alone is as fast.

    Raises:
        SpecError: the draft model has a vocabulary of another size.
    """
    found, expected = request.costs.model.vocab_size, costs.model.vocab_size
    if found != expected:
        raise SpecError(
            f"{request.source}: field 'vocab_size': found {found}, expected the {expected} of "
            f"{costs.model.name}: a draft model shares the vocabulary"
        )
    stages = PlanCosts(plan, costs)
    alone_s = _decode_s(plan, stages, request, None, 0)
    options = [
        (_decode_s(plan, stages, request, index, count), index, count)
        for index in _devices(plan, costs, request)
        for count in range(1, _most(plan, request) + 1)
    ]
    if not options or min(options)[0] >= alone_s:
        return None
    seconds, index, count = min(options)
    device = plan.cluster.devices[index]
    return PlannedDraft(
        model=request.source,
        bits=request.bits,
        num_speculative_tokens=count,
        device=index,
        acceptance_rate=request.acceptance_rate,
        cost=_pass_s(plan, request, device, 1) / _step_s(plan, stages, 1)[0],
        speedup=alone_s / seconds,
        memory_bytes=_memory_bytes(plan, request, index),
    )


def expected_tokens(acceptance_rate: float, draft_tokens: int) -> float:
    """Return the tokens of a sequence that a step makes: Leviathan et al., Eq. 1."""
    return sum(acceptance_rate**place for place in range(draft_tokens + 1))


def _most(plan: Plan, request: DraftRequest) -> int:
    """Return the most draft tokens with which a micro-batch still is a step of few rows."""
    return min(request.most, MAX_STEP_TOKENS // plan.micro_batching.decode - 1)


def _decode_s(
    plan: Plan, stages: PlanCosts, request: DraftRequest, index: int | None, count: int
) -> float:
    """Return the seconds of all decode rounds, with draft tokens of a device or without any."""
    work, sizes = plan.workload, plan.micro_batching
    draft_s = prompts_s = 0.0
    if index is not None:
        device = plan.cluster.devices[index]
        draft_s = count * _pass_s(plan, request, device, sizes.decode)
        prompts_s = work.batch * _prompt_s(plan, request, device)
    way_s, busy_s = _step_s(plan, stages, sizes.decode * (1 + count))
    busiest_s = max(busy_s[0] + draft_s, *busy_s)
    round_s = max(way_s + draft_s, math.ceil(work.batch / sizes.decode) * busiest_s)
    rounds = (work.new_tokens - 1) / expected_tokens(request.acceptance_rate, count)
    return prompts_s + rounds * round_s


def _step_s(plan: Plan, stages: PlanCosts, rows: int) -> tuple[float, list[float]]:
    """Return the seconds of a decode step through all stages, and of each stage alone."""
    context = plan.workload.mean_context_tokens
    shape = BatchShape(
        phase=Phase.DECODE, rows=rows, longest=round(context), total=round(rows * context)
    )
    busy_s, delay_s = [], 0.0
    for rank in stages.layout.path(Phase.DECODE):
        hop = stages.hop(rank, shape)
        has_layers = stages.has_layers(rank, Phase.DECODE)
        layers_s = stages.layers_s(rank, Phase.DECODE, rows, context) if has_layers else 0.0
        busy_s.append(layers_s + 2 * hop.end_s)
        delay_s += hop.delay_s
    busy_s[0] += stages.project_s(shape)
    return sum(busy_s) + delay_s, busy_s


def _pass_s(plan: Plan, request: DraftRequest, device: Device, rows: int) -> float:
    """Return the seconds of a token of the draft model for so many sequences."""
    context = plan.workload.mean_context_tokens
    return _model_s(request, device, Phase.DECODE, rows, context, 1.0)


def _prompt_s(plan: Plan, request: DraftRequest, device: Device) -> float:
    """Return the seconds in which the draft model computes a prompt."""
    tokens = float(plan.workload.prompt_tokens)
    return _model_s(request, device, Phase.PREFILL, 1, tokens, tokens)


def _model_s(
    request: DraftRequest, device: Device, phase: Phase, rows: int, tokens: float, own: float
) -> float:
    costs = request.costs
    layers_s = sum(
        costs.layer_s(device, phase, bits, rows, tokens, kind)
        for kind, bits in zip(costs.model.layer_kinds, _bits(request), strict=True)
    )
    return layers_s + costs.master_s(device, phase, rows, own) + costs.stage_s(device, phase)


def _bits(request: DraftRequest) -> list[int]:
    model = request.costs.model
    if request.bits is not None:
        return [request.bits] * model.num_layers
    return [precision.bits for precision in model.stored] or [16] * model.num_layers


def _devices(plan: Plan, costs: ClusterCosts, request: DraftRequest) -> Iterator[int]:
    """Yield the devices that hold the draft model and that the master's process reaches."""
    master = plan.stages[0].device
    home, own = plan.cluster.devices[master], plan.dtype_of(plan.stages[0])
    for index in (master, *plan.dropped_devices):
        device = plan.cluster.devices[index]
        spec = costs.specs[device.group]
        if index != master and (device.node != home.node or spec.kind == "cpu"):
            continue
        if device.members > 1 or request.costs.format_of(device) != own:
            continue
        used = plan.estimate.stages[0].memory.total if index == master else 0
        needed = _memory_bytes(plan, request, index) + used
        has_bits = set(_bits(request)) <= set(spec.bits)
        if has_bits and needed <= costs.capacity_bytes(device):
            yield index


def _memory_bytes(plan: Plan, request: DraftRequest, index: int) -> int:
    """Return the bytes of weights, KV blocks and a step; without a stage, of the runtime too."""
    costs, work, device = request.costs, plan.workload, plan.cluster.devices[index]
    total = costs.master_bytes(device) + costs.temporary_bytes(
        device, work, plan.micro_batching, is_master=True, is_last=True
    )
    for kind, bits in zip(costs.model.layer_kinds, _bits(request), strict=True):
        total += costs.layer_weight_bytes(device, kind, bits)
        total += costs.layer_kv_bytes(kind, work.batch, work.max_context_tokens, device)
    return total + (costs.runtime_bytes(device) if index in plan.dropped_devices else 0)
