"""Other hosts of a command, whatever carries their messages: devices, losses, time for a plan."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from helpers.small_host import small_host

from llmpq.cli.workers.hosts import OtherHost, OtherHosts
from llmpq.cli.workers.lender import HostLimits
from llmpq.cli.workers.link import MeasuredLink
from llmpq.errors import CapacityError, InfeasibleError, SpecError, StageError
from llmpq.options.run import WorkersOptions
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.fields import to_json
from llmpq.units import GIB, MIB

LINK = MeasuredLink(latency_s=1e-4, out_bytes_per_s=2e9, in_bytes_per_s=1e9)


class Scripted:
    """A connection whose other end answers at once, until it is lost."""

    def __init__(self, name: str, answer: Callable[[str], dict[str, Any]]) -> None:
        self.name = name
        self.lost: str | None = None
        self.sent: list[str] = []
        self._answer = answer
        self._received: deque[dict[str, Any]] = deque()

    def _check(self) -> None:
        if self.lost is not None:
            raise StageError(f"{self.name}: {self.lost}")

    def send(self, kind: str, **_: object) -> None:
        self._check()
        self.sent.append(kind)
        self._received.append(self._answer(kind))

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        del timeout_s
        if not self._received:
            self._check()
            return None
        return self._received.popleft()

    def is_there(self) -> bool:
        return self.lost is None

    def leave(self) -> None:
        self.close()

    def close(self) -> None:
        self.lost = self.lost or "closed"


def devices(kind: str) -> dict[str, Any]:
    return {"kind": kind, "cluster": to_json(small_host(300))}


def failing(kind: str) -> dict[str, Any]:
    return {"kind": "error", "status": 2, "message": f"{kind} failed"}


class Named(OtherHosts):
    """Hosts with scripted connections."""

    TITLE = "machine"

    def __init__(self, connections: list[Scripted], replan_timeout_s: float = 600) -> None:
        self._connections = connections
        super().__init__(WorkersOptions(replan_timeout_s=replan_timeout_s), 600, "llmpq test")

    def _connect_all(self) -> None:
        for one in self._connections:
            title = f"{self.TITLE} {one.name}"
            host = OtherHost(
                name=one.name,
                title=title,
                connection=one,
                address=("127.0.0.1", 1),
                here="127.0.0.1",
                link=LINK,
            )
            self._hosts.append(host)


def test_devices_of_all_hosts_and_links_with_the_slower_direction_make_one_cluster():
    found = Named([Scripted("b", devices), Scripted("c", devices)]).joined(small_host(200))
    assert [one.label for one in found.devices] == ["here/cpu#0", "b/cpu#0", "c/cpu#0"]
    assert [one.memory_bytes for one in found.devices] == [200 * MIB, 300 * MIB, 300 * MIB]
    assert [link.between for link in found.links] == [("here", "b"), ("here", "c")]
    assert {link.bytes_per_s for link in found.links} == {1e9}


def test_an_error_of_one_host_leaves_no_answer_of_another_unread():
    answers = [failing, devices, devices]

    def answer(kind: str) -> dict[str, Any]:
        return answers.pop(0)(kind)

    first = Scripted("b", answer)
    second = Scripted("c", devices)
    hosts = Named([first, second])
    with pytest.raises(SpecError, match="machine b: devices failed"):
        hosts.joined(small_host(200))
    assert len(hosts.joined(small_host(200)).devices) == 3
    second.lost = "gone"
    with pytest.raises(StageError, match="c: gone"):
        hosts.joined(small_host(200))
    assert first.sent == ["devices"] * 3
    assert first.receive(0) is None


def lost_one(replan_timeout_s: float = 600) -> Named:
    """Return two hosts with ranks, of which one is lost."""
    connections = [Scripted(name, lambda kind: {"kind": kind}) for name in "bc"]
    hosts = Named(connections, replan_timeout_s)
    for host in hosts._hosts:
        host.is_used = True
    connections[0].lost = "gone"
    return hosts


def test_ranks_of_the_others_end_when_a_host_is_lost(capsys):
    hosts = lost_one()
    assert hosts.drop_lost()
    assert [host.connection.sent for host in hosts._hosts] == [["stop"]]
    assert capsys.readouterr().err == "llmpq test: machine b is lost: gone\n"
    assert not hosts.drop_lost()


def test_a_plan_that_takes_too_long_is_an_error_with_the_limit():
    hosts, never = lost_one(replan_timeout_s=0.05), threading.Event()
    hosts._next = never.wait
    with pytest.raises(InfeasibleError, match=r"were lost within 0\.05 s; --replan_timeout"):
        hosts.next_start()
    never.set()


@pytest.mark.parametrize("kind", [InfeasibleError, CapacityError, SpecError])
def test_why_there_is_no_plan_is_said(kind):
    hosts = lost_one()

    def replan():
        raise kind("it does not fit")

    hosts._next = replan
    with pytest.raises(kind, match="no plan without the hosts that were lost: it does not fit"):
        hosts.next_start()


def test_another_loss_while_planning_is_planned_again(capsys):
    hosts = lost_one()
    (left,) = (host.connection for host in hosts._hosts if host.name == "c")

    def replan():
        if left.lost is None:
            left.lost = "gone, too"
            raise StageError("c: gone, too")
        raise InfeasibleError("nothing is left")

    hosts._next = replan
    with pytest.raises(InfeasibleError, match="nothing is left"):
        hosts.next_start()
    assert "machine c is lost: gone, too" in capsys.readouterr().err


def test_without_a_loss_there_is_no_other_plan():
    hosts = Named([Scripted("b", devices)])
    hosts._next = pytest.fail
    assert hosts.next_start() is None


def test_a_part_of_a_host_is_planned_for():
    group = DeviceGroup(type="cpu", count=1, threads=8, memory_bytes=8 * GIB)
    gpus = tuple(DeviceGroup(type=kind, count=1, memory_bytes=GIB) for kind in ("t4", "v100"))
    host = Cluster(name="x", nodes=(Node(name="here", devices=(*gpus, group)),))

    def part(**limits: int) -> list[tuple[str, int | None, int | None]]:
        found = HostLimits(**limits).applied(host).nodes[0].devices
        return [(one.type, one.threads, one.memory_bytes) for one in found]

    assert part(threads=2, gpus=1, memory_bytes=GIB) == [("t4", None, GIB), ("cpu", 2, GIB)]
    assert part(threads=64, gpus=0, memory_bytes=64 * GIB) == [("cpu", 8, 8 * GIB)]
    assert part(threads=0, gpus=9, memory_bytes=GIB) == [("t4", None, GIB), ("v100", None, GIB)]
    with pytest.raises(SpecError, match="found 0 CPUs and 0 GPUs of this host to plan for"):
        part(threads=0, gpus=0, memory_bytes=GIB)
