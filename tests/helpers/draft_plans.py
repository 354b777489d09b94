"""Plans with a draft model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from helpers.ranks import cpu_cluster

from llmpq.spec.plan import Plan, PlannedDraft


def with_draft(plan: Plan, model: Path | str, *, device: int, tokens: int = 3) -> Plan:
    """Return a plan whose draft model runs on a device."""
    draft = PlannedDraft(
        model=str(model),
        num_speculative_tokens=tokens,
        device=device,
        acceptance_rate=0.7,
        cost=0.2,
        handover=None if device == plan.stages[0].device else 0.05,
        speedup=1.5,
        memory_bytes=7,
    )
    return replace(plan, draft=draft)


def with_idle_device(plan: Plan) -> Plan:
    """Return a plan of CPU stages with one more device, the last one."""
    count = len(plan.cluster.devices)
    return replace(plan, cluster=cpu_cluster(count + 1), dropped_devices=(count,))
