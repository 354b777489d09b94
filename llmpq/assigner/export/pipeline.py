"""What exports to different engines share: commands, nodes, and where a stage's devices are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmpq.errors import SpecError
from llmpq.spec.catalog import device as device_figures
from llmpq.spec.plan import Plan, StageAssignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line with its environment, for one node.

    Attributes:
        name: of its script.
        purpose: what it does, in a sentence.
        node: where to run it; ``None`` for any.
        arguments: the program and its options.
        environment: variables that it needs.
    """

    name: str
    purpose: str
    node: str | None
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Commands and further files that make another engine run a plan.

    Attributes:
        commands: in the order in which to start them.
        files: other files, by name.
        notes: what differs from the plan's own runtime.
    """

    commands: tuple[Command, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def kind_of(plan: Plan, stage: StageAssignment) -> str:
    """Return the kind of a stage's device: ``cpu``, ``cuda`` or another."""
    return device_figures(plan.device_of(stage).type, plan.cluster).kind


def local_devices(plan: Plan, stage: StageAssignment) -> tuple[int, ...]:
    """Return the numbers of a stage's accelerators among those of its node and kind."""
    own, kind = plan.device_of(stage), kind_of(plan, stage)
    first = sum(
        other.members
        for other in plan.cluster.devices[: stage.device]
        if other.node == own.node and device_figures(other.type, plan.cluster).kind == kind
    )
    return tuple(range(first, first + own.members))


def nodes_in_order(plan: Plan, engine: str) -> dict[str, tuple[StageAssignment, ...]]:
    """Return the stages of every node, in the order of the pipeline.

    Raises:
        SpecError: the stages of a node do not follow each other.
    """
    found: dict[str, list[StageAssignment]] = {}
    last: str | None = None
    for stage in plan.stages:
        node = plan.device_of(stage).node
        if node in found and node != last:
            raise SpecError(
                f"export to {engine}: found stages of node '{node}' that do not follow each other, "
                "expected each node once in the pipeline"
            )
        found.setdefault(node, []).append(stage)
        last = node
    return {node: tuple(stages) for node, stages in found.items()}


def single_dtype(plan: Plan, engine: str) -> str:
    """Return the number format of all stages.

    Raises:
        SpecError: stages differ.
    """
    found = {plan.dtype_of(stage) for stage in plan.stages}
    if len(found) > 1:
        raise SpecError(
            f"export to {engine}: found stages in {' and '.join(sorted(found))}, expected one "
            "number format; plan with --dtype float16"
        )
    return found.pop()


def source_of(plan: Plan) -> str:
    """Return the path or name of the model."""
    return plan.model.source or plan.model.name
