"""Which models run next, when a model finishes; the order of finishing may differ from the plan's.

SamuLLM, Sec. 4.3: when a model of stage E1 finishes, the next stage E2 is considered. An unfinished
model of E1 goes on if E1 is its last stage or if E2 has it with the same plan. Otherwise E2's
models are placed first, and it goes on only where devices are left. A stage is considered only
once all models of the stage before run or are finished.

Devices of one group are interchangeable: a replica takes those on which its weights are, then those
of the schedule, then any. Pure: no clock, no processes. Simulation and run share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from llmpq.multillm.graph import Application
from llmpq.multillm.schedule import ApplicationSchedule, ModelReplica, ScheduledModel
from llmpq.spec.cluster import Cluster

Placed = tuple[str, ModelReplica]
"""A model and one of its replicas, on the devices that it really has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What to do: stop replicas, then start others.

    Attributes:
        stage: number of the stage that is now run.
        stop: replicas that end; their unfinished requests go back to the queue of the model.
        start: replicas that load; the devices are free once ``stop`` is done.
        nodes: for every model that runs then, the nodes whose requests it answers.
    """

    stage: int
    stop: tuple[Placed, ...] = ()
    start: tuple[Placed, ...] = ()
    nodes: Mapping[str, tuple[str, ...]]


class DynamicScheduler:
    """Decides which models run, from the schedule and the nodes that are finished.

    Args:
        app: the application.
        schedule: of the application on the cluster, checked.
        cluster: its devices.
        finished: nodes that are finished at the begin, such as by an earlier run.

    Attributes:
        stage: number of the stage that is now run.
        running: every model that runs now, with its devices.
        finished: nodes without unfinished requests.
    """

    def __init__(
        self,
        app: Application,
        schedule: ApplicationSchedule,
        cluster: Cluster,
        finished: Iterable[str] = (),
    ) -> None:
        self.stage = 0
        self.running: dict[str, ScheduledModel] = {}
        self.finished = set(finished)
        self._order = app.order
        self._stages = schedule.stages
        self._groups = {device.label: device.group for device in cluster.devices}
        self._pending: list[ScheduledModel] = []
        self._until_finished: set[str] = set()
        self._before: tuple[Placed, ...] = ()

    def begin(self) -> Change:
        """Return what to start first."""
        self._pending = self._unfinished(self._stages[0].models)
        self._place_pending()
        self._advance(is_event=False)
        return self._change()

    def finish(self, nodes: Iterable[str]) -> Change:
        """Return what changes when nodes have no unfinished request left."""
        self.finished |= set(nodes)
        is_event = False
        for name, one in list(self.running.items()):
            if not self._left(one):
                is_event = True
                del self.running[name]
                self._until_finished.discard(name)
        self._pending = self._unfinished(self._pending)
        self._place_pending()
        self._advance(is_event=is_event)
        return self._change()

    def stalled(self) -> Change:
        """Return what to run when no running model has a request, though nodes are unfinished.

        All unfinished nodes run by the last plans that the schedule has for them, producers first.
        """
        self.stage = len(self._stages) - 1
        self.running.clear()
        self._until_finished.clear()
        last: dict[str, ScheduledModel] = {}
        for stage in self._stages:
            last.update((node, one) for one in stage.models for node in one.nodes)
        self._pending = [
            replace(last[node], nodes=(node,)) for node in self._order if node not in self.finished
        ]
        self._place_pending()
        self._until_finished.update(self.running)
        return self._change()

    def _advance(self, *, is_event: bool) -> None:
        """Go on to later stages, as long as the current one is placed and has a finished model."""
        while not self._pending and self.stage + 1 < len(self._stages):
            ended = any(not self._left(one) for one in self._stages[self.stage].models)
            if not (ended or is_event):
                return
            is_event = False
            self._next_stage()

    def _next_stage(self) -> None:
        self.stage += 1
        wanted = {one.model: one for one in self._unfinished(self._stages[self.stage].models)}
        later = {
            node
            for stage in self._stages[self.stage :]
            for one in stage.models
            for node in one.nodes
        }
        kept: dict[str, ScheduledModel] = {}
        others: list[ScheduledModel] = []
        for name, one in self.running.items():
            if not self._left(one) <= later:  # the stage before was its last
                self._until_finished.add(name)
            goes_on = name in wanted and self._same_plans(one, wanted[name])
            if goes_on and name in self._until_finished:
                kept[name] = _with_nodes(one, wanted.pop(name).nodes)
            elif goes_on:
                kept[name] = replace(wanted.pop(name), replicas=one.replicas)
            elif name in self._until_finished:
                kept[name] = one
            else:
                others.append(one)
        self.running = kept
        self._pending = list(wanted.values())
        self._place_pending()
        for one in others:
            if one.model not in self.running and self._is_free(one.devices):
                self.running[one.model] = one

    def _place_pending(self) -> None:
        """Place what can be placed; the rest waits for devices."""
        waiting: list[ScheduledModel] = []
        for one in self._pending:
            own = self.running.get(one.model)
            if own is not None and self._same_plans(own, one):
                self.running[one.model] = _with_nodes(own, one.nodes)
            elif one.model in self._until_finished:
                waiting.append(one)
            elif (replicas := self._placed(one)) is not None:
                self.running[one.model] = replace(one, replicas=replicas)
            else:
                waiting.append(one)
        self._pending = waiting

    def _placed(self, one: ScheduledModel) -> tuple[ModelReplica, ...] | None:
        """Return the replicas on free devices, ``None`` if there are too few.

        The devices on which the model runs now are free for it.
        """
        others = [other for name, other in self.running.items() if name != one.model]
        taken = {label for other in others for label in other.devices}
        free = [label for label in self._groups if label not in taken]
        loaded = [replica for name, replica in self._before if name == one.model]
        placed: dict[int, ModelReplica] = {}
        for place, replica in enumerate(one.replicas):  # first, where the weights are
            for other in loaded:
                if self._plan_key(other) == self._plan_key(replica) and _holds(free, other.devices):
                    placed[place] = other
                    loaded.remove(other)
                    free = [label for label in free if label not in other.devices]
                    break
        for place, replica in enumerate(one.replicas):
            if place not in placed:
                devices = self._any_devices(replica.devices, free)
                if devices is None:
                    return None
                placed[place] = replace(replica, devices=devices)
                free = [label for label in free if label not in devices]
        return tuple(placed[place] for place in range(len(one.replicas)))

    def _any_devices(self, wanted: Sequence[str], free: Sequence[str]) -> tuple[str, ...] | None:
        """Return free devices of the groups of the wanted ones, those themselves if possible."""
        if _holds(free, wanted):
            return tuple(wanted)
        left, found = list(free), list[str]()
        for label in wanted:
            near = [name for name in left if self._groups[name] == self._groups[label]]
            if not near:
                return None
            found.append(label if label in near else near[0])
            left.remove(found[-1])
        return tuple(found)

    def _is_free(self, devices: Iterable[str]) -> bool:
        taken = {label for one in self.running.values() for label in one.devices}
        return not taken & set(devices)

    def _same_plans(self, first: ScheduledModel, second: ScheduledModel) -> bool:
        """Whether two entries of a model have the same plans on devices of the same groups."""
        one, other = (Counter(map(self._plan_key, one.replicas)) for one in (first, second))
        return one == other

    def _plan_key(self, replica: ModelReplica) -> tuple[object, tuple[int, ...]]:
        return replica.source, tuple(self._groups[label] for label in replica.devices)

    def _left(self, one: ScheduledModel) -> set[str]:
        return set(one.nodes) - self.finished

    def _unfinished(self, models: Iterable[ScheduledModel]) -> list[ScheduledModel]:
        return [one for one in models if self._left(one)]

    def _change(self) -> Change:
        """Return the difference to the last change."""
        now = tuple((name, one) for name, model in self.running.items() for one in model.replicas)
        before, self._before = self._before, now
        return Change(
            stage=self.stage,
            stop=tuple(one for one in before if one not in now),
            start=tuple(one for one in now if one not in before),
            nodes={name: one.nodes for name, one in self.running.items()},
        )


def _with_nodes(one: ScheduledModel, nodes: Iterable[str]) -> ScheduledModel:
    return replace(one, nodes=tuple(dict.fromkeys((*one.nodes, *nodes))))


def _holds(free: Sequence[str], devices: Iterable[str]) -> bool:
    return set(devices) <= set(free)
