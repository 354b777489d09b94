"""The safety margin of a latency bound: a factor on simulated latencies.

It follows from the standard deviation that a latency model states for a shape, as a share of the
layers' seconds; the stage and phase with the largest count. A roofline gives no margin.
"""

from __future__ import annotations

from statistics import NormalDist

from llmpq.assigner.forecast import micro_batches_of
from llmpq.costmodel import ClusterCosts
from llmpq.errors import SpecError
from llmpq.spec.plan import Plan, StageAssignment


def safety_factor(plan: Plan, costs: ClusterCosts, confidence: float) -> float:
    """Return the factor on simulated latencies, at least 1.

    ``confidence`` is the probability of keeping the bound, with normal errors of the stated
    deviation; 0.5 for no margin.

    Raises:
        SpecError: ``confidence`` is not in [0.5, 1).
    """
    if not 0.5 <= confidence < 1.0:
        raise SpecError(f"bound confidence: found {confidence:g}, expected 0.5 to less than 1")
    if confidence == 0.5:
        return 1.0
    deviation = max((_deviation(plan, costs, stage) for stage in plan.stages), default=0.0)
    return 1.0 + NormalDist().inv_cdf(confidence) * deviation


def _deviation(plan: Plan, costs: ClusterCosts, stage: StageAssignment) -> float:
    """Return one standard deviation of a stage's seconds, relative to them."""
    device = plan.device_of(stage)
    if costs.latency_source(device) == "roofline" or not stage.num_layers:
        return 0.0
    kinds = costs.model.layer_kinds[stage.first_layer : stage.end_layer]
    layers = set(zip(kinds, stage.bits, strict=True))
    return max(
        (
            costs.layer_estimate(device, phase, bits, rows, round(tokens), kind).relative_deviation
            for phase, rows, tokens in micro_batches_of(plan)
            if stage.computes(phase)
            for kind, bits in layers
        ),
        default=0.0,
    )
