"""Timeline of a run, beside what the schedule predicted, and the time that is left.

The timeline states when replicas loaded, answered and ended, and which stage was when.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmpq.multillm.schedule import ApplicationSchedule, ModelReplica, ScheduledModel


@dataclass(slots=True, kw_only=True)
class ReplicaRecord:
    """One replica from its start to its end, in seconds of the run; ``None``: not yet.

    Attributes:
        plan: its plan in a word.
        ready_s: loaded.
        stop_s: it began to end.
        end_s: its devices are free.
        busy_s: seconds with a request.
        requests: finished requests by node.
    """

    model: str
    devices: tuple[str, ...]
    plan: str
    start_s: float
    ready_s: float | None = None
    stop_s: float | None = None
    end_s: float | None = None
    busy_s: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    _busy_since_s: float | None = None
    _under_way: int = 0

    def begin_request(self, now_s: float) -> None:
        """Note that a request begins."""
        if not self._under_way:
            self._busy_since_s = now_s
        self._under_way += 1

    def end_request(self, now_s: float, node: str | None) -> None:
        """Note that a request ends; ``node`` is ``None`` if it is not finished."""
        self._under_way -= 1
        if node is not None:
            self.requests[node] += 1
        if not self._under_way and self._busy_since_s is not None:
            self.busy_s += now_s - self._busy_since_s
            self._busy_since_s = None

    def idle_s(self, makespan_s: float) -> float:
        """Return the seconds in which it was loaded and had no request."""
        if self.ready_s is None:
            return 0.0
        end_s = makespan_s if self.stop_s is None else min(self.stop_s, makespan_s)
        return max(0.0, end_s - self.ready_s - self.busy_s)


@dataclass(slots=True, kw_only=True)
class StageRecord:
    """The models that ran from one change to the next.

    Attributes:
        stage: number of the planned stage.
        replicas: of every model, at the begin.
        requests: finished requests by model and node.
    """

    stage: int
    start_s: float
    end_s: float | None = None
    replicas: Mapping[str, Sequence[ModelReplica]]
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)


class Timeline:
    """Records a run as it goes.

    Args:
        clock: seconds; the run begins with the object.

    Attributes:
        replicas: all that were started, in that order.
        stages: in order of time.
        tokens: new tokens of finished requests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.replicas: list[ReplicaRecord] = []
        self.stages: list[StageRecord] = []
        self.tokens = 0
        self._clock = clock
        self._start_s = clock()

    def now_s(self) -> float:
        """Return the seconds since the begin."""
        return self._clock() - self._start_s

    def begin_stage(self, stage: int, replicas: Mapping[str, Sequence[ModelReplica]]) -> None:
        """Note that other models run from now on."""
        now_s = self.now_s()
        if self.stages:
            self.stages[-1].end_s = now_s
        self.stages.append(StageRecord(stage=stage, start_s=now_s, replicas=replicas))

    def begin_replica(self, model: str, replica: ModelReplica) -> ReplicaRecord:
        """Note that a replica is started."""
        record = ReplicaRecord(
            model=model, devices=replica.devices, plan=replica.name, start_s=self.now_s()
        )
        self.replicas.append(record)
        return record

    def finish_request(self, record: ReplicaRecord, node: str, tokens: int) -> None:
        """Note that a request of a replica is answered."""
        record.end_request(self.now_s(), node)
        self.stages[-1].requests[record.model, node] += 1
        self.tokens += tokens

    def end(self) -> None:
        """Note the end of the run."""
        if self.stages:
            self.stages[-1].end_s = self.now_s()

    @property
    def makespan_s(self) -> float:
        """Seconds to the end of the last stage."""
        last = self.stages[-1].end_s if self.stages else None
        return self.now_s() if last is None else last

    def idle_s(self, num_devices: int) -> float:
        """Return the device-seconds without a model or without a request; loading is not idle."""
        makespan_s = self.makespan_s
        held_s = waiting_s = 0.0
        for one in self.replicas:
            end_s = makespan_s if one.end_s is None else min(one.end_s, makespan_s)
            held_s += len(one.devices) * max(0.0, end_s - one.start_s)
            waiting_s += len(one.devices) * one.idle_s(makespan_s)
        return max(0.0, num_devices * makespan_s - held_s) + waiting_s


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
