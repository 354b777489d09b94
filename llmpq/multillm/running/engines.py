"""Engines of replicas: how a model is started on its devices, and what a running one offers.

The default starts the ranks as processes of this host. Another launcher is another ``StartEngine``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from llmpq.dist.async_engine import AsyncEngine
from llmpq.dist.io.generation import GenerationRequest, TokenOutput
from llmpq.dist.launch.process_environment import cores_of_devices, visible_devices
from llmpq.options.declare import values_of
from llmpq.options.run import LaunchOptions
from llmpq.spec.cluster import Cluster
from llmpq.spec.plan import Plan


class ReplicaEngine(Protocol):
    """Answers the requests of a replica whose model is loaded."""

    def generate(
        self, request: GenerationRequest, token_ids: Sequence[int] = ()
    ) -> AsyncGenerator[TokenOutput, None]:
        """Answer a request, going on after ``token_ids``; leaving the iterator aborts it."""
        ...

    async def close(self) -> None:
        """End all processes of the replica."""
        ...


class StartEngine(Protocol):
    """Loads the model of a replica on given devices."""

    async def __call__(self, plan: Plan, model_dir: Path, devices: Sequence[str]) -> ReplicaEngine:
        """Load a model by a plan on these devices; return once it answers.

        Raises:
            LlmpqError: it cannot be loaded.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngines:
    """Starts replicas as processes of this host; equal to a ``StartEngine``.

    Attributes:
        cluster: all devices; the ranks of CPU devices with a number of threads keep to cores of
            their own, accelerators are those that the process sees.
        options: of the ranks of every replica.
    """

    cluster: Cluster
    options: LaunchOptions = field(default_factory=LaunchOptions)

    async def __call__(self, plan: Plan, model_dir: Path, devices: Sequence[str]) -> AsyncEngine:
        """Load a model by a plan on these devices; return once it answers."""
        cores = cores_of_devices(self.cluster, sorted(os.sched_getaffinity(0)))
        labels = [devices[index] for index in dict.fromkeys(plan.rank_devices)]
        own = [core for label in labels for core in cores.get(label, ())]
        settings = values_of(self.options) | {
            "cores": own,
            "pins_workers": bool(own),  # without cores of its own it would share those of another
            "environment": visible_devices(self.cluster, devices, os.environ),
        }
        return await AsyncEngine.start(plan, model_dir, **settings)
