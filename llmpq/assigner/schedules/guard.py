"""The guard of a latency bound: how much below it a schedule is to stay when played.

A forecast is a mean: half of all runs are slower. What the tables state of themselves says by how
much: one standard deviation of a shape that was not measured, or was measured with noise, and of
the machine's speed from one moment to the next (``drift``). Both are of layers' seconds, and a
pipeline's latency grows no faster than these. The least sure stage and phase counts. A roofline is
a guess and no measurement: it guards nothing.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from llmpq.costmodel import ClusterCosts
from llmpq.errors import SpecError
from llmpq.spec.plan import Plan, StageAssignment
from llmpq.spec.precision import Phase


def guard_of(plan: Plan, costs: ClusterCosts, confidence: float) -> float:
    """Return the factor by which played latencies count, at least 1.

    Args:
        plan: with the micro-batches that are played.
        costs: the cost models of its cluster.
        confidence: how likely the bound is to be kept, as far as the tables know themselves: their
            errors are taken as normal. At 0.5 they are taken at their word.

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
    """Return one standard deviation of a stage's seconds, as a share of them."""
    device = plan.device_of(stage)
    if costs.latency_source(device) == "roofline" or not stage.num_layers:
        return 0.0
    work, sizes = plan.workload, plan.micro_batching
    asked = [
        (Phase.PREFILL, sizes.prefill, work.prompt_tokens),
        (Phase.DECODE, sizes.decode, round(work.mean_context_tokens)),
    ]
    kinds = costs.model.layer_kinds[stage.first_layer : stage.end_layer]
    layers = set(zip(kinds, stage.bits, strict=True))
    shapes = max(
        (
            costs.layer_estimate(device, phase, bits, batch, tokens, kind).relative_deviation
            for phase, batch, tokens in asked
            if stage.computes(phase)
            for kind, bits in layers
        ),
        default=0.0,
    )
    return math.hypot(shapes, costs.drift_share(device))
