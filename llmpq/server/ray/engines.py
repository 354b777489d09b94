"""Engines of replicas on a Ray cluster: a placement group for each replica, and an actor in it.

The bundle of a replica asks for a node of Ray whose label has the device types of its node, and for
the threads or accelerators of its devices. The actor starts the ranks there as processes; weights
are at the same path on every node. Ray carries requests and tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llmpq.dist.async_engine import AsyncEngine
from llmpq.dist.io.generation import GenerationRequest, TokenOutput
from llmpq.dist.transport.errors import error_from_status
from llmpq.errors import CapacityError, LlmpqError, SpecError, StageError
from llmpq.options.declare import values_of
from llmpq.options.run import LaunchOptions
from llmpq.server.ray.launcher import LABEL, device_label, reserved, resources_text
from llmpq.spec.cluster import Cluster
from llmpq.spec.plan import Plan

PLACE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of an engine, as it passes from its actor to the coordinator."""

    status: int
    text: str
    is_permanent: bool

    @classmethod
    def of(cls, error: LlmpqError) -> Failure:
        """Return what is passed on of an error."""
        return cls(error.exit_status, str(error), error.is_permanent)

    def error(self) -> LlmpqError:
        """Return the error."""
        return error_from_status(self.status, self.text, is_permanent=self.is_permanent)


class EngineActor:
    """Runs the engine of a replica on the node of its bundle."""

    def __init__(self) -> None:
        self._engine: AsyncEngine | None = None

    async def start(
        self, plan: Plan, model_dir: str, settings: Mapping[str, Any]
    ) -> Failure | None:
        """Load a model; return why it cannot be loaded."""
        try:
            self._engine = await AsyncEngine.start(plan, model_dir, **settings)
        except LlmpqError as error:
            return Failure.of(error)
        return None

    async def generate(
        self, request: GenerationRequest, token_ids: Sequence[int]
    ) -> AsyncGenerator[TokenOutput | Failure, None]:
        """Yield the outputs of a request, or at last why it has failed."""
        assert self._engine is not None
        try:
            async for output in self._engine.generate(request, token_ids):
                yield output
        except LlmpqError as error:
            yield Failure.of(error)

    async def abort(self, id: str) -> None:
        """End a request, if it is unfinished."""
        assert self._engine is not None
        await self._engine.abort(id)

    async def close(self) -> None:
        """End all ranks."""
        if self._engine is not None:
            await self._engine.close()


class RayEngine:
    """Answers the requests of a replica by its actor.

    Args:
        actor: of the class :class:`EngineActor`.
        group: its placement group, which ends with it.
        name: of the replica, for messages.
    """

    def __init__(self, actor: Any, group: PlacementGroup, name: str) -> None:
        self._actor, self._group, self._name = actor, group, name

    async def start(self, plan: Plan, model_dir: Path, settings: Mapping[str, Any]) -> None:
        """Load a model; raise ``LlmpqError`` if it cannot be loaded."""
        with self._naming_the_actor():
            failure = await self._actor.start.remote(plan, str(model_dir), settings)
        if failure is not None:
            raise failure.error()

    async def generate(
        self, request: GenerationRequest, token_ids: Sequence[int] = ()
    ) -> AsyncGenerator[TokenOutput, None]:
        """Answer a request, going on after ``token_ids``; leaving the iterator aborts it."""
        stream = self._actor.generate.options(num_returns="streaming")
        is_finished = False
        try:
            with self._naming_the_actor():
                async for found in stream.remote(request, tuple(token_ids)):
                    output = await found
                    if isinstance(output, Failure):
                        is_finished = True
                        raise output.error()
                    is_finished = output.finish_reason is not None
                    yield output
        finally:
            if not is_finished:
                self._actor.abort.remote(request.id)

    async def close(self) -> None:
        """End all processes of the replica, and free its place."""
        with contextlib.suppress(RayError):
            await self._actor.close.remote()
        ray.kill(self._actor)
        remove_placement_group(self._group)

    @contextlib.contextmanager
    def _naming_the_actor(self) -> Iterator[None]:
        try:
            yield
        except RayError as error:
            text = f"{self._name}: Ray lost its actor ({type(error).__name__}): {error}"
            raise StageError(text[:2000], is_permanent=True) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RayEngines:
    """Starts replicas on the nodes of a Ray cluster; equal to a ``StartEngine``.

    Attributes:
        cluster: all devices.
        options: of the ranks of every replica; its store is a folder on each node.
        place_timeout_s: seconds to wait until Ray has a free node.
    """

    cluster: Cluster
    options: LaunchOptions = field(default_factory=LaunchOptions)
    place_timeout_s: float = PLACE_TIMEOUT_S

    async def __call__(self, plan: Plan, model_dir: Path, devices: Sequence[str]) -> RayEngine:
        """Load a model by a plan on these devices; return once it answers.

        Raises:
            SpecError: the devices are on several nodes.
            CapacityError: Ray has no free node with the label and the resources.
            LlmpqError: the model cannot be loaded.
        """
        known = {device.label: device for device in self.cluster.devices}
        own = [known[label] for label in devices]
        node, resources = own[0].node, reserved(own, self.cluster)
        if {device.node for device in own} != {node}:
            raise SpecError(
                f"replica on {', '.join(devices)}: found several nodes, expected devices of one: "
                "the ranks of a replica are processes of one host"
            )
        label = device_label(node, self.cluster)
        group = placement_group([resources], bundle_label_selector=[{LABEL: label}])
        if not await asyncio.to_thread(group.wait, self.place_timeout_s):
            remove_placement_group(group)
            raise CapacityError(
                f"Ray: found no free node within {self.place_timeout_s:g} s, expected one with the "
                f"label {LABEL}={label} and {resources_text(resources)}"
            )
        actor = ray.remote(EngineActor).options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
        )
        engine = RayEngine(actor.remote(), group, f"replica on {', '.join(devices)}")
        try:
            await engine.start(plan, model_dir, self._settings())
        except BaseException:
            await engine.close()
            raise
        return engine

    def _settings(self) -> dict[str, Any]:
        # Ray gives replicas of one node no cores of their own.
        return values_of(self.options) | {"pins_workers": False}
