"""Which devices encode and which decode, and which layers each holds (ExeGPT's WAA, Sec. 4.1).

WAA-C gives every device of a phase an equal share of its time, WAA-M an equal share of its memory.
The paper takes the number of encoders from ``C_E : C_D``; here every number is tried, for either
end of the plan's order of devices, and the schedule's own search says which is best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, get_args

from llmpq.assigner.split import stage_memory
from llmpq.costmodel import ClusterCosts
from llmpq.spec.plan import (
    MemoryParts,
    MicroBatching,
    Plan,
    PlanEstimate,
    StageAssignment,
    StageEstimate,
)
from llmpq.spec.precision import Phase
from llmpq.spec.schedule import default_schedule

Sharing = Literal["time", "memory"]
SHARINGS: tuple[Sharing, ...] = get_args(Sharing)
"""By what a phase's layers are shared out: WAA-C by time, WAA-M by memory."""

Cost = Callable[[int, int], float]
"""What layers ``[first, end)`` cost on one device; infinity where they do not fit."""
_NOTHING = StageEstimate(
    prefill_s=0.0,
    decode_s=0.0,
    send_prefill_s=0.0,
    send_decode_s=0.0,
    memory=MemoryParts(weights=0, kv=0, temporary=0, master=0, runtime=0),
    capacity_bytes=0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """How a phase's layers are shared out.

    Attributes:
        plan: whose layers and bits.
        costs: the cost models.
        phase: prefill or decode.
        rows, tokens: the micro-batch whose seconds count.
        by_memory: WAA-M instead of WAA-C.
    """

    plan: Plan
    costs: ClusterCosts
    phase: Phase
    rows: int
    tokens: int
    by_memory: bool

    def cost(self, device: int, rank: int) -> Cost:
        """Return what layers cost on a device that has this rank."""
        plan, costs = self.plan, self.costs
        place = plan.cluster.devices[device]
        alone = replace(plan, micro_batching=MicroBatching(prefill=1, decode=1))
        nothing = StageAssignment(
            rank=rank, device=device, first_layer=0, end_layer=0, bits=(), phase=self.phase
        )
        room = costs.capacity_bytes(place) - stage_memory(alone, costs, nothing).total
        slots, tokens = alone.slots_of(nothing)
        layers = list(zip(costs.model.layer_kinds, plan.bits, strict=True))
        sizes = list(
            accumulate(
                (
                    costs.layer_weight_bytes(place, kind, bits)
                    + costs.layer_kv_bytes(kind, slots, tokens)
                    for kind, bits in layers
                ),
                initial=0,
            )
        )
        seconds = list(
            accumulate(
                (
                    costs.layer_s(place, self.phase, bits, self.rows, self.tokens, kind)
                    for kind, bits in layers
                ),
                initial=0.0,
            )
        )
        fixed_s = costs.master_s(place, self.phase, self.rows, self.tokens) if rank == 0 else 0.0

        def cost(first: int, end: int) -> float:
            size = sizes[end] - sizes[first]
            if size > room:
                return math.inf
            return size / room if self.by_memory else seconds[end] - seconds[first] + fixed_s

        return cost


def split_plans(
    plan: Plan,
    costs: ClusterCosts,
    *,
    prompt: int,
    context: int,
    sharings: Sequence[Sharing] = SHARINGS,
) -> Iterator[Plan]:
    """Yield plans with the layers and bits of ``plan`` and stages of either phase, as they fit.

    Their estimates and schedules are still to be made.

    Args:
        plan: a plan whose stages do both; the devices it left out are used as well.
        costs: the cost models.
        prompt: mean prompt, and
        context: mean context in decode, by which time is shared out.
        sharings: WAA-C, WAA-M, or both.
    """
    own = [stage.device for stage in plan.stages]
    order = [*own, *plan.dropped_devices]
    num_slots, num_layers = plan.workload.batch, plan.model.num_layers
    for count in range(1, len(order)):
        for decoders, encoders in _ends(plan, order, count):
            rows = max(1, num_slots // (len(decoders) + 1))
            for sharing in sharings:
                decode = _Share(
                    plan=plan,
                    costs=costs,
                    phase=Phase.DECODE,
                    rows=rows,
                    tokens=context,
                    by_memory=sharing == "memory",
                )
                encode = replace(decode, phase=Phase.PREFILL, rows=1, tokens=prompt)
                first = len(decoders)
                cuts = (
                    evenly([decode.cost(d, rank) for rank, d in enumerate(decoders)], num_layers),
                    evenly(
                        [encode.cost(d, rank) for rank, d in enumerate(encoders, start=first)],
                        num_layers,
                    ),
                )
                if cuts[0] is not None and cuts[1] is not None:
                    yield _assembled(plan, (decoders, encoders), (cuts[0], cuts[1]))


def _ends(
    plan: Plan, order: Sequence[int], encoders: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield devices that decode and that encode: either end, once where both ends are alike."""
    found = sorted(
        {
            (tuple(order[:-encoders]), tuple(order[-encoders:])),
            (tuple(order[encoders:]), tuple(order[:encoders])),
        }
    )
    alike = set()
    for one in found:
        # Devices of one group are equal, and so are the links between them.
        groups = tuple(tuple(plan.cluster.devices[device].group for device in end) for end in one)
        if groups not in alike:
            alike.add(groups)
            yield one


def evenly(costs: Sequence[Cost], num_layers: int) -> tuple[int, ...] | None:
    """Cut layers into one run a device so that the dearest run costs least.

    Args:
        costs: of each device, in order; a longer run costs no less.
        num_layers: to be cut.

    Returns:
        where the runs begin, and the end of the last; ``None`` when no cut fits.
    """
    if len(costs) > num_layers:
        return None
    best = [0.0, *[math.inf] * num_layers]
    starts: list[list[int]] = []
    for number, cost in enumerate(costs, start=1):
        now, chosen = [math.inf] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(number, num_layers + 1):
            for first in range(end - 1, number - 2, -1):
                own = cost(first, end)
                if own >= now[end]:
                    break  # longer runs cost no less
                value = max(own, best[first])
                if value < now[end]:
                    now[end], chosen[end] = value, first
        best = now
        starts.append(chosen)
    if math.isinf(best[num_layers]):
        return None
    cuts = [num_layers]
    for chosen in reversed(starts):
        cuts.append(chosen[cuts[-1]])
    return tuple(reversed(cuts))


def _assembled(
    plan: Plan,
    devices: tuple[Sequence[int], Sequence[int]],
    cuts: tuple[tuple[int, ...], tuple[int, ...]],
) -> Plan:
    """Return the plan of a split; ranks that decode come first."""
    runs = [
        (phase, device, *run)
        for phase, of_phase, cut in zip((Phase.DECODE, Phase.PREFILL), devices, cuts, strict=True)
        for device, run in zip(of_phase, pairwise(cut), strict=True)
    ]
    stages = tuple(
        StageAssignment(
            rank=rank,
            device=device,
            first_layer=first,
            end_layer=end,
            bits=plan.bits[first:end],
            phase=phase,
        )
        for rank, (phase, device, first, end) in enumerate(runs)
    )
    return replace(
        plan,
        stages=stages,
        dropped_devices=(),
        schedule=default_schedule("waa", plan.workload.batch),
        estimate=PlanEstimate(
            latency_s=0.0,
            quality=plan.estimate.quality,
            objective_s=0.0,
            stages=(_NOTHING,) * len(stages),
        ),
        # The layers are shared out anew: nothing is proven of that.
        search=replace(plan.search, status="feasible", bound_s=None, gap=None),
    )
