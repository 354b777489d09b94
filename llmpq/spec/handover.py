"""Handovers: which keys and values go from the rank that prefilled them to the one that decodes.

Only where either phase has stages of its own (WAA). The two partitions of the layers may differ,
so what one prefill stage makes may belong to several decode stages, and the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.spec.plan import Plan
from llmpq.spec.precision import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The layers whose keys and values go from one rank to another.

    Attributes:
        source: rank that prefills them.
        target: rank that decodes them.
        first_layer, end_layer: half-open range.
    """

    source: int
    target: int
    first_layer: int
    end_layer: int


def handovers_of(plan: Plan) -> tuple[Handover, ...]:
    """Return every handover of a plan, by source and then by layer; none when phases share stages.

    Together they name every layer once.
    """
    if not plan.is_split:
        return ()
    return tuple(
        Handover(source=made.rank, target=held.rank, first_layer=first, end_layer=end)
        for made in plan.stages_of(Phase.PREFILL)
        for held in plan.stages_of(Phase.DECODE)
        if (first := max(made.first_layer, held.first_layer))
        < (end := min(made.end_layer, held.end_layer))
    )
