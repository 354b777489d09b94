"""Whether a draft model pays for a plan, and on which device (Leviathan et al. 2023, Sec. 3).

A round of decoding makes ``E(k) = (1 - a^(k+1)) / (1 - a)`` tokens of every sequence from ``k``
draft tokens, where ``a`` is the chance that one is right, once those before it are. It takes the
way of a micro-batch of ``1 + k`` rows a sequence through all stages, or all micro-batches on the
slowest stage, whichever is longer. The draft model makes ``k`` passes before each micro-batch while
the master waits, and computes every prompt once.

It runs in the master's process on the master's device, or in a process of its own on any other
device, with a stage or without: then token ids travel there and back. A model's own layer for
multi-token prediction reads hidden states, and runs with the master.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.batching.speculation import MAX_STEP_TOKENS
from llmpq.costmodel import ClusterCosts
from llmpq.errors import SpecError
from llmpq.sim import BatchShape
from llmpq.sim.costs import PlanCosts
from llmpq.spec.cluster import Device
from llmpq.spec.plan import ACCEPTANCE_RATE, MOST_DRAFT_TOKENS, MTP, Plan, PlannedDraft
from llmpq.spec.precision import Phase
from llmpq.units import format_bytes

TOKEN_ID_BYTES = 4
"""Of a token id between the master and the process of a draft model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """A draft model to place.

    Attributes:
        costs: of the draft model on the plan's cluster, its head included; with ``MTP`` those of
            the plan's model.
        source: directory of its weights, or its name; ``MTP`` for the plan's model's own layer.
        bits: of its layers, ``None`` as stored.
        acceptance_rate: chance that a draft token is right, once those before it are.
        most: draft tokens of a sequence.
    """

    costs: ClusterCosts
    source: str
    bits: int | None
    acceptance_rate: float
    most: int

    @property
    def is_mtp(self) -> bool:
        """Whether it is the model's own layer for multi-token prediction."""
        return self.source == MTP

    @property
    def layers(self) -> list[tuple[int, int]]:
        """Kind and bits of its layers."""
        model = self.costs.model
        if self.is_mtp:
            assert self.bits is not None
            return [(model.layer_kinds[model.mtp_layer], self.bits)]
        bits = [self.bits or 16] * model.num_layers
        if self.bits is None and model.stored:
            bits = [precision.bits for precision in model.stored]
        return list(zip(model.layer_kinds, bits, strict=True))

    def joined_share(self) -> float:
        """Weights of the projection before the layer, relative to those of the layer."""
        model = self.costs.model
        if not self.is_mtp:
            return 0.0
        return 2 * model.hidden_size**2 / model.layers[model.mtp_layer].active_weight_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlace:
    """A device as the place of a draft model.

    Attributes:
        device: index into ``cluster.devices``.
        obstacle: why it cannot run there; empty where it can.
        tokens: the best number of draft tokens there.
        speedup: seconds of decoding without drafts, over those with them.
    """

    device: int
    obstacle: str = ""
    tokens: int = 0
    speedup: float = 0.0


def mtp_request(
    plan: Plan,
    costs: ClusterCosts,
    *,
    bits: int | None = None,
    acceptance_rate: float = ACCEPTANCE_RATE,
    most: int = MOST_DRAFT_TOKENS,
) -> DraftRequest:
    """Return the request of a model's own layer for multi-token prediction.

    Args:
        plan: the strategy.
        costs: of its model.
        bits: of the layer, ``None`` for those of the plan's last one.
        acceptance_rate: as for :class:`DraftRequest`.
        most: likewise.
    """
    return DraftRequest(
        costs=costs,
        source=MTP,
        bits=bits or plan.stages[-1].bits[-1],
        acceptance_rate=acceptance_rate,
        most=most,
    )


def place_draft(
    plan: Plan,
    costs: ClusterCosts,
    request: DraftRequest,
    places: Sequence[DraftPlace] | None = None,
) -> PlannedDraft | None:
    """Return the device and the number of draft tokens of the shortest decoding.

    Args:
        plan: stages that do both phases.
        costs: of its model.
        request: the draft model.
        places: as found by :func:`draft_places`, which is called by default.

    Returns:
        ``None`` where the plan alone is as fast.

    Raises:
        SpecError: as :func:`draft_places`.
    """
    found = draft_places(plan, costs, request) if places is None else places
    best = max(found, key=lambda place: place.speedup)
    if best.speedup <= 1:
        return None
    device, stages = plan.cluster.devices[best.device], PlanCosts(plan, costs)
    step_s, _ = _step_s(plan, stages, 1)
    handover_s = _handover_s(plan, costs, device, 1, best.tokens)
    return PlannedDraft(
        model=request.source,
        bits=request.bits,
        num_speculative_tokens=best.tokens,
        device=best.device,
        acceptance_rate=request.acceptance_rate,
        cost=_pass_s(plan, request, device, 1) / step_s,
        handover=None if best.device == plan.stages[0].device else handover_s / step_s,
        speedup=best.speedup,
        memory_bytes=_memory_bytes(plan, request, best.device),
    )


def draft_places(plan: Plan, costs: ClusterCosts, request: DraftRequest) -> tuple[DraftPlace, ...]:
    """Return what the draft model does on each device, that of the master first.

    Args:
        plan: stages that do both phases.
        costs: of its model.
        request: the draft model.

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
    alone_s = _decode_s(plan, costs, stages)
    master = plan.stages[0].device
    places: list[DraftPlace] = []
    for index in sorted(range(len(plan.cluster.devices)), key=lambda one: (one != master, one)):
        obstacle = _obstacle(plan, costs, request, index)
        times = {
            count: _decode_s(plan, costs, stages, request, index, count)
            for count in range(1, _most(plan, request) + 1)
            if not obstacle
        }
        tokens = min(times, key=times.__getitem__, default=0)
        places.append(
            DraftPlace(
                device=index,
                obstacle=obstacle,
                tokens=tokens,
                speedup=alone_s / times[tokens] if tokens else 0.0,
            )
        )
    return tuple(places)


def expected_tokens(acceptance_rate: float, draft_tokens: int) -> float:
    """Return the tokens of a sequence that a step makes: Leviathan et al., Eq. 1."""
    return sum(acceptance_rate**place for place in range(draft_tokens + 1))


def _most(plan: Plan, request: DraftRequest) -> int:
    """Return the most draft tokens with which a micro-batch still is a step of few rows."""
    return min(request.most, MAX_STEP_TOKENS // plan.micro_batching.decode - 1)


def _decode_s(
    plan: Plan,
    costs: ClusterCosts,
    stages: PlanCosts,
    request: DraftRequest | None = None,
    index: int = 0,
    count: int = 0,
) -> float:
    """Return the seconds of all decode rounds, with draft tokens of a device or without any."""
    work, sizes = plan.workload, plan.micro_batching
    way_s, busy_s = _step_s(plan, stages, sizes.decode * (1 + count))
    rounds, prompts_s = float(work.new_tokens - 1), 0.0
    if request is not None:
        device = plan.cluster.devices[index]
        passes_s = count * _pass_s(plan, request, device, sizes.decode)
        draft_s = passes_s + _handover_s(plan, costs, device, sizes.decode, count)
        way_s += draft_s
        busy_s[0] += draft_s  # the master waits
        for stage in plan.stages[1:]:
            busy_s[stage.rank] += passes_s * (stage.device == index)
        prompts_s = work.batch * _prompt_s(plan, costs, request, device)
        rounds /= expected_tokens(request.acceptance_rate, count)
    round_s = max(way_s, math.ceil(work.batch / sizes.decode) * max(busy_s))
    return prompts_s + rounds * round_s


def _handover_s(plan: Plan, costs: ClusterCosts, device: Device, rows: int, count: int) -> float:
    """Return the seconds of sending the newest tokens to a device, and draft tokens back."""
    master, send_s = plan.device_of(plan.stages[0]), costs.comm.send_s
    there_s = send_s(master, device, TOKEN_ID_BYTES * rows * (1 + count))
    return there_s + send_s(device, master, TOKEN_ID_BYTES * rows * count)


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


def _prompt_s(plan: Plan, costs: ClusterCosts, request: DraftRequest, device: Device) -> float:
    """Return the seconds in which the draft model receives and computes a prompt."""
    tokens, master = plan.workload.prompt_tokens, plan.device_of(plan.stages[0])
    sent_s = costs.comm.send_s(master, device, TOKEN_ID_BYTES * tokens)
    return sent_s + _model_s(request, device, Phase.PREFILL, 1, float(tokens), float(tokens))


def _model_s(
    request: DraftRequest, device: Device, phase: Phase, rows: int, tokens: float, own: float
) -> float:
    costs = request.costs
    layers_s = sum(
        count * costs.layer_steps_s(device, phase, bits, rows, tokens, kind)
        for (kind, bits), count in Counter(request.layers).items()
    )
    layers_s *= 1 + request.joined_share()
    return layers_s + costs.master_s(device, phase, rows, own) + costs.stage_s(device, phase)


def _obstacle(plan: Plan, costs: ClusterCosts, request: DraftRequest, index: int) -> str:
    """Return why a device cannot run the draft model; empty where it can."""
    device = plan.cluster.devices[index]
    own, expected = request.costs.format_of(device), plan.dtype_of(plan.stages[0])
    if device.members > 1:
        return f"{device.members} devices as one"
    if request.is_mtp and index != plan.stages[0].device:
        return "reads hidden states, runs with rank 0"
    if own != expected:
        return f"{own}, expected the {expected} of stage 0"
    if missing := {bits for _, bits in request.layers} - set(costs.specs[device.group].bits):
        return f"no {min(missing)} bits"
    used = sum(
        one.memory.total
        for stage, one in zip(plan.stages, plan.estimate.stages, strict=True)
        if stage.device == index
    )
    free, needed = costs.capacity_bytes(device) - used, _memory_bytes(plan, request, index)
    if needed > free:
        return f"{format_bytes(max(0, free))} free, expected {format_bytes(needed)}"
    return ""


def _memory_bytes(plan: Plan, request: DraftRequest, index: int) -> int:
    """Return the bytes of weights, KV blocks and a step, and of the runtime off the master."""
    costs, work, device = request.costs, plan.workload, plan.cluster.devices[index]
    total = 0
    if not request.is_mtp:  # whose embedding, head and temporary memory are the model's
        total = costs.master_bytes(device) + costs.temporary_bytes(
            device, work, plan.micro_batching, is_master=True, is_last=True
        )
    for kind, bits in request.layers:
        weights = costs.layer_weight_bytes(device, kind, bits)
        total += weights + math.ceil(weights * request.joined_share())
        total += costs.layer_kv_bytes(
            kind, work.batch, work.max_context_tokens, device, keeps_all=True
        )
    return total + (0 if index == plan.stages[0].device else costs.runtime_bytes(device))
