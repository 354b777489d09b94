"""Other hosts that lend devices, as the command sees them that plans over theirs and its own.

Their devices and links make one cluster with this host's, whose plan has the master here. The ranks
of each host are started there with ``--nnodes`` and ``--node_rank``. When one is lost, the plan
over the others takes its place, within a stated time. Messages reach a host through its connection:
a socket (:mod:`~llmpq.cli.workers.socket_hosts`) or an actor of Ray
(:mod:`~llmpq.cli.workers.ray_hosts`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from llmpq.cli.common import require
from llmpq.cli.run_options import ray_address_of
from llmpq.cli.workers.connection import Message
from llmpq.cli.workers.link import MeasuredLink
from llmpq.dist import Hosts
from llmpq.dist.transport.endpoint import Endpoint, is_loopback_name
from llmpq.dist.transport.errors import error_from_status
from llmpq.errors import InfeasibleError, LlmpqError, SpecError, StageError
from llmpq.options.declare import read_options
from llmpq.options.run import RunOptions, WorkersOptions
from llmpq.spec.cluster import Cluster, LinkSpec, Node, host_text
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.fields import Fields, from_json
from llmpq.spec.model_files.config import model_digest
from llmpq.spec.plan import plan_text
from llmpq.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from llmpq.cli.front.host_plan import FoundModel, HostPlan
    from llmpq.spec.plan import Plan

POLL_S = 1.0
T = TypeVar("T")


class HostConnection(Protocol):
    """Carries messages to a host that lends devices, and back.

    Attributes:
        name: of the host.
        lost: why it is lost, ``None`` while it is there.
    """

    name: str
    lost: str | None

    def send(self, kind: str, **fields: object) -> None:
        """Send a message; ``StageError`` if the host is lost."""

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message, ``None`` without one in time; ``StageError`` after a loss."""

    def is_there(self) -> bool:
        """Wait for a sign of life, for a limited time; return whether one came."""

    def leave(self) -> None:
        """End the ranks of this command there, and close."""

    def close(self) -> None:
        """Close the connection to a host that is lost."""


@dataclass(slots=True, kw_only=True)
class OtherHost:
    """A connected host that lends devices, and what it runs.

    Attributes:
        name: of its node.
        title: what it is and its name, for messages.
        connection: to it.
        address: where it answers measurements of links.
        here: address at which it reaches this host.
        link: from this host.
        is_used: whether it runs ranks of the plan.
        ended: status and error of its ranks, once they have ended.
    """

    name: str
    title: str
    connection: HostConnection
    address: tuple[str, int]
    here: str
    link: MeasuredLink
    is_used: bool = False
    ended: tuple[int, str] | None = None

    def ask(self, kind: str, **fields: object) -> Fields:
        """Return the answer to a message.

        Raises:
            LlmpqError: the host's error, or ``StageError`` if it is lost.
        """
        self.connection.send(kind, **fields)
        return self.answer()

    def answer(self) -> Fields:
        """Return the answer to the first message that has none yet, as :meth:`ask` does."""
        while True:
            message = self.connection.receive(POLL_S)
            if message is None or self._take(message):
                continue
            if message["kind"] == "error":
                raise error_from_status(message["status"], f"{self.title}: {message['message']}")
            return Fields(message, self.title)

    def poll(self) -> None:
        """Take what the host says unasked; ``StageError`` if it is lost."""
        while (message := self.connection.receive(0.0)) is not None:
            self._take(message)

    def _take(self, message: Message) -> bool:
        """Note the end of the ranks; return whether the message is about it."""
        if message["kind"] != "ended":
            return False
        fields = Fields(message, self.name)
        self.ended = (fields.integer("status", minimum=-64), fields.text("message"))
        return True


class OtherHosts(contextlib.AbstractContextManager["OtherHosts"]):
    """The hosts besides this one, which are connected: devices, ranks, losses.

    Args:
        options: how long a new plan may take.
        timeout_s: a host without a sign of life for so long is lost.
        program: name of the command, for messages.

    Raises:
        SpecError: the key or the version of llmpq of a host is another.
        StageError: a host cannot be reached, or is in use.
    """

    TITLE = "host"
    """What one of them is called in messages."""

    def __init__(self, options: WorkersOptions, timeout_s: float, program: str) -> None:
        self._options = options
        self._timeout_s = timeout_s
        self._program = program
        self._hosts: list[OtherHost] = []
        self._between: dict[frozenset[str], LinkSpec] = {}
        self._next: Callable[[], HostPlan] | None = None
        self._start: tuple[str, Sequence[str]] = ("serve", ())
        try:
            self._connect_all()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        """Leave the hosts, which end their ranks."""
        self.close()

    def close(self) -> None:
        """Leave all hosts."""
        for host in self._hosts:
            host.connection.leave()
        self._hosts.clear()

    def own(self, cluster: Cluster) -> Cluster:
        """Return the part of this host's devices that may be planned for."""
        return cluster

    def joined(self, own: Cluster, *, measures: bool = False) -> Cluster:
        """Return the cluster of this host and of all others, as they are now.

        Args:
            own: devices of this host.
            measures: whether devices are measured that were not before.

        Raises:
            StageError: a host is lost.
        """
        if not self._hosts:
            return own
        found = {own.nodes[0].name: own}
        for host in self._hosts:  # all at once: measuring takes long
            with contextlib.suppress(StageError):  # it is raised below, once all have answered
                host.connection.send("devices", measure=measures)
        failed: list[LlmpqError] = []
        for host in self._hosts:
            try:
                found[host.name] = from_json(Cluster, host.answer().child("cluster"))
            except LlmpqError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        nodes, entries = _with_own_figures(found)
        names = {node.name for node in nodes}
        here = own.nodes[0].name
        links = [_link_spec((here, host.name), host.link) for host in self._hosts]
        links += [link for ends, link in self._between.items() if ends <= names]
        return Cluster(
            name=", ".join(found),
            nodes=tuple(nodes),
            links=tuple(links),
            device_types=entries or None,
        )

    def start(
        self,
        found: HostPlan,
        command: str,
        words: Sequence[str] = (),
        *,
        replan: Callable[[], HostPlan] | None = None,
    ) -> Hosts:
        """Start the ranks of a plan on the other hosts; return the place of this one.

        Args:
            found: the plan; its first node is this host.
            command: what starts ranks there: ``serve`` or ``dist``.
            words: options of the engine.
            replan: returns the plan over the hosts that are left, after one was lost.

        Raises:
            LlmpqError: a host has no such model, or is lost.
        """
        self._start, self._next = (command, words), replan
        plan = found.plan
        used = [self._named(name) for name in plan.nodes[1:]]
        self._place(plan)
        for host in self._hosts:
            host.is_used, host.ended = host in used, None
            if host.is_used:
                host.ask("model", **_model_fields(found.model))
            else:
                host.ask("stop")
            host.ended = None  # of ranks that the message has ended
        if not used:
            return Hosts()
        address = (self._address(used), 0)
        with Endpoint(address=address).listening() as listener:
            address = (address[0], int(listener.getsockname()[1]))
        for number, host in enumerate(used, start=1):
            host.ask(
                "start",
                command=command,
                words=list(words),
                plan=plan_text(plan),
                nnodes=len(plan.nodes),
                node_rank=number,
                master_addr=address[0],
                master_port=address[1],
            )
            host.ended = None
        return Hosts(
            num_nodes=len(plan.nodes), node_rank=0, address=address, token_file=self._token_file()
        )

    def check(self) -> None:
        """Raise an error if a host with ranks of the plan was lost, or its ranks have ended."""
        for host in list(self._hosts):
            try:
                host.poll()
            except StageError as error:
                if host.is_used:
                    raise
                self._remove(host, str(error))
                continue
            if host.is_used and host.ended is not None and host.ended[0]:
                status, text = host.ended
                raise error_from_status(
                    status if status in (1, 2, 3) else StageError.exit_status,
                    f"{host.title}: its ranks ended with status {status}: {text}",
                )

    def next_start(self) -> tuple[Plan, Hosts] | None:
        """Return the plan over the hosts that are left and this host's place, if one was lost.

        Raises:
            LlmpqError: it does not fit into them, or takes too long.
        """
        replan = self._next
        if replan is None or not self.drop_lost():
            return None
        start_s = time.monotonic()

        def planned() -> tuple[HostPlan, Hosts]:
            while True:
                try:
                    found = replan()
                    return found, self.start(found, *self._start, replan=replan)
                except StageError:
                    if not self._drop_closed():  # else another one was lost meanwhile
                        raise

        found, place = self.in_time(planned)
        seconds = format_seconds(time.monotonic() - start_s)
        self.say(f"goes on with {', '.join(found.plan.nodes)}; planned within {seconds}")
        return found.plan, place

    def in_time(self, replan: Callable[[], T]) -> T:
        """Return what makes a new plan after a loss and starts its ranks, within the limit.

        Raises:
            LlmpqError: there is no plan, or none in time.
        """
        limit_s = self._options.replan_timeout_s
        found: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                found.append(replan())
            except BaseException as error:  # it is raised in the caller's thread
                failed.append(error)

        # A search for a plan cannot be interrupted: one that is late ends with the command.
        thread = threading.Thread(target=run, daemon=True, name="llmpq replan")
        thread.start()
        thread.join(limit_s)
        if failed:
            if isinstance(failed[0], LlmpqError) and not isinstance(failed[0], StageError):
                text = f"no plan without the hosts that were lost: {failed[0]}"
                raise type(failed[0])(text) from None
            raise failed[0]
        if not found:
            raise InfeasibleError(
                f"found no plan without the hosts that were lost within {limit_s:g} s; "
                "--replan_timeout allows more"
            )
        return found[0]

    def drop_lost(self) -> bool:
        """Leave out the hosts that are lost; return whether one of them had ranks of the plan.

        The ranks of the others end then, so that what they hold is free for the next plan.
        """
        lost = [host for host in self._hosts if self._is_lost(host)]
        for host in lost:
            self._remove(host, host.connection.lost or "its ranks have ended")
        is_over = any(host.is_used for host in lost)
        for host in self._hosts if is_over else ():
            with contextlib.suppress(StageError):  # another loss, which the next plan finds
                host.ask("stop")
        return is_over

    def say(self, text: str) -> None:
        """Print a line about the hosts."""
        print(f"{self._program}: {text}", file=sys.stderr, flush=True)

    def _connect_all(self) -> None:
        """Connect to all hosts, measure their links, and :meth:`_join` them."""
        raise NotImplementedError

    def _place(self, plan: Plan) -> None:
        """Reserve what the ranks of a plan need."""

    def _token_file(self) -> Path:
        """Return the file of the secret that all hosts share."""
        raise NotImplementedError

    def _join(self, host: OtherHost) -> None:
        """Add a host that is connected and whose link is measured; print its devices."""
        self._hosts.append(host)
        fields = host.ask("devices", measure=False).child("cluster")
        devices, link = from_json(Cluster, fields).devices, host.link
        shown = ", ".join(f"{one.type} ({host_text(one)})" for one in devices)
        self.say(
            f"{host.title} has joined: {shown}; link {format_bytes(link.out_bytes_per_s)}/s there, "
            f"{format_bytes(link.in_bytes_per_s)}/s back, {format_seconds(link.latency_s)}"
        )

    def _measure_between(self) -> None:
        """Measure the links between each two of the other hosts."""
        for one, other in combinations(self._hosts, 2):
            fields = one.ask("link", host=other.address[0], port=other.address[1])
            fields.text("kind")
            ends = one.name, other.name
            self._between[frozenset(ends)] = _link_spec(ends, from_json(MeasuredLink, fields))

    def _is_lost(self, host: OtherHost) -> bool:
        """Wait for a sign of life; ranks that will not come back count as a loss, too."""
        if not host.connection.is_there():
            return True
        with contextlib.suppress(StageError):
            host.poll()
        # Without another plan they end at any fault, else only where restarts do not help.
        return self._next is not None and host.is_used and host.ended is not None

    def _drop_closed(self) -> bool:
        """Leave out the hosts whose connection has ended; return whether there was one."""
        lost = [host for host in self._hosts if host.connection.lost is not None]
        for host in lost:
            self._remove(host, host.connection.lost or "")
        return bool(lost)

    def _named(self, name: str) -> OtherHost:
        return next(host for host in self._hosts if host.name == name)

    def _remove(self, host: OtherHost, why: str) -> None:
        self._hosts.remove(host)
        host.connection.close()
        self.say(f"{host.title} is lost: {why.removeprefix(f'{host.name}: ')}")

    def _address(self, used: Sequence[OtherHost]) -> str:
        """Return the address at which all hosts of a plan reach this one."""
        found = {host.here for host in used}
        others = {one for one in found if not is_loopback_name(one)}
        if len(others) > 1:
            raise SpecError(
                f"found that the {self.TITLE}s reach this host at {', '.join(sorted(others))}, "
                "expected one address"
            )
        return min(others or found)


def other_hosts_of(options: argparse.Namespace, program: str) -> OtherHosts | None:
    """Return the hosts that a command names, or those of Ray, connected; ``None`` without any.

    Raises:
        LlmpqError: as :class:`OtherHosts`.
    """
    asked = read_options(WorkersOptions, options)
    address = ray_address_of(options)
    if asked.workers and options.launcher == "ray":
        raise SpecError("--workers: found with --launcher ray, expected one of them")
    if asked.key_file is not None and not asked.workers:
        raise SpecError("--key_file: found without --workers, expected both")
    timeout_s = getattr(options, "step_timeout", RunOptions().step_timeout_s)
    if options.launcher == "ray":
        require("ray")
        from llmpq.cli.workers.ray_hosts import RayHosts

        return RayHosts(asked, timeout_s, program, address=address)
    if not asked.workers:
        return None
    from llmpq.cli.workers.socket_hosts import WorkerHosts

    return WorkerHosts(asked, timeout_s, program)


def _link_spec(between: tuple[str, str], measured: MeasuredLink) -> LinkSpec:
    """Return a link as plans know it, with the bandwidth of the slower direction."""
    slower = min(measured.out_bytes_per_s, measured.in_bytes_per_s)
    return LinkSpec(between=between, bytes_per_s=max(1.0, slower), latency_s=measured.latency_s)


def _with_own_figures(
    clusters: Mapping[str, Cluster],
) -> tuple[list[Node], tuple[DeviceEntry, ...]]:
    """Return the nodes, and the figures of their devices.

    Where hosts have other figures of a type, such as their CPUs, each has a type of its own.
    """
    figures = {
        name: {entry.type: entry for entry in cluster.device_types or ()}
        for name, cluster in clusters.items()
    }
    entries: dict[str, DeviceEntry] = {}
    nodes = []
    for name, cluster in clusters.items():
        groups = []
        for group in cluster.nodes[0].devices:
            entry = figures[name].get(group.type)
            others = [
                figures[other].get(group.type)
                for other, one in clusters.items()
                if any(device.type == group.type for device in one.devices)
            ]
            if entry is not None and any(other != entry for other in others):
                entry = replace(entry, type=f"{group.type}-{name}")
            if entry is not None:
                entries[entry.type] = entry
            groups.append(group if entry is None else replace(group, type=entry.type))
        nodes.append(replace(cluster.nodes[0], name=name, devices=tuple(groups)))
    return nodes, tuple(entries.values())


def _model_fields(model: FoundModel) -> dict[str, Any]:
    """Return what a host needs to find its own copy of a model."""
    fields: dict[str, Any] = {"path": str(model.path), "digest": model_digest(model.path)}
    if model.hub is not None:
        commit = model.hub.commit
        parts = model.path.parts
        inside = parts[len(parts) - parts[::-1].index(commit) :] if commit in parts else ()
        fields |= {"repo": model.spec.name, "commit": commit, "file": "/".join(inside) or "."}
    return fields
