"""Schedules of applications as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmpq.assigner.objective import relative_gap
from llmpq.cli.planning.fleet import devices_text
from llmpq.cli.render import aligned
from llmpq.multillm.schedule import ApplicationSchedule, ScheduledModel


def schedule_record(
    schedule: ApplicationSchedule, others: Mapping[str, float], *, is_optimal: bool = False
) -> dict[str, Any]:
    """Return the JSON object of a schedule; ``others`` has the makespans of other methods."""
    bound = schedule.bound_s
    return {
        "application": schedule.application,
        "cluster": schedule.cluster,
        "method": schedule.method,
        "makespan_s": {"predicted": schedule.makespan_s, "measured": None},
        "idle_s": schedule.idle_s,
        "bound_s": bound,
        "gap": None if bound is None else relative_gap(schedule.makespan_s, bound),
        "is_optimal": is_optimal,
        "stages": [
            {
                "start_s": stage.start_s,
                "end_s": stage.end_s,
                "models": [
                    {
                        "model": one.model,
                        "plan": one.plan_name,
                        "devices": list(one.devices),
                        "requests": requests_of(one),
                        "load_s": one.load_s,
                    }
                    for one in stage.models
                ],
            }
            for stage in schedule.stages
        ],
        "search_s": schedule.search_s,
        "others_s": dict(others),
    }


def requests_of(one: ScheduledModel) -> int:
    """Return the requests that are finished in a stage."""
    return sum(count for _, count in one.requests)


def schedule_table(
    schedule: ApplicationSchedule, others: Mapping[str, float], *, is_optimal: bool = False
) -> str:
    """Return a schedule as text: one row for each model of each stage."""
    rows = [("stage", "from s", "to s", "model", "plan", "devices", "load s", "requests")]
    for number, stage in enumerate(schedule.stages, start=1):
        for place, one in enumerate(stage.models):
            first = (str(number), f"{stage.start_s:.1f}", f"{stage.end_s:.1f}")
            rows.append(
                (
                    *(first if not place else ("", "", "")),
                    one.model,
                    one.plan_name,
                    devices_text(one.devices),
                    f"{one.load_s:.1f}" if one.load_s else "",
                    str(requests_of(one)),
                )
            )
    return "\n".join(
        [
            f"{schedule.application} on {schedule.cluster}",
            "",
            *aligned(rows),
            "",
            *_totals(schedule, others, is_optimal=is_optimal),
        ]
    )


def _totals(
    schedule: ApplicationSchedule, others: Mapping[str, float], *, is_optimal: bool
) -> list[str]:
    bound = schedule.bound_s
    proof = ""
    if is_optimal:
        proof = ", the best of all schedules"
    elif bound is not None:
        gap = relative_gap(schedule.makespan_s, bound)
        proof = f", no schedule takes less than {bound:.1f} s ({gap:.0%} less)"
    lines = [f"makespan       {schedule.makespan_s:.1f} s{proof}"]
    if others:
        text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in others.items())
        lines.append(f"by method      {text}")
    if schedule.idle_s is not None:
        lines.append(f"idle           {schedule.idle_s:.1f} device-seconds")
    lines.append(f"search         {schedule.search_s:.1f} s")
    return lines
