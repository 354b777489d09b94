"""Hosts that are further away: network namespaces joined by a wire with a rate and a delay.

The wire is a process between pairs of virtual interfaces that forwards packets at the rate and
after the delay asked for, because not every kernel has ``netem``. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MTU = 9000
PREFIX = "llmpq-"
_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)  # transmit checksums, TSO, GSO, GRO: whole packets only
_PACKET_IGNORE_OUTGOING = 23
_SOL_PACKET = 263
_BURST = 64
_MAC_BYTES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one direction between two hosts carries."""

    bytes_per_s: float
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A namespace with one interface, ``eth0``."""

    name: str
    address: str


@contextlib.contextmanager
def hosts(links: Mapping[tuple[int, int], Link], count: int) -> Iterator[list[Host]]:
    """Make ``count`` hosts and a wire between them; all is removed again.

    Args:
        links: by pair of hosts, the lower number first.
        count: number of hosts.
    """
    tag = os.getpid() % 10000
    found = [
        Host(name=f"{PREFIX}{tag}-{number}", address=f"10.77.0.{number + 1}")
        for number in range(count)
    ]
    ends = [f"lpq{tag}-{number}" for number in range(count)]
    try:
        for host, end in zip(found, ends, strict=True):
            _make(host, end)
        wire = os.fork()
        if wire == 0:
            _leave_with_parent()
            with contextlib.suppress(KeyboardInterrupt):
                _Wire(ends, links).carry()
            os._exit(1)
        try:
            yield found
        finally:
            os.kill(wire, signal.SIGKILL)
            os.waitpid(wire, 0)
    finally:
        for host, end in zip(found, ends, strict=True):
            for words in (("link", "del", end), ("netns", "del", host.name)):
                subprocess.run(["ip", *words], check=False, stderr=subprocess.DEVNULL)


def remove_hosts() -> list[str]:
    """Remove every host that a killed run left, and with it its interfaces; return their names."""
    done = subprocess.run(["ip", "netns", "list"], stdout=subprocess.PIPE, text=True, check=True)
    found = [line.split()[0] for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    for name in found:
        _ip("netns", "del", name)
    return found


def _make(host: Host, end: str) -> None:
    _ip("netns", "add", host.name)
    pair = ("mtu", str(MTU), "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _ip("link", "add", end, *pair)
    _ip("-n", host.name, "link", "set", "eth0", "mtu", str(MTU))
    _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for interface in ("lo", "eth0"):
        _ip("-n", host.name, "link", "set", interface, "up")
    _ip("link", "set", end, "up")
    subprocess.run(
        ["ip", "netns", "exec", host.name, sys.executable, str(Path(__file__)), "eth0"], check=True
    )
    _send_whole_packets(end)


def _ip(*words: str) -> None:
    """Run ip, which says itself what is wrong."""
    subprocess.run(["ip", *words], check=True)


def _leave_with_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _send_whole_packets(interface: str) -> None:
    """Have a veth end send packets as a real card would: no larger ones, checksums filled in."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for command in _OFFLOADS:
            value = (ctypes.c_uint32 * 2)(command, 0)
            request = struct.pack("16sP", interface.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):  # an offload this kernel does not have
                fcntl.ioctl(sock, _SIOCETHTOOL, request)


@dataclass(slots=True)
class _Wire:
    """A switch whose every pair of ports has a rate and a delay of its own."""

    interfaces: Sequence[str]
    links: Mapping[tuple[int, int], Link]
    ends: list[socket.socket] = field(default_factory=list)
    places: dict[bytes, int] = field(default_factory=dict)  # of hardware addresses
    free_s: dict[tuple[int, int], float] = field(default_factory=dict)
    waiting: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    count: Iterator[int] = field(default_factory=itertools.count)

    def carry(self) -> None:
        self.ends = [_end(interface) for interface in self.interfaces]
        while True:
            timeout = max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else None
            readable, _, _ = select.select(self.ends, [], [], timeout)
            for sock in readable:
                with contextlib.suppress(BlockingIOError):
                    for _ in range(_BURST):
                        self._queue(self.ends.index(sock), sock.recv(65536))
            while self.waiting and self.waiting[0][0] <= time.monotonic():
                _, _, target, data = heapq.heappop(self.waiting)
                with contextlib.suppress(OSError):
                    self.ends[target].send(data)

    def _queue(self, source: int, data: bytes) -> None:
        self.places[data[_MAC_BYTES : 2 * _MAC_BYTES]] = source
        target = self.places.get(data[:_MAC_BYTES])
        everyone = range(len(self.ends)) if target is None else (target,)
        for other in everyone:
            if other == source:
                continue
            link = self.links[min(source, other), max(source, other)]
            begin_s = max(self.free_s.get((source, other), 0.0), time.monotonic())
            self.free_s[source, other] = begin_s + len(data) / link.bytes_per_s
            due_s = self.free_s[source, other] + link.delay_s
            heapq.heappush(self.waiting, (due_s, next(self.count), other, data))


def _end(interface: str) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sock.bind((interface, 0))
    sock.setblocking(False)
    return sock


if __name__ == "__main__":
    _send_whole_packets(sys.argv[1])
