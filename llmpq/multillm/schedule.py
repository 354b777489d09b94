"""Application schedules: which models run in which stage, on which devices, by which plans.

A schedule file is written by the planner and read by the run. A stage ends when one of its models
has answered all its requests (SamuLLM, Sec. 4.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from llmpq.errors import SpecError
from llmpq.multillm.graph import MAX_DEGREE, Application
from llmpq.spec.cluster import Cluster
from llmpq.spec.fields import (
    SCHEMA,
    Fields,
    Rule,
    digest_of,
    dump_json,
    from_json,
    read_json,
    to_json,
    write_text,
)
from llmpq.spec.plan import Plan, Provenance, read_plan

TIME_TOLERANCE = 1e-6
"""Relative difference by which a stage may begin before the end of the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReplica:
    """One copy of a model on devices of its own; exactly one of the three plans.

    Attributes:
        devices: labels of the cluster's devices, in the order of the plan's cluster.
        strategy: path of a strategy file, relative to the schedule file.
        plan: the strategy itself.
        tensor_parallel: devices that share every layer; for engines that are only simulated.
    """

    devices: Annotated[tuple[str, ...], Rule(minimum=1)]
    strategy: str | None = None
    plan: Plan | None = None
    tensor_parallel: Annotated[int | None, Rule(minimum=1, maximum=MAX_DEGREE)] = None

    def __post_init__(self) -> None:
        given = [
            name
            for name in ("strategy", "plan", "tensor_parallel")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise _bad(
                "replicas[]",
                " and ".join(given) or "no plan",
                "one of strategy, plan, tensor_parallel",
            )
        if self.tensor_parallel is not None and len(self.devices) != self.tensor_parallel:
            raise _bad("replicas[].devices", list(self.devices), f"{self.tensor_parallel} devices")
        if self.plan is not None:
            self.load()

    @property
    def name(self) -> str:
        """The plan in a word: name of its strategy file, ``pp2`` (stages) or ``tp2``."""
        if self.strategy is not None:
            return Path(self.strategy).stem
        if self.plan is not None:
            return f"pp{len(self.plan.stages)}"
        return f"tp{self.tensor_parallel}"

    @property
    def source(self) -> str | Plan | int | None:
        """The plan as it is given: equal for replicas of equal plans."""
        return self.strategy or self.plan or self.tensor_parallel

    def load(self, field: str = "replicas[]") -> Plan:
        """Return the plan; ``field`` names the replica in messages.

        Raises:
            SpecError: the strategy file cannot be read or has another number of devices, or the
                plan is for estimates only.
        """
        if self.tensor_parallel is not None:
            raise _bad(
                f"{field}.tensor_parallel",
                self.tensor_parallel,
                "a strategy or a plan: degrees of tensor parallelism are only simulated",
            )
        plan = self.plan or read_plan(str(self.strategy))
        if len(plan.cluster.devices) != len(self.devices):
            raise _bad(
                f"{field}.devices",
                list(self.devices),
                f"the {len(plan.cluster.devices)} of the plan's cluster",
            )
        return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledModel:
    """A model in a stage, with its replicas.

    Attributes:
        model: name of one of the application's models.
        nodes: the nodes whose requests it answers in this stage.
        replicas: requests are shared among them; unequal plans are allowed.
        requests: predicted requests that are finished in this stage, by node.
        load_s: predicted seconds of loading, 0 where the model goes on with its plan.
    """

    model: str
    nodes: Annotated[tuple[str, ...], Rule(minimum=1)]
    replicas: Annotated[tuple[ModelReplica, ...], Rule(minimum=1)]
    requests: Annotated[tuple[tuple[str, int], ...], Rule(optional=True)] = ()
    load_s: Annotated[float, Rule(optional=True)] = 0.0

    @property
    def devices(self) -> tuple[str, ...]:
        """Labels of the devices of all replicas."""
        return tuple(label for one in self.replicas for label in one.devices)

    @property
    def plan_name(self) -> str:
        """The plans of all replicas in a word, such as ``2 x tp1``."""
        counts = Counter(one.name for one in self.replicas)
        return " + ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionStage:
    """Models that run at the same time, until the first of them is finished.

    Attributes:
        start_s: predicted begin, from the begin of the application.
        end_s: predicted end.
        models: each model once, on devices of its own.
    """

    start_s: float
    end_s: float
    models: Annotated[tuple[ScheduledModel, ...], Rule(minimum=1)]

    def __post_init__(self) -> None:
        if self.end_s < self.start_s:
            raise _bad("end_s", self.end_s, f"at least start_s, {self.start_s}")
        devices = (label for one in self.models for label in one.devices)
        _check_once("models[].replicas[].devices", devices)
        _check_once("models[].model", (one.model for one in self.models))
        _check_once("models[].nodes", (node for one in self.models for node in one.nodes))

    def of(self, model: str) -> ScheduledModel | None:
        """Return the entry of a model, ``None`` if it does not run in this stage."""
        return next((one for one in self.models if one.model == model), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationSchedule:
    """All stages in order; what a schedule file holds.

    Attributes:
        application, cluster: their names.
        application_digest, cluster_digest: of what the schedule was made for.
        method: how it was found.
        stages: in order of time.
        search_s: seconds that the planner took.
        bound_s: no schedule takes less, by the same estimate; ``None`` when nothing is proven.
        idle_s: predicted device-seconds without a model or without a request, loading excluded.
    """

    SCHEMA: ClassVar[int] = SCHEMA

    application: str
    application_digest: str
    cluster: str
    cluster_digest: str
    method: str
    stages: Annotated[tuple[ExecutionStage, ...], Rule(minimum=1)]
    search_s: Annotated[float, Rule(optional=True)] = 0.0
    bound_s: float | None = None
    idle_s: float | None = None
    provenance: Provenance

    def __post_init__(self) -> None:
        end_s = 0.0
        for number, stage in enumerate(self.stages):
            if stage.start_s < end_s * (1 - TIME_TOLERANCE):
                raise _bad(f"stages[{number}].start_s", stage.start_s, f"at least {end_s}")
            end_s = stage.end_s

    @property
    def makespan_s(self) -> float:
        """Predicted seconds from the begin of the application to its last answer."""
        return self.stages[-1].end_s

    def entries(self) -> Iterator[tuple[str, ScheduledModel]]:
        """Yield the field and the value of every model of every stage."""
        for number, stage in enumerate(self.stages):
            for place, one in enumerate(stage.models):
                yield f"stages[{number}].models[{place}]", one

    def check(self, app: Application, cluster: Cluster) -> None:
        """Check that the schedule is of this application and cluster, and leaves no node out.

        Raises:
            SpecError: names the field, the value found and what was expected.
        """
        for field, found, expected in (
            ("application_digest", self.application_digest, application_digest(app)),
            ("cluster_digest", self.cluster_digest, cluster_digest(cluster)),
        ):
            if found != expected:
                what = field.removesuffix("_digest")
                raise _bad(field, found, f"{expected}: the {what} has changed, plan again")
        for field, one in self.entries():
            _check_entry(field, one, app, cluster)
        self._check_nodes(app)

    def _check_nodes(self, app: Application) -> None:
        """Check that every node runs, and none before its producers have begun."""
        first = dict[str, int]()
        for number, stage in enumerate(self.stages):
            for one in stage.models:
                for node in one.nodes:
                    first.setdefault(node, number)
        for node in app.order:
            if node not in first:
                raise _bad("stages", f"no stage with node {node!r}", "every node in a stage")
            for producer in app.producers(node):
                if first[producer] > first[node]:
                    raise _bad(
                        f"stages[{first[node]}]",
                        f"node {node!r} before its producer {producer!r}",
                        "producers in the same or an earlier stage",
                    )


def load_schedule(path: str | Path) -> ApplicationSchedule:
    """Read a schedule file; relative paths of strategies are resolved against its folder.

    Raises:
        SpecError: names the file, the field, the value found and what was expected.
    """
    path = Path(path)
    found = from_json(ApplicationSchedule, Fields(read_json(path), str(path)))

    def placed(one: ModelReplica) -> ModelReplica:
        if one.strategy is None:
            return one
        return replace(one, strategy=str(path.parent / one.strategy))

    stages = tuple(
        replace(
            stage,
            models=tuple(
                replace(one, replicas=tuple(map(placed, one.replicas))) for one in stage.models
            ),
        )
        for stage in found.stages
    )
    return replace(found, stages=stages)


def write_schedule(path: str | Path, schedule: ApplicationSchedule) -> None:
    """Write a schedule file atomically; paths of strategies are written as they are."""
    write_text(path, dump_json(to_json(schedule)))


def application_digest(app: Application) -> str:
    """Return a digest of the graph, its models and files, whatever folder the files are in."""
    record = to_json(app)
    for model in record["models"]:
        model["model"] = Path(model["model"]).name
        _keep_names(model, "lengths")
        for table in model.get("tables", ()):
            _keep_names(table, "iterations")
    for node in record["nodes"]:
        _keep_names(node, "requests")
    return digest_of(record)


def cluster_digest(cluster: Cluster) -> str:
    """Return a digest of the devices: their labels, types, memory and threads."""
    return digest_of(
        [
            [one.label, one.type, one.memory_bytes, one.threads, one.cpu_isa, one.members]
            for one in cluster.devices
        ]
    )


def check_devices(where: str, replica: ModelReplica, plan: Plan, cluster: Cluster) -> None:
    """Check that a replica's devices are of the types that its plan was made for.

    Raises:
        SpecError: one is not; ``where`` names the replica.
    """
    types = {device.label: device.type for device in cluster.devices}
    own = [types[label] for label in replica.devices]
    planned = [device.type for device in plan.cluster.devices]
    if own != planned:
        raise _bad(f"{where}.devices", ", ".join(own), f"those of its plan: {', '.join(planned)}")


def plans_of(
    schedule: ApplicationSchedule, cluster: Cluster
) -> dict[str | Plan | int | None, Plan]:
    """Return the plans of a schedule that is to be run, by :attr:`ModelReplica.source`.

    Raises:
        SpecError: a strategy file cannot be read or has other devices; names the field.
    """
    found: dict[str | Plan | int | None, Plan] = {}
    for field, one in schedule.entries():
        for number, replica in enumerate(one.replicas):
            where = f"{field}.replicas[{number}]"
            if replica.source not in found:
                found[replica.source] = replica.load(where)
            check_devices(where, replica, found[replica.source], cluster)
    return found


def _keep_names(record: dict[str, str], field: str) -> None:
    if field in record:
        record[field] = Path(record[field]).name


def _check_entry(field: str, one: ScheduledModel, app: Application, cluster: Cluster) -> None:
    names = [model.name for model in app.models]
    if one.model not in names:
        raise _bad(f"{field}.model", one.model, f"one of {', '.join(names)}")
    nodes = [node.name for node in app.nodes if node.model == one.model]
    for key, found in (("nodes", one.nodes), ("requests", [name for name, _ in one.requests])):
        for node in found:
            if node not in nodes:
                raise _bad(f"{field}.{key}", node, f"one of {', '.join(nodes)}")
    types = {device.label: device.type for device in cluster.devices}
    for number, replica in enumerate(one.replicas):
        where = f"{field}.replicas[{number}]"
        for label in replica.devices:
            if label not in types:
                raise _bad(f"{where}.devices", label, f"one of {', '.join(types)}")
        if replica.plan is not None:
            check_devices(where, replica, replica.plan, cluster)


def _check_once(field: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise _bad(field, f"{name} {count} times", "each once in a stage")


def _bad(field: str, found: object, expected: str) -> SpecError:
    return SpecError(f"field '{field}': found {found!r}, expected {expected}")
