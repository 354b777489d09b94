"""Hosts on this machine: on the loopback address, or network namespaces joined by a wire."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
from helpers.clocks import PATIENCE_S
from helpers.processes import wait_for

from llmpq.spec.cluster import Cluster, DeviceGroup, Node

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
_CLONE_NEWNET = 0x40000000


def two_nodes() -> Cluster:
    """Return nodes a and b with one CPU each."""
    group = DeviceGroup(type="cpu", count=1, threads=1)
    return Cluster(name="two", nodes=tuple(Node(name=name, devices=(group,)) for name in "ab"))


@dataclass
class TestHost:
    """One host.

    Attributes:
        address: of the host.
        namespace: its network namespace, ``None`` on the loopback address.
    """

    __test__ = False

    address: str
    namespace: str | None = None
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, words: Sequence[str], errors: Path) -> subprocess.Popen[str]:
        """Start ``python -m`` with these words here; it is killed with the host."""
        before = [] if self.namespace is None else ["ip", "netns", "exec", self.namespace]
        with errors.open("a") as file:
            process = subprocess.Popen(
                [*before, sys.executable, "-m", *words],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT), "LLMPQ_STORE": "off"},
            )
        self.processes.append(process)
        return process

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in this host's network."""
        found: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                if self.namespace is not None:
                    with Path(f"/var/run/netns/{self.namespace}").open() as file:
                        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                            raise OSError(ctypes.get_errno(), "setns")
                found.append(function())
            except BaseException as error:  # it is raised in the caller's thread
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return found[0]

    def set_wire(self, state: str) -> None:
        """Take the interface up or down."""
        assert self.namespace is not None
        subprocess.run(["ip", "-n", self.namespace, "link", "set", "eth0", state], check=True)


@contextlib.contextmanager
def two_hosts(kind: str) -> Iterator[list[TestHost]]:
    """Yield two hosts: ``loopback`` or ``namespaces``, which need root."""
    with contextlib.ExitStack() as stack:
        if kind == "loopback":
            made = [TestHost(address="127.0.0.1") for _ in range(2)]
        else:
            if os.geteuid() != 0:
                pytest.skip("network namespaces need root")
            from tools.boxes.wire import Link, hosts  # noqa: PLC0415  of the repository

            link = Link(bytes_per_s=125e6, delay_s=1e-3)
            spaces = stack.enter_context(hosts({(0, 1): link}, 2))
            made = [TestHost(address=one.address, namespace=one.name) for one in spaces]
        try:
            yield made
        finally:
            for host in made:
                for process in host.processes:
                    process.kill()
                    process.communicate()


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for_text(file: Path, text: str, count: int = 1) -> None:
    """Wait until a file has a text ``count`` times."""
    wait_for(
        lambda: file.read_text(encoding="utf-8"),
        lambda found: found.count(text) >= count,
        PATIENCE_S,
    )
