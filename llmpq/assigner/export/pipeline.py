"""What exports to different engines share: commands, nodes, and where a stage's devices are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmpq.errors import SpecError
from llmpq.spec.catalog import device as device_figures
from llmpq.spec.cluster import Device
from llmpq.spec.plan import Plan, StageAssignment
from llmpq.spec.precision import DTYPE_BYTES

DOWNLOADED = "model"
"""Folder of the weights of a model that is known by name only."""


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
        own = [_formats_of(plan.device_of(stage), plan) for stage in plan.stages]
        shared = [one for one in DTYPE_BYTES if all(one in formats for formats in own)]
        fixes = [f"plan with --dtype {one}" for one in sorted(shared, key=DTYPE_BYTES.__getitem__)]
        others = [stage for stage in plan.stages if plan.dtype_of(stage) != plan.dtype]
        named = " ".join(plan.device_of(stage).label for stage in others)
        raise SpecError(
            f"export to {engine}: found stages in {' and '.join(sorted(found))}, expected one "
            f"number format; {' or '.join([*fixes[:1], f'--exclude {named}'])}"
        )
    return found.pop()


def _formats_of(device: Device, plan: Plan) -> tuple[str, ...]:
    """Return the number formats in which a device may compute: the cluster file may name one."""
    return (
        device_figures(device.type, plan.cluster).formats if not device.dtype else (device.dtype,)
    )


def source_of(plan: Plan) -> str:
    """Return the directory of the model, or its name on the Hugging Face hub."""
    # Scripts change to their own folder.
    return plan.model.name if plan.model.source is None else str(Path(plan.model.source).resolve())


def weights_of(plan: Plan) -> tuple[str, tuple[Command, ...]]:
    """Return the directory of the weights, and the command that makes it; none where it exists."""
    if plan.model.source is not None:
        return source_of(plan), ()
    download = Command(
        name="download",
        purpose=f"Downloads {plan.model.name} from the Hugging Face hub.",
        node=None,
        arguments=("hf", "download", plan.model.name, "--local-dir", DOWNLOADED),
    )
    return DOWNLOADED, (download,)
