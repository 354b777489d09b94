"""The hosts that ``--workers`` names, as the command sees them that plans over their devices.

They are connected once. Their devices and links make one cluster with this host's, whose plan has
the master here. The ranks of each host are started there with ``--nnodes`` and ``--node_rank``.
When one is lost, the plan over the others takes its place.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from llmpq import __version__
from llmpq.cli.workers.connection import CONTROL, LINK, Connection, Message
from llmpq.cli.workers.link import MeasuredLink, measure_link
from llmpq.dist import Hosts
from llmpq.dist.transport.endpoint import (
    HANDSHAKE_S,
    Endpoint,
    is_loopback_name,
    read_token,
    receive_json,
    send_json,
)
from llmpq.dist.transport.errors import error_from_status
from llmpq.errors import LlmpqError, SpecError, StageError
from llmpq.options.declare import read_options
from llmpq.options.run import RunOptions, WorkersOptions, address_text
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
BUSY_S = 10.0
"""How long a worker may take to end the ranks of the host that used it before."""


@dataclass(slots=True, kw_only=True)
class _Worker:
    """A connected worker.

    Attributes:
        name: of its node.
        connection: to it.
        address: where other workers reach it.
        here: address at which it reaches this host.
        link: from this host.
        is_used: whether it runs ranks of the plan.
        ended: status and error of its ranks, once they have ended.
    """

    name: str
    connection: Connection
    address: tuple[str, int]
    here: str
    link: MeasuredLink
    is_used: bool = False
    ended: tuple[int, str] | None = None

    def ask(self, kind: str, **fields: object) -> Fields:
        """Return the answer to a message.

        Raises:
            LlmpqError: the worker's error, or ``StageError`` if it is lost.
        """
        self.connection.send(kind, **fields)
        while True:
            message = self.connection.receive(POLL_S)
            if message is not None and self._take(message):
                continue
            if message is not None:
                return self._answer(message)

    def poll(self) -> None:
        """Take what the worker says unasked; ``StageError`` if it is lost."""
        while (message := self.connection.receive(0.0)) is not None:
            self._take(message)

    def _take(self, message: Message) -> bool:
        """Note the end of the ranks; return whether the message is about it."""
        if message["kind"] != "ended":
            return False
        fields = Fields(message, self.name)
        self.ended = (fields.integer("status", minimum=-64), fields.text("message"))
        return True

    def _answer(self, message: Message) -> Fields:
        if message["kind"] == "error":
            raise error_from_status(message["status"], f"worker {self.name}: {message['message']}")
        return Fields(message, f"worker {self.name}")


class WorkerHosts(contextlib.AbstractContextManager["WorkerHosts"]):
    """This host and its workers, which are connected: devices, ranks, losses.

    Args:
        options: addresses and key.
        timeout_s: a worker without a sign of life for so long is lost.
        program: name of the command, for messages.

    Raises:
        SpecError: an address, the key or the version of llmpq of a worker is another.
        StageError: a worker cannot be reached, or is in use.
    """

    def __init__(self, options: WorkersOptions, timeout_s: float, program: str) -> None:
        if options.key_file is None:
            raise SpecError("--workers: found no --key_file, expected the secret of all hosts")
        self._key_file = options.key_file
        self._token = read_token(options.key_file)
        self._timeout_s = timeout_s
        self._program = program
        self._workers: list[_Worker] = []
        self._between: dict[frozenset[str], LinkSpec] = {}
        self._next: Callable[[], HostPlan] | None = None
        self._start: tuple[str, Sequence[str]] = ("serve", ())
        try:
            self._connect_all(options.workers)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        """Leave the workers, which end their ranks and wait for the next command."""
        self.close()

    def close(self) -> None:
        """Leave all workers."""
        for worker in self._workers:
            worker.connection.leave()
        self._workers.clear()

    def joined(self, own: Cluster) -> Cluster:
        """Return the cluster of this host and of all workers, as they are now.

        Raises:
            StageError: a worker is lost.
        """
        if not self._workers:
            return own
        found = {own.nodes[0].name: own}
        for worker in self._workers:
            fields = worker.ask("devices").child("cluster")
            found[worker.name] = from_json(Cluster, fields)
        nodes, entries = _with_own_figures(found)
        names = {node.name for node in nodes}
        here = own.nodes[0].name
        links = [_link_spec((here, worker.name), worker.link) for worker in self._workers]
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
        """Start the ranks of a plan on the workers; return the place of this host.

        Args:
            found: the plan; its first node is this host.
            command: what starts ranks there: ``serve`` or ``dist``.
            words: options of the engine.
            replan: returns the plan over the hosts that are left, after one was lost.

        Raises:
            LlmpqError: a worker has no such model, or is lost.
        """
        self._start, self._next = (command, words), replan
        plan = found.plan
        used = [self._named(name) for name in plan.nodes[1:]]
        for worker in self._workers:
            worker.is_used, worker.ended = worker in used, None
            if worker.is_used:
                worker.ask("model", **_model_fields(found.model))
            else:
                worker.ask("stop")
            worker.ended = None  # of ranks that the message has ended
        if not used:
            return Hosts()
        address = (self._address(used), 0)
        with Endpoint(address=address).listening() as listener:
            address = (address[0], int(listener.getsockname()[1]))
        for number, worker in enumerate(used, start=1):
            worker.ask(
                "start",
                command=command,
                words=list(words),
                plan=plan_text(plan),
                nnodes=len(plan.nodes),
                node_rank=number,
                master_addr=address[0],
                master_port=address[1],
            )
            worker.ended = None
        return Hosts(
            num_nodes=len(plan.nodes), node_rank=0, address=address, token_file=self._key_file
        )

    def check(self) -> None:
        """Raise an error if a worker with ranks of the plan was lost, or its ranks have ended."""
        for worker in list(self._workers):
            try:
                worker.poll()
            except StageError as error:
                if worker.is_used:
                    raise
                self._remove(worker, str(error))
                continue
            if worker.is_used and worker.ended is not None and worker.ended[0]:
                status, text = worker.ended
                raise error_from_status(
                    status if status in (1, 2, 3) else StageError.exit_status,
                    f"worker {worker.name}: its ranks ended with status {status}: {text}",
                )

    def next_start(self) -> tuple[Plan, Hosts] | None:
        """Return the plan over the hosts that are left and this host's place, if one was lost.

        Raises:
            LlmpqError: it does not fit into them.
        """
        start_s = time.monotonic()
        if self._next is None or not self.drop_lost():
            return None
        while True:
            try:
                found = self._next()
                place = self.start(found, *self._start, replan=self._next)
            except StageError:
                if not self._drop_closed():  # else another one was lost meanwhile
                    raise
                continue
            except LlmpqError as error:
                raise type(error)(f"no plan without the hosts that were lost: {error}") from None
            seconds = format_seconds(time.monotonic() - start_s)
            self.say(f"goes on with {', '.join(found.plan.nodes)}; planned within {seconds}")
            return found.plan, place

    def drop_lost(self) -> bool:
        """Leave out the workers that are lost; return whether one of them had ranks of the plan.

        The ranks of the others end then, so that what they hold is free for the next plan.
        """
        lost = [worker for worker in self._workers if self._is_lost(worker)]
        for worker in lost:
            self._remove(worker, worker.connection.lost or "its ranks have ended")
        is_over = any(worker.is_used for worker in lost)
        for worker in self._workers if is_over else ():
            with contextlib.suppress(StageError):  # another loss, which the next plan finds
                worker.ask("stop")
        return is_over

    def say(self, text: str) -> None:
        """Print a line about the hosts."""
        print(f"{self._program}: {text}", file=sys.stderr, flush=True)

    def _is_lost(self, worker: _Worker) -> bool:
        """Wait for a sign of life; ranks that will not come back count as a loss, too."""
        if not worker.connection.is_there():
            return True
        with contextlib.suppress(StageError):
            worker.poll()
        # Those of a batch end at any fault; those of a server only where restarts do not help.
        return self._start[0] == "serve" and worker.is_used and worker.ended is not None

    def _drop_closed(self) -> bool:
        """Leave out the workers whose connection has ended; return whether there was one."""
        lost = [worker for worker in self._workers if worker.connection.lost is not None]
        for worker in lost:
            self._remove(worker, worker.connection.lost or "")
        return bool(lost)

    def _named(self, name: str) -> _Worker:
        return next(worker for worker in self._workers if worker.name == name)

    def _remove(self, worker: _Worker, why: str) -> None:
        self._workers.remove(worker)
        worker.connection.close()
        self.say(f"worker {worker.name} is lost: {why.removeprefix(f'{worker.name}: ')}")

    def _connect_all(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Connect to all workers and measure the links between them."""
        if len(set(addresses)) < len(addresses):
            raise SpecError("--workers: found one twice, expected each once")
        hosts = [host for host, _ in addresses]
        for address in addresses:
            name = address[0] if hosts.count(address[0]) == 1 else address_text(address)
            self._connect(name, address)
        for one, other in combinations(self._workers, 2):
            fields = one.ask("link", host=other.address[0], port=other.address[1])
            fields.text("kind")
            measured = from_json(MeasuredLink, fields)
            ends = one.name, other.name
            self._between[frozenset(ends)] = _link_spec(ends, measured)

    def _connect(self, name: str, address: tuple[str, int]) -> None:
        """Connect to a worker, and measure its link."""
        where = f"worker {address_text(address)}"
        try:
            sock = self._greeted(Endpoint(address=address), where)
            deadline_s = time.monotonic() + HANDSHAKE_S
            probe = Endpoint(address=address).connect_authenticated(self._token, LINK, deadline_s)
            measured = measure_link(probe, HANDSHAKE_S)
        except (OSError, StageError) as error:
            raise StageError(f"{where}: {error}") from None
        worker = _Worker(
            name=name,
            connection=Connection(sock, name, self._timeout_s),
            address=(sock.getpeername()[0], address[1]),
            here=sock.getsockname()[0],
            link=measured,
        )
        self._workers.append(worker)
        devices = from_json(Cluster, worker.ask("devices").child("cluster")).devices
        shown = ", ".join(f"{one.type} ({host_text(one)})" for one in devices)
        self.say(
            f"worker {name} has joined: {shown}; link {format_bytes(measured.out_bytes_per_s)}/s "
            f"there, {format_bytes(measured.in_bytes_per_s)}/s back, "
            f"{format_seconds(measured.latency_s)}"
        )

    def _greeted(self, endpoint: Endpoint, where: str) -> socket.socket:
        """Return a connection to a worker of the same version, once it is not in use."""
        end_s = time.monotonic() + BUSY_S
        hello = {"version": __version__, "timeout_s": self._timeout_s}
        while True:
            deadline_s = time.monotonic() + HANDSHAKE_S
            try:
                sock = endpoint.connect_authenticated(self._token, CONTROL, deadline_s)
            except SpecError:
                raise SpecError(
                    f"{where}: found another key there, expected that of {self._key_file}"
                ) from None
            with contextlib.ExitStack() as stack:
                stack.enter_context(sock)
                deadline_s = time.monotonic() + HANDSHAKE_S
                send_json(sock, hello, deadline_s)
                answer = Fields(receive_json(sock, deadline_s), where)
                if answer.text("kind", ("hello", "busy")) == "hello":
                    if (version := answer.text("version")) != __version__:
                        raise SpecError(
                            f"{where}: found llmpq {version}, expected {__version__} as on this "
                            "host"
                        )
                    stack.pop_all()
                    return sock
            if time.monotonic() >= end_s:
                user = answer.text("host")
                raise StageError(f"found it in use by {user}, expected an idle worker")
            time.sleep(POLL_S)

    def _address(self, used: Sequence[_Worker]) -> str:
        """Return the address at which all workers of a plan reach this host."""
        found = {worker.here for worker in used}
        others = {one for one in found if not is_loopback_name(one)}
        if len(others) > 1:
            raise SpecError(
                f"--workers: found that they reach this host at {', '.join(sorted(others))}, "
                "expected one address"
            )
        return min(others or found)


def workers_of(options: argparse.Namespace, program: str) -> WorkerHosts | None:
    """Return the workers that a command names, connected; ``None`` without any.

    Raises:
        LlmpqError: as :class:`WorkerHosts`.
    """
    asked = read_options(WorkersOptions, options)
    if not asked.workers:
        if asked.key_file is not None:
            raise SpecError("--key_file: found without --workers, expected both")
        return None
    timeout_s = getattr(options, "step_timeout", RunOptions().step_timeout_s)
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
    """Return what a worker needs to find its own copy of a model."""
    fields: dict[str, Any] = {"path": str(model.path), "digest": model_digest(model.path)}
    if model.hub is not None:
        commit = model.hub.commit
        parts = model.path.parts
        inside = parts[len(parts) - parts[::-1].index(commit) :] if commit in parts else ()
        fields |= {"repo": model.spec.name, "commit": commit, "file": "/".join(inside) or "."}
    return fields
