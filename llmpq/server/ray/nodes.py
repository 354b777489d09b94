"""Nodes of a Ray cluster as hosts that lend devices: an actor on each, and one with the ranks.

The first actor of a node takes nothing of it. The ranks of a plan have a bundle each in a placement
group, on the node that the plan says; a second actor in the first bundle of a node starts them.
What the actors do is up to the class that they are of. Ray carries messages; frames pass over our
own sockets.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from llmpq.errors import CapacityError, StageError
from llmpq.server.ray.launcher import (
    PLACE_TIMEOUT_S,
    new_group,
    resources_text,
)

NODE_ID = "ray.io/node-id"
"""Label that Ray gives every node."""
POLL_S = 1.0
"""Seconds between two questions whether the ranks of a node have ended."""
END_S = 20.0
"""Seconds that the ranks of a node may take to end with the command."""
ALL_GPUS = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
"""An actor sees the GPUs of its node also where it asks for none."""

MAX_CAUSE = 120
"""Characters that are shown of an error of Ray."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node of Ray: its name, address and resources.

    Attributes:
        id: of the node.
        name: its address, with the port of its raylet where several have that address.
        address: of the node.
        cpus, gpus: whole ones, of all that Ray gives out.
        memory_bytes: likewise.
    """

    id: str
    name: str
    address: str
    cpus: int
    gpus: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What a rank takes.

    Attributes:
        node: id of its node.
        resources: that Ray reserves there.
    """

    node: str
    resources: Mapping[str, float]


def ray_nodes() -> tuple[RayNode, list[RayNode]]:
    """Return this node, and the others of the cluster that have CPUs or GPUs."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    addresses = [node["NodeManagerAddress"] for node in alive]

    def read(node: Mapping[str, Any]) -> RayNode:
        address, port = node["NodeManagerAddress"], node["NodeManagerPort"]
        resources = node["Resources"]
        return RayNode(
            id=node["NodeID"],
            name=address if addresses.count(address) == 1 else f"{address}:{port}",
            address=address,
            cpus=int(resources.get("CPU", 0)),
            gpus=int(resources.get("GPU", 0)),
            memory_bytes=int(resources.get("memory", 0)),
        )

    here = ray.get_runtime_context().get_node_id()
    found = {node["NodeID"]: read(node) for node in alive}
    own = found.pop(here)
    others = sorted(found.values(), key=lambda node: node.name)
    return own, [node for node in others if node.cpus or node.gpus]


def reserve(bundles: Sequence[Bundle], timeout_s: float = PLACE_TIMEOUT_S) -> PlacementGroup:
    """Return a placement group with these bundles, once Ray has reserved them.

    Raises:
        CapacityError: what they need is not free in time.
    """
    group = new_group(
        [dict(bundle.resources) for bundle in bundles],
        [{NODE_ID: bundle.node} for bundle in bundles],
        "PACK",
        timeout_s,
    )
    if group is None:
        names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        wanted = ", ".join(
            f"{resources_text(bundle.resources)} on {names.get(bundle.node, 'a lost node')}"
            for bundle in bundles
        )
        raise CapacityError(
            f"Ray: found no placement within {timeout_s:g} s, expected that these are free: "
            f"{wanted}"
        )
    return group


def release(group: PlacementGroup) -> None:
    """Give back what a group has reserved; Ray ends the actors in it."""
    remove_placement_group(group)


class NodeConnection:
    """Carries messages to the actors of a node, and back.

    The methods of an actor take a message and the name of who sends it (``answer``), say that its
    ranks have ended (``ended``), and end them (``close``).

    Args:
        node: of Ray.
        kind: class of the actors.
        arguments: of the class.
        timeout_s: without a sign of life for so long, the node is lost.

    Attributes:
        name: of the node.
        lost: why it is lost, ``None`` while it is there.
    """

    def __init__(
        self, node: RayNode, kind: type[Any], arguments: Sequence[Any], timeout_s: float
    ) -> None:
        self.name = node.name
        self.lost: str | None = None
        self._node = node
        self._kind, self._arguments = kind, arguments
        self._timeout_s = timeout_s
        affinity = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
        self._actors = [self._new_actor(affinity)]
        self._answers: collections.deque[Any] = collections.deque()
        self._ended: Any = None  # the question whether the ranks have ended
        self._asked_s = 0.0

    def place(self, group: PlacementGroup, number: int) -> None:
        """Take messages in a bundle of a group from now on."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=number
        )
        self._actors.append(self._new_actor(strategy))

    def displace(self) -> None:
        """Take messages outside of groups again, before the group is given back."""
        self._ended = None
        self._end(self._actors[1:])
        del self._actors[1:]

    def call(self, method: str, *arguments: object) -> Any:
        """Return what a method of the actor returns; ``StageError`` if the node is lost."""
        self._check()
        return self._result(getattr(self._actors[-1], method).remote(*arguments))

    def send(self, kind: str, **fields: object) -> None:
        """Send a message; ``StageError`` if the node is lost."""
        self._check()
        message = {"kind": kind, **fields}
        self._answers.append(self._actors[-1].answer.remote(message, "the command"))

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message, ``None`` without one in time; ``StageError`` after a loss."""
        self._check()
        if self._answers:
            if not ray.wait([self._answers[0]], timeout=timeout_s)[0]:
                return None
            message: Message = self._result(self._answers.popleft())
            return message
        return self._poll()

    def _poll(self) -> Message | None:
        """Return the message that the ranks have ended, if the actor says so."""
        if len(self._actors) == 1:
            return None
        if self._ended is None:
            if time.monotonic() - self._asked_s < POLL_S:
                return None
            self._asked_s = time.monotonic()
            self._ended = self._actors[-1].ended.remote()
        if not ray.wait([self._ended], timeout=0)[0]:
            return None
        asked, self._ended = self._ended, None
        message: Message | None = self._result(asked)
        return message

    def is_there(self) -> bool:
        """Wait for a sign of life of all actors; return whether it came in time."""
        if self.lost is not None:
            return False
        calls = [actor.version.remote() for actor in self._actors]
        late = ray.wait(calls, num_returns=len(calls), timeout=self._timeout_s)[1]
        if late:
            self.lost = f"gave no sign of life for {self._timeout_s:g} s"
        else:
            with contextlib.suppress(StageError):
                for call in calls:
                    self._result(call)
        return self.lost is None

    def leave(self) -> None:
        """End the ranks, which end by themselves once their master has, and close."""
        self._end(self._actors)
        self.close()

    def close(self) -> None:
        """End the actors, with which the kernel ends the ranks."""
        self.lost = self.lost or "closed"
        for actor in self._actors:
            ray.kill(actor)

    def _end(self, actors: Sequence[Any]) -> None:
        """End actors and their ranks, which may end by themselves before."""
        if actors and self.lost is None:
            calls = [actor.close.remote() for actor in actors]
            ray.wait(calls, num_returns=len(calls), timeout=END_S)
        for actor in actors:
            ray.kill(actor)

    def _new_actor(self, strategy: Any) -> Any:
        options = {} if not self._node.gpus else {"runtime_env": ALL_GPUS}
        kind = ray.remote(self._kind).options(num_cpus=0, scheduling_strategy=strategy, **options)
        return kind.remote(*self._arguments)

    def _check(self) -> None:
        if self.lost is not None:
            raise StageError(f"{self.name}: {self.lost}")

    def _result(self, call: Any) -> Any:
        """Return the result of a call; ``StageError`` if the node is lost."""
        try:
            return ray.get(call)
        except RayError as error:
            self.lost = self.lost or _text_of(error)
        raise StageError(f"{self.name}: {self.lost}")


def _text_of(error: RayError) -> str:
    """Return an error of Ray as one line: the first sentence of its last line has the cause."""
    if isinstance(error, ActorUnavailableError):
        return "its actor cannot be reached"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = lines[-1].partition(". ")[0][:MAX_CAUSE] if lines else "no message"
    return f"Ray lost its actor ({type(error).__name__}: {cause})"
