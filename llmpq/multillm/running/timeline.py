"""Timeline of a run: when replicas loaded, answered and ended, and which stage was when."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llmpq.multillm.schedule import ModelReplica


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
