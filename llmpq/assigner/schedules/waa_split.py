"""WAA's split: which devices encode, which decode, and which layers each holds. Experimental.

ExeGPT, Sec. 4.1. WAA-C gives every device of a phase an equal share of its time, WAA-M an equal
share of its memory. The paper takes the number of encoders from ``C_E : C_D``; here every number is
tried, at either end of the plan's device order, and the schedule search chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, get_args

from llmpq.assigner.plan_estimate import empty_estimate, stage_memory
from llmpq.costmodel import ClusterCosts
from llmpq.spec.plan import MicroBatching, Plan, StageAssignment
from llmpq.spec.precision import Phase
from llmpq.spec.schedule import default_schedule

Balance = Literal["time", "memory"]
BALANCES: tuple[Balance, ...] = get_args(Balance)
"""What a phase's devices share equally: time (WAA-C) or memory (WAA-M)."""

RangeCost = Callable[[int, int], float]
"""Cost of layers ``[first, end)`` on one device; infinity where they do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PhaseCosts:
    """Costs of layer ranges in one phase, by memory (WAA-M) or by a micro-batch's time (WAA-C)."""

    plan: Plan
    costs: ClusterCosts
    phase: Phase
    rows: int
    tokens: int
    by_memory: bool

    def cuts(self, devices: Sequence[int], first_rank: int) -> tuple[int, ...] | None:
        """Return the balanced ranges of the layers on devices of these ranks."""
        costs = [self._of_device(item, rank) for rank, item in enumerate(devices, start=first_rank)]
        return balanced_cuts(costs, self.plan.model.num_layers)

    def _of_device(self, device: int, rank: int) -> RangeCost:
        plan, costs = self.plan, self.costs
        place = plan.cluster.devices[device]
        smallest = replace(plan, micro_batching=MicroBatching(prefill=1, decode=1))
        stage = StageAssignment(
            rank=rank, device=device, first_layer=0, end_layer=0, bits=(), phase=self.phase
        )
        room = costs.capacity_bytes(place) - stage_memory(smallest, costs, stage).total
        slots, tokens = smallest.slots_of(stage)
        layers = list(zip(costs.model.layer_kinds, plan.bits, strict=True))
        layer_bytes = (
            costs.layer_weight_bytes(place, kind, bits) + costs.layer_kv_bytes(kind, slots, tokens)
            for kind, bits in layers
        )
        layer_s = (
            costs.layer_s(place, self.phase, bits, self.rows, self.tokens, kind)
            for kind, bits in layers
        )
        sizes = list(accumulate(layer_bytes, initial=0))
        seconds = list(accumulate(layer_s, initial=0.0))
        master_s = costs.master_s(place, self.phase, self.rows, self.tokens) if rank == 0 else 0.0

        def cost(first: int, end: int) -> float:
            size = sizes[end] - sizes[first]
            if size > room:
                return math.inf
            return size / room if self.by_memory else seconds[end] - seconds[first] + master_s

        return cost


def split_plans(
    plan: Plan,
    costs: ClusterCosts,
    *,
    prompt: int,
    context: int,
    balances: Sequence[Balance] = BALANCES,
) -> Iterator[Plan]:
    """Yield plans with the layers and bits of ``plan`` and separate stages per phase, as they fit.

    They use the devices that ``plan`` left out as well, and have no estimate and no searched
    schedule yet. Times are balanced for a mean ``prompt`` and a mean ``context`` in decode.
    """
    order = [*(stage.device for stage in plan.stages), *plan.dropped_devices]
    for count in range(1, len(order)):
        for decoders, encoders in _ends(plan, order, count):
            for balance in balances:
                decode = _PhaseCosts(
                    plan=plan,
                    costs=costs,
                    phase=Phase.DECODE,
                    rows=max(1, plan.workload.batch // (len(decoders) + 1)),
                    tokens=context,
                    by_memory=balance == "memory",
                )
                encode = replace(decode, phase=Phase.PREFILL, rows=1, tokens=prompt)
                cuts = decode.cuts(decoders, 0), encode.cuts(encoders, len(decoders))
                if cuts[0] is not None and cuts[1] is not None:
                    yield _assembled(plan, (decoders, encoders), (cuts[0], cuts[1]))


def _ends(
    plan: Plan, order: Sequence[int], encoders: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield devices that decode and that encode: either end, once where both ends are equal."""
    found = sorted(
        {
            (tuple(order[:-encoders]), tuple(order[-encoders:])),
            (tuple(order[encoders:]), tuple(order[:encoders])),
        }
    )
    seen = set()
    for ends in found:
        # Devices of one group are equal, and so are the links between them.
        groups = tuple(tuple(plan.cluster.devices[device].group for device in end) for end in ends)
        if groups not in seen:
            seen.add(groups)
            yield ends


def balanced_cuts(costs: Sequence[RangeCost], num_layers: int) -> tuple[int, ...] | None:
    """Cut layers into one range a device so that the largest cost is least (dynamic programming).

    A longer range costs no less. Returns where the ranges begin, and the end of the last; ``None``
    when no cut fits.
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
                    break  # longer ranges cost no less
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
    ranges = [
        (phase, device, first, end)
        for phase, of_phase, cut in zip((Phase.DECODE, Phase.PREFILL), devices, cuts, strict=True)
        for device, (first, end) in zip(of_phase, pairwise(cut), strict=True)
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
        for rank, (phase, device, first, end) in enumerate(ranges)
    )
    return replace(
        plan,
        stages=stages,
        dropped_devices=(),
        schedule=default_schedule("waa", plan.workload.batch),
        estimate=empty_estimate(len(stages), quality=plan.estimate.quality),
        search=replace(plan.search, status="feasible", bound_s=None, gap=None),
    )
