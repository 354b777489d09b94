"""What the page shows of the plan and its ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmpq.dist.io.generation import EngineClient
from llmpq.dist.metrics.progress import Event, RunProgress, SilentProgress
from llmpq.spec.plan import Plan

IDLE_S = 3.0
"""A stage that reports nothing for so long is idle: busy ones report every second."""


@dataclass(slots=True)
class _Report:
    """Counters of a stage since its start, in milliseconds; and the share between the last two."""

    busy_ms: int
    elapsed_ms: int
    share: float
    time_s: float


class PlanView:
    """The plan as the page draws it, and the share of time in which each stage computes.

    Receives the events of the ranks, as ``RunProgress``.

    Args:
        plan: ``None`` where the server does not know it.
        clock: seconds.
        then: receives the events too.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        then: RunProgress | None = None,
    ) -> None:
        self._then = then or SilentProgress()
        self.model_name = "" if plan is None else plan.model.name
        self._plan: dict[str, Any] | None = None
        self._clock = clock
        self._reports: dict[int, _Report] = {}
        self._lock = threading.Lock()  # events come from the thread that watches the ranks
        if plan is not None:
            self.show(plan)

    def show(self, plan: Plan) -> None:
        """Show this plan from now on."""
        with self._lock:
            self._plan = describe_plan(plan)
            self._reports.clear()

    def report(self, event: Event) -> None:
        """Take an event; those of other kinds say nothing of the load."""
        self._then.report(event)
        if event.kind != "busy":
            return
        with self._lock:
            before = self._reports.get(event.rank)
            busy, elapsed = event.done, event.total
            if before is not None and before.elapsed_ms <= elapsed:  # else the rank was restarted
                busy, elapsed = busy - before.busy_ms, elapsed - before.elapsed_ms
            share = min(1.0, max(0.0, busy / elapsed)) if elapsed > 0 else 0.0
            self._reports[event.rank] = _Report(event.done, event.total, share, self._clock())

    def busy(self, rank: int) -> float | None:
        """Return the share of a stage, 0 to 1; ``None`` for one that has never reported.

        A lone stage sends nothing to others and reports nothing.
        """
        with self._lock:
            found = self._reports.get(rank)
        if found is None:
            return None
        return found.share if self._clock() - found.time_s < IDLE_S else 0.0

    def to_json(self, engine: EngineClient) -> dict[str, Any]:
        """Return the answer of ``/server_info``: plan, load of the stages, counters."""
        stats, plan = engine.stats, self._plan
        if plan is not None:
            stages = [{**one, "busy": self.busy(one["rank"])} for one in plan["stages"]]
            plan = {**plan, "stages": stages}
        return {
            "max_model_len": engine.max_model_len,
            "plan": plan,
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_cache_usage": stats.kv_cache_usage,
        }


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return the stages of a plan.

    ``bits`` has one entry a layer; bytes are those the plan reserves, and those of the device.
    """
    return {
        "model": plan.model.name,
        "kv_bits": plan.kv_bits,
        "stages": [
            {
                "rank": stage.rank,
                "device": plan.device_of(stage).label,
                "type": plan.device_of(stage).type,
                "node": plan.device_of(stage).node,
                "phase": None if stage.phase is None else stage.phase.value,
                "first_layer": stage.first_layer,
                "bits": list(stage.bits),
                "memory_bytes": estimate.memory.total,
                "capacity_bytes": estimate.capacity_bytes,
            }
            for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True)
        ],
    }
