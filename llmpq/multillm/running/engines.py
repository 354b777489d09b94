"""Engines of replicas: how a model is started on its devices, and what a running one offers.

The default starts the ranks as processes of this host. Another launcher is another ``StartEngine``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmpq.dist.async_engine import DEFAULT_RESTARTS, AsyncEngine
from llmpq.dist.io.generation import GenerationRequest, TokenOutput
from llmpq.dist.io.job import DEFAULT_STORE_LIMIT_BYTES
from llmpq.dist.launch.local_devices import cores_of_devices, visible_devices
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
        step_timeout_s: how long a rank may give no sign of life.
        max_restarts: starts in a row without a new token, after which a replica has failed.
        store, store_limit_bytes: folder of quantized layers kept from start to start.
        kernel: backend to prefer.
    """

    cluster: Cluster
    step_timeout_s: float = 10.0
    max_restarts: int = DEFAULT_RESTARTS
    store: Path | None = None
    store_limit_bytes: int = DEFAULT_STORE_LIMIT_BYTES
    kernel: str | None = None

    async def __call__(self, plan: Plan, model_dir: Path, devices: Sequence[str]) -> AsyncEngine:
        """Load a model by a plan on these devices; return once it answers."""
        cores = cores_of_devices(self.cluster, sorted(os.sched_getaffinity(0)))
        labels = [devices[index] for index in dict.fromkeys(plan.rank_devices)]
        own = [core for label in labels for core in cores.get(label, ())]
        return await AsyncEngine.start(
            plan,
            model_dir,
            step_timeout_s=self.step_timeout_s,
            max_restarts=self.max_restarts,
            store=self.store,
            store_limit_bytes=self.store_limit_bytes,
            kernel=self.kernel,
            cores=own,
            pins_workers=bool(own),  # without cores of its own it would share those of another
            environment=visible_devices(self.cluster, devices, os.environ),
        )
