"""Report of a run, beside what the schedule predicted; and the time that is left while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmpq.multillm.running.timeline import StageRecord, Timeline
from llmpq.multillm.schedule import ApplicationSchedule, ScheduledModel


def build_report(
    schedule: ApplicationSchedule,
    timeline: Timeline,
    *,
    num_devices: int,
    requests: Mapping[str, int],
    errors: Mapping[str, str],
) -> dict[str, Any]:
    """Return the JSON object of a run.

    Args:
        schedule: that was run.
        timeline: of the run, which has ended.
        num_devices: of the cluster.
        requests: answered requests by node, those of earlier runs included.
        errors: messages of requests that could not be asked, by name.
    """
    return {
        "status": "errors" if errors else "done",
        "application": schedule.application,
        "method": schedule.method,
        "makespan_s": {"predicted": schedule.makespan_s, "measured": timeline.makespan_s},
        "idle_s": timeline.idle_s(num_devices),
        "predicted_idle_s": schedule.idle_s,
        "search_s": schedule.search_s,
        "requests": dict(requests),
        "errors": dict(errors),
        "generated_tokens": timeline.tokens,
        "stages": [_stage(one) for one in timeline.stages],
        "predicted_stages": [
            {
                "start_s": stage.start_s,
                "end_s": stage.end_s,
                "models": [_shown(one) for one in stage.models],
            }
            for stage in schedule.stages
        ],
        "replicas": [
            {
                "model": one.model,
                "plan": one.plan,
                "devices": list(one.devices),
                "start_s": one.start_s,
                "load_s": None if one.ready_s is None else one.ready_s - one.start_s,
                "ready_s": one.ready_s,
                "stop_s": one.stop_s,
                "end_s": one.end_s,
                "busy_s": one.busy_s,
                "requests": dict(one.requests),
            }
            for one in timeline.replicas
        ],
    }


def _shown(one: ScheduledModel) -> dict[str, Any]:
    return {
        "model": one.model,
        "plan": one.plan_name,
        "devices": list(one.devices),
        "requests": sum(count for _, count in one.requests),
        "nodes": dict(one.requests),
    }


def _stage(record: StageRecord) -> dict[str, Any]:
    models = []
    for model, replicas in record.replicas.items():
        found = {node: count for (name, node), count in record.requests.items() if name == model}
        one = ScheduledModel(
            model=model, nodes=("",), replicas=tuple(replicas), requests=tuple(found.items())
        )
        models.append(_shown(one))
    return {
        "stage": record.stage,
        "start_s": record.start_s,
        "end_s": record.end_s,
        "models": models,
    }


def time_left_s(schedule: ApplicationSchedule, done: Mapping[str, int]) -> float:
    """Return the predicted seconds from what is done to the end.

    Every node is as far as the schedule has it at the time when as many of its requests are
    finished; the slowest one counts.

    Args:
        schedule: with predicted requests.
        done: finished requests by node.
    """
    left_s = 0.0
    for node, count in done.items():
        reached_s = end_s = 0.0
        before = 0
        for stage in schedule.stages:
            planned = sum(dict(one.requests).get(node, 0) for one in stage.models)
            if not planned:
                continue
            end_s = stage.end_s
            share = min(1.0, max(0.0, (count - before) / planned))
            if share > 0:
                reached_s = stage.start_s + share * (stage.end_s - stage.start_s)
            before += planned
        if count < before:
            left_s = max(left_s, end_s - reached_s)
    return left_s
