"""How far a plan's forecast can be trusted: what it rests on, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmpq.costmodel import ClusterCosts
from llmpq.costmodel.importers.import_table import HINT, is_installed, is_known
from llmpq.spec.plan import Plan
from llmpq.spec.precision import Phase

_NOT_COVERED = "mixed lengths in a batch, other work on these devices, other versions of software"
_SUMMED_KERNELS = "aiconfigurator's engine stands for ours, and the gaps between its kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTrust:
    """What one phase of one stage rests on.

    Attributes:
        rank: of the stage.
        device: its label.
        phase: prefill or decode.
        source: where its seconds come from.
        deviation: one standard deviation of its layers' seconds, as a share of them.
        outside: shapes ``(bits, batch, tokens)`` that lie outside what was measured.
    """

    rank: int
    device: str
    phase: Phase
    source: str
    deviation: float
    outside: tuple[tuple[int, int, int], ...]


def plan_trust(plan: Plan, costs: ClusterCosts) -> tuple[StageTrust, ...]:
    """Return how far each stage's seconds can be trusted, ``costs`` being of the plan's cluster."""
    work, micro = plan.workload, plan.micro_batching
    asked: list[tuple[Phase, int, tuple[int, ...]]] = [
        (Phase.PREFILL, micro.prefill, (work.prompt_tokens,))
    ]
    last = work.prompt_tokens + work.new_tokens - 1
    if work.new_tokens > 1:
        asked.append((Phase.DECODE, micro.decode, (work.prompt_tokens + 1, last)))
    found = []
    for stage in plan.stages:
        device = plan.device_of(stage)
        for phase, batch, lengths in asked if stage.num_layers else ():
            estimates = {
                (bits, batch, tokens): costs.layer_estimate(device, phase, bits, batch, tokens, 0)
                for bits in sorted(set(stage.bits))
                for tokens in lengths
            }
            found.append(
                StageTrust(
                    rank=stage.rank,
                    device=device.label,
                    phase=phase,
                    source=costs.latency_source(device),
                    deviation=max(one.relative_deviation for one in estimates.values()),
                    outside=tuple(shape for shape, one in estimates.items() if one.is_extrapolated),
                )
            )
    return tuple(found)


def trust_record(found: Sequence[StageTrust]) -> list[dict[str, Any]]:
    """Return the records of ``--json``."""
    return [
        {
            "rank": one.rank,
            "phase": one.phase.value,
            "source": one.source,
            "relative_deviation": one.deviation,
            "is_extrapolated": bool(one.outside),
        }
        for one in found
    ]


def trust_text(plan: Plan, found: Sequence[StageTrust]) -> list[str]:
    """Return lines for people: the least sure phase, what is extrapolated, and the remedy."""
    if not found:
        return []
    worst = max(found, key=lambda one: one.deviation)
    uncovered = [_NOT_COVERED]
    if any("aiconfigurator" in one.source for one in found):
        uncovered.insert(0, _SUMMED_KERNELS)
    lines = [
        f"sureness       layers' seconds within {worst.deviation:.0%} two times in three "
        f"(least sure: {worst.phase.value} of {worst.device}, {worst.source})",
        f"not covered    {'; '.join(uncovered)}",
    ]
    guessed = {one.device: one for one in found if one.outside and one.source != "roofline"}
    for one in guessed.values():
        bits, batch, tokens = one.outside[-1]
        lines.append(
            f"extrapolated   {one.device}: {one.phase.value} of {batch} x {tokens} tokens at "
            f"{bits} bits lies outside {one.source}; measure nearer with llmpq-profile layer"
        )
    types = {plan.device_of(stage).type for stage in plan.stages}
    guessing = any(one.source == "roofline" for one in found)
    if guessing and not is_installed() and any(is_known(name) for name in types):
        lines.append(f"hint           {HINT}")
    return lines
